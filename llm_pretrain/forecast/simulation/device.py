"""A simulated GPU: a device type of torch whose fake tensors have sizes but no values.

The device is registered from Python, which needs neither CUDA nor a compiler. Its tensors take the code paths
of an NVIDIA GPU: autocast's rules, and the kernels that training would choose. The registration changes the
whole process, so a simulation runs in a separate process.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map

from llm_pretrain.model.kernels import GPU_TYPES

NAME = "simulated"
"""The device type, as in `torch.device("simulated")`."""
_AUTOCAST = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"),
    *("scaled_dot_product_attention", "_grouped_mm"),
)
"""Operations that autocast computes in low precision."""
_SINGLE_KERNELS = ("silu_backward", "_fused_rms_norm")
"""Operations that are one kernel on a GPU; without a kernel torch splits them into several operations."""
_scores_attention = F.scaled_dot_product_attention
autocast_copies: dict[int, Tensor] = {}
"""`id` of a parameter -> its copy in low precision, kept until the outermost autocast region ends."""
_libraries: list[torch.library.Library] = []
"""Registrations, which end when they are deleted."""


class _Stream:
    """A stream or an event on which nothing is outstanding."""

    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device(NAME, 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record


class _Module(types.ModuleType):
    """What torch expects of the module of a kind of device, such as `torch.cuda`."""

    Stream = Event = device = _Stream

    def _always(self, *_: Any) -> bool:
        return True

    def _nothing(self, *_: Any) -> None:
        pass

    def _zero(self, *_: Any) -> int:
        return 0

    def stream(self, *_: Any) -> _Stream:
        return _Stream()

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def _is_in_bad_fork(self) -> bool:
        return False

    is_available = is_initialized = _always
    set_device = synchronize = manual_seed_all = set_rng_state = empty_cache = _nothing
    current_device = _zero
    current_stream = default_stream = stream


def register() -> torch.device:
    """Make the device known to torch, once in a process; returns it."""
    if not _libraries:
        from torch.testing._internal.distributed.fake_pg import _create_fake_pg
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, _Module(f"torch.{NAME}"))
        dist.Backend.register_backend(f"fake_{NAME}", _create_fake_pg, extended_api=True, devices=[NAME])
        _register_autocast()
        register_kernels("PrivateUse1")
        GPU_TYPES.add(NAME)
    return torch.device(NAME, 0)


def _register_autocast() -> None:
    """Register the rules of autocast on a GPU: products in low precision, everything else unchanged.

    As in autocast, a parameter is cast once, and its copy is kept until the outermost region ends.
    """
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    keys: Any = torch._C.DispatchKey
    excluded = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if (kept := autocast_copies.get(id(value))) is not None:
            return kept
        copy = value.to(torch.get_autocast_dtype(NAME))
        if value.is_leaf and value.requires_grad and torch.is_autocast_cache_enabled():
            autocast_copies[id(value)] = copy
        return copy

    def low(operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

        return call

    for name in _AUTOCAST:
        library.impl(name, low(getattr(torch.ops.aten, name).default))
    _libraries.extend((fallback, library))


def register_kernels(dispatch_key: str) -> None:
    """Make torch call operations that it would otherwise decompose; fake tensors know the results' shapes.

    Args:
        dispatch_key: Dispatch key of the device, such as `PrivateUse1`.
    """

    def is_called(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    library = torch.library.Library("aten", "IMPL", dispatch_key)
    for name in _SINGLE_KERNELS:
        library.impl(name, is_called)
    # This addmm adds in place. Its decomposition makes tensors of the result's size, and fails in torch 2.11.
    decomposition_table.pop(torch.ops.aten.addmm.dtype_out, None)
    shapes = torch.library.Library("aten", "IMPL", "Meta")
    shapes.impl("addmm.dtype_out", lambda total, *_, out, **__: out, allow_override=True)
    _libraries.extend((library, shapes))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as on a GPU: flash attention in low precision without a mask, else
    memory-efficient attention, which takes the mask as a bias."""
    operations: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        flash = operations._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal)[0]
    if enable_gqa:  # has no memory-efficient kernel
        return _scores_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=True)
    bias = attn_mask
    if attn_mask is not None:
        no_bias, low = (query.new_full((), value) for value in (0.0, -torch.inf))
        bias = torch.where(attn_mask, no_bias, low).expand(*query.shape[:2], -1, -1)
    efficient = operations._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal)[0]


@torch.library.custom_op("simulated::log_partition", mutates_args=())
def log_partition(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of `cross_entropy.log_partition`."""
    raise NotImplementedError


@log_partition.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return lse, torch.empty_like(lse)


@torch.library.custom_op("simulated::write_softmax_gradient", mutates_args=("logits",))
def write_softmax_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, softmax_scale: Tensor, target_scale: Tensor
) -> None:
    """Shapes of `cross_entropy.write_softmax_gradient`."""
    raise NotImplementedError


@write_softmax_gradient.register_fake
def _(logits: Tensor, labels: Tensor, lse: Tensor, softmax_scale: Tensor, target_scale: Tensor) -> None:
    pass


class GroupedProduct(torch.autograd.Function):
    """Shapes of `grouped_mm.grouped_mm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _rows_times_weights(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        return _rows_times_weights(grad, weight.transpose(1, 2)), _rows_times_rows(x, grad, weight), None


@torch.library.custom_op("simulated::rows_times_weights", mutates_args=())
def _rows_times_weights(x: Tensor, weight: Tensor) -> Tensor:
    """[R, K] and [E, K, N] to [R, N]."""
    raise NotImplementedError


@_rows_times_weights.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("simulated::rows_times_rows", mutates_args=())
def _rows_times_rows(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """[R, K] and [R, N] to the gradient of a weight."""
    raise NotImplementedError


@_rows_times_rows.register_fake
def _(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)
