"""Kernels of linear layers, RMSNorm, gated linear units and the rotation, as autograd functions.

On a CPU, torch computes fp32 products with MKL, which uses AVX-512 on Intel's processors only. On other
processors oneDNN takes less than half the time; torch uses it for bf16 and fp16 anyway. RMSNorm and gated
linear units are computed in chunks that stay in the CPU's cache.

Shapes: R rows, M, K and N the sizes of a product, I intermediate_size, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from llm_pretrain.hardware import processor

HAS_TRITON = find_spec("triton") is not None
"""Whether Triton is installed, the compiler of some kernels."""

GPU_TYPES = {"cuda"}
"""Device types that use GPU kernels; a simulation adds its own device type."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of `training.precision` and of written weights."""

F_ = TypeVar("F_", bound=Callable[..., Any])


def autocast(device_type: str, precision: str) -> AbstractContextManager[Any]:
    """A context manager for forward passes in this precision; it can be entered several times."""
    return nullcontext() if precision == "fp32" else torch.autocast(device_type, DTYPES[precision])


def uncompiled(function: F_) -> F_:
    """A decorator for functions that `torch.compile` leaves out of its graphs.

    `torch.compiler.disable` would import the compiler even if nothing is compiled, which takes two seconds of
    CPU time.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*arguments)

    return call  # type: ignore[return-value]  # the same signature


def is_gpu(device: torch.device) -> bool:
    """Whether a device uses GPU kernels."""
    return device.type in GPU_TYPES


def runs_triton(device: torch.device) -> bool:
    """Whether a device uses the kernels in Triton."""
    return is_gpu(device) and HAS_TRITON


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or `x` itself if it is float64 (tests compare with float64 models)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer multiplies `x`: autocast's type inside an autocast region."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is the faster library for fp32 products: on AVX-512 processors not made by Intel."""
    capable = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and "intel" not in processor("vendor_id").lower()


def builds_code_per_shape(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the first product of each new shape is slow.

    oneDNN generates machine code for every combination of sizes, which takes 0.3 ms. It caches the code of
    the last 1024 combinations.
    """
    if device.type != "cpu":
        return False
    return dtype.itemsize < 4 or (dtype == torch.float32 and prefers_onednn())


def uses_onednn(x: Tensor) -> bool:
    """Whether `product` calls `onednn_product` for the left factor `x`."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn()


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`left @ right`, [M, K] and [K, N] in one type, in any memory order; written to `out` if given."""
    if uses_onednn(left):
        result = onednn_product(left, right)
        return result if out is None else out.copy_(result)
    return torch.mm(left, right, out=out)


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` by oneDNN, fp32 [M, K] and [K, N] on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """`F.linear` without bias by `onednn_product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        grad_x = onednn_product(grad, weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = onednn_product(grad.t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, [..., K] and [N, K] to [..., N], in autocast's type inside an autocast region."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if on_cpu and x.dim() > 1 and x.numel() > 0 and not torch.compiler.is_compiling() and prefers_onednn():
        return _OneDnnLinear.apply(x, weight)  # pyright: ignore[reportReturnType] (torch's stub of apply)
    return F.linear(x, weight)


_SUM_CHUNK = 1 << 17
"""Elements of a gradient that a CPU sums at a time. Adding bf16 to fp32 makes an fp32 copy, which so stays in
the cache: the backward pass of norm and sum for [2048, 512] takes 30 % less time."""


class _SharedInput(torch.autograd.Function):
    """`count` views of one copy of x in `dtype`; the gradients of the views are summed in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        low = x.to(dtype)
        return tuple(low.view_as(low) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.empty(grads[0].shape, dtype=ctx.dtype, device=grads[0].device)
        size = _SUM_CHUNK if total.device.type == "cpu" else max(1, total.numel())
        chunks = (each.reshape(-1).split(size) for each in (total, *grads))
        for part, first, *others in zip(*chunks, strict=True):
            part.copy_(first)
            for each in others:
                part.add_(each)
        return total, None, None


def apply_linears(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """`tuple(linear(x) for linear in linears)`, with the gradients of x summed in x's type.

    Under autocast, x is cast once. Autocast alone would cast x for each linear layer, keep every copy for the
    backward pass, and sum the gradients in the low-precision type. A compiled graph casts x once by itself.
    """
    dtype = product_dtype(x)
    if torch.compiler.is_compiling() or (x.device.type != "cpu" and x.dtype == dtype):
        return tuple(linear(x) for linear in linears)
    shared: Any = _SharedInput.apply(x, dtype, len(linears))
    return tuple(linear(each) for linear, each in zip(linears, shared, strict=True))


_NORM_CHUNK = 1 << 18
"""Elements that are normalised at a time; half as many and twice as many take 5 to 20 % longer."""
_GATED_CHUNK = 1 << 17
"""Elements of the gate that are computed at a time."""


def uses_cpu_kernels(x: Tensor) -> bool:
    """Whether x takes `rms_norm` and `gated`. A compiled graph does not: it fuses torch's operations."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _row_chunks(elements: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors [R, ...] into equal ranges of rows, of about `elements` elements in the first tensor."""
    rows = max(1, elements // tensors[0].shape[1])
    return zip(*(each.split(rows) for each in tensors), strict=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in at least fp32.

    Args:
        x: [..., N].
        weight: [N].
        eps: Added to the mean square.

    Returns:
        [..., N] in the type of x or of weight, whichever is wider.
    """
    return _RMSNormFunction.apply(x, weight, eps)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _RMSNormFunction(torch.autograd.Function):
    """Saves x and each row's scale for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, wide_weight = x.reshape(-1, x.shape[-1]), at_least_fp32(weight)
        scale = rows.new_empty(len(rows), 1, dtype=torch.promote_types(x.dtype, torch.float32))
        out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
        for part, part_scale, out_part in _row_chunks(_NORM_CHUNK, rows, scale, out.view(rows.shape)):
            wide = at_least_fp32(part)
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=part_scale)
            part_scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out_part.copy_((wide * part_scale).mul_(wide_weight))
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        x, weight, scale = ctx.saved_tensors
        rows, wide_weight = x.reshape(-1, x.shape[-1]), at_least_fp32(weight)
        grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(wide_weight)
        chunks = _row_chunks(_NORM_CHUNK, rows, scale, grad_x, grads[0].reshape(rows.shape))
        for part, part_scale, grad_x_part, grad in chunks:
            wide_grad_x, part_grad_weight = _rms_norm_gradients(
                at_least_fp32(part), part_scale, wide_weight, at_least_fp32(grad)
            )
            grad_x_part.copy_(wide_grad_x)
            grad_weight.add_(part_grad_weight)
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


def _rms_norm_gradients(x: Tensor, scale: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x * scale * weight` for x [R, N] and weight [N], all in one type.

    torch's kernel for layer normalisation computes them in two passes instead of nine. With a mean of zero,
    the kernel's result differs in one term: the kernel subtracts scale times the row's mean of
    `grad * weight`. This function adds the term back.
    """
    size = len(weight)
    mean = torch.zeros_like(scale)
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, [size], mean, scale, weight, None, [True, True, False]
    )
    subtracted = torch.mv(grad, weight)[:, None].mul_(scale).div_(size)
    return grad_x.add_(subtracted), grad_weight


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up`, all [..., I] and contiguous."""
    return _GatedFunction.apply(gate, up, activation)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _GatedFunction(torch.autograd.Function):
    """Saves gate and up only; eager autograd would save activation(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = torch.empty_like(gate)
        flat = (each.view(-1, gate.shape[-1]) for each in (out, gate, up))
        for out_part, gate_part, up_part in _row_chunks(_GATED_CHUNK, *flat):
            activation.write(gate_part, out_part)
            out_part.mul_(up_part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), activation = ctx.saved_tensors, ctx.activation
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        tensors = (grads[0].contiguous(), gate, up, grad_gate, grad_up)
        flat = (each.view(-1, gate.shape[-1]) for each in tensors)
        for grad, gate_part, up_part, grad_gate_part, grad_up_part in _row_chunks(_GATED_CHUNK, *flat):
            activation.write(gate_part, grad_up_part)
            grad_up_part.mul_(grad)
            activation.write_gradient(grad * up_part, gate_part, grad_gate_part)
        return grad_gate, grad_up, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (d, d + D/2) of x [..., D] by the angle of cos and sin [..., D/2]; on any device."""
    return _RotateFunction.apply(x, cos, sin)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _RotateFunction(torch.autograd.Function):
    """The backward pass of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x)
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=direction)
    return out


class Activation(NamedTuple):
    """An elementwise function, in the forms that autograd and our own backward passes need."""

    function: Callable[[Tensor], Tensor]
    """The differentiable function. Autograd saves only its input, as the memory estimate assumes."""
    write: Callable[[Tensor, Tensor], object]
    """`write(x, out)` writes the function of x to `out`."""
    write_gradient: Callable[[Tensor, Tensor, Tensor], object]
    """`write_gradient(grad, x, out)` writes `grad` times the derivative at x to `out`."""


class _SquaredReLU(torch.autograd.Function):
    """Saves x only; eager autograd would save relu(x) too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.relu().mul_(2).mul_(grads[0])


_aten: Any = torch.ops.aten

ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(
        F.silu,
        lambda x, out: _aten.silu.out(x, out=out),
        lambda grad, x, out: _aten.silu_backward.grad_input(grad, x, grad_input=out),
    ),
    "gelu_pytorch_tanh": Activation(
        functools.partial(F.gelu, approximate="tanh"),
        lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
        lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out),
    ),
    "relu2": Activation(
        _SquaredReLU.apply,
        lambda x, out: torch.clamp(x, min=0, out=out).square_(),
        lambda grad, x, out: torch.clamp(x, min=0, out=out).mul_(2).mul_(grad),
    ),
}
SILU = ACTIVATIONS["silu"]
