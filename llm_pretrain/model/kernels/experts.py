"""Experts on tokens sorted by expert: `streamed_experts` for a CPU, `grouped_experts` for CUDA.

Shapes: T tokens, H hidden_size, E experts, K experts per token, I moe_intermediate_size, R = T*K assignments
sorted by expert, n rows of one expert, P rows of all experts, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm_pretrain.model.kernels.layers import (
    SILU,
    Activation,
    builds_code_per_shape,
    is_gpu,
    product,
    runs_triton,
    uncompiled,
    uses_onednn,
)

_SIZE_BITS = 6
"""Significant bits of padded sizes: 32 sizes from one power of two to the next, and 1 % more rows."""
_ALIGNMENT_BYTES = 16
"""torch's grouped_mm requires that rows of its operands begin at multiples of this."""
_GROUPS_BELOW = 1024
"""torch's grouped_mm requires fewer groups than this."""
_GROUPED_CAPABILITY = (9, 0)
"""Lowest compute capability on which torch's grouped_mm is one kernel."""
_TRITON_CAPABILITY = (8, 0)
"""Lowest compute capability on which Triton has products in bf16, fp16 and fp32."""


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    dtype: torch.dtype | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """The definition: every expert for every token, then the weighted sum of the chosen ones.

    Args:
        x: [T, H].
        gate_up: [E, 2I, H], gate above up.
        down: [E, H, I].
        weights: [T, K].
        chosen: int64 [T, K], distinct in each row.
        dtype: Type of the products; default: x's.
        activation: Activation of the gate.

    Returns:
        [T, H] in x's type: `Σ_k weights[t, k] · GLU_{chosen[t, k]}(x[t])`, with gated linear units GLU.
    """
    x_TH, gate_up, down, weights = (each.to(dtype or x.dtype) for each in (x, gate_up, down, weights))
    gate_TEI, up_TEI = torch.einsum("th,eih->tei", x_TH, gate_up).chunk(2, -1)
    out_TEH = torch.einsum("tei,ehi->teh", activation.function(gate_TEI) * up_TEI, down)
    weights_TE = weights.new_zeros(len(x), len(gate_up)).scatter(1, chosen, weights)
    return torch.einsum("te,teh->th", weights_TE, out_TEH).to(x.dtype)


def top_experts(ranking: Tensor, top_k: int) -> Tensor:
    """The experts of the `top_k` highest scores in any order, int64 [..., K]; ties are broken arbitrarily.

    On a CPU, torch's `topk` takes longer than the router's product, while NumPy sorts 64-bit integers with
    vector instructions. So each key holds a score in its high bits, in the scores' order, above the index.

    Args:
        ranking: [..., E], without gradient.
        top_k: K.
    """
    on_cpu = ranking.device.type == "cpu" and ranking.dtype == torch.float32
    if not on_cpu or torch.compiler.is_compiling():
        return ranking.topk(top_k, dim=-1, sorted=False).indices
    bits = ranking.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats sort in reverse order
    keys = (ordered.long() << 32) | torch.arange(ranking.shape[-1])
    return torch.from_numpy(np.sort(keys.numpy(), axis=-1)[..., -top_k:]) & 0xFFFFFFFF


class _Rows(NamedTuple):
    """The row of each assignment."""

    sizes: list[int]
    """Rows of each expert, padding included."""
    token: Tensor
    """int64 [P], each row's token; a padding row has token 0 and a routing weight of 0."""
    position: Tensor
    """int64 [T, K], each assignment's row."""


def _padded(rows: int) -> int:
    step = 1 << max(0, rows.bit_length() - _SIZE_BITS)
    return -(-rows // step) * step


def _sort_by_expert(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> _Rows:
    """Sort the assignments by expert; where code is built per shape, pad experts to one of few sizes."""
    flat = chosen.flatten()
    if flat.device.type == "cpu" and num_experts < 2**15:
        # NumPy's radix sort of 16-bit integers takes a tenth of the time of torch's stable sort.
        order = torch.from_numpy(np.argsort(flat.to(torch.int16).numpy(), kind="stable"))
    else:
        order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    sizes = counts.tolist()
    row = torch.arange(len(order), device=flat.device)
    if builds_code_per_shape(dtype, flat.device):
        sizes = [_padded(size) for size in sizes]
        padding = torch.tensor(sizes) - counts
        row += torch.repeat_interleave(padding.cumsum(0) - padding, counts)
    token = order.new_zeros(sum(sizes)).index_copy_(0, row, order // chosen.shape[1])
    position = torch.empty_like(order).index_copy_(0, order, row)
    return _Rows(sizes, token, position.view_as(chosen))


class _Sum:
    """The sum of each token's rows.

    In bf16 and fp16, rows are collected in [P, H] and summed in one pass that accumulates in fp32: adding
    rows to an fp32 sum expert by expert takes four times as long. In fp32, each expert's rows are added.
    """

    def __init__(self, rows: _Rows, like: Tensor, dtype: torch.dtype):
        self.rows, self.like = rows, like
        self.collects = dtype.itemsize < 4
        if self.collects:
            self.rows_PH = torch.empty(len(rows.token), like.shape[1], dtype=dtype, device=like.device)
            self.parts = self.rows_PH.split(rows.sizes)
        else:
            self.sum = torch.zeros(like.shape, dtype=dtype, device=like.device)

    def add(self, part: _Part, left: Tensor, right: Tensor) -> None:
        """Add the rows `left @ right` of an expert."""
        if self.collects:
            product(left, right, self.parts[part.expert])
        else:
            self.sum.index_add_(0, part.token, product(left, right))

    def total(self) -> Tensor:
        """[T, H] in the type of `like`."""
        if not self.collects:
            return self.sum.to(self.like.dtype)
        return F.embedding_bag(self.rows.position, self.rows_PH, mode="sum").to(self.like.dtype)


class _Part(NamedTuple):
    """An expert that has rows: its index, the token of each row [n] and the row's routing weight [n, 1]."""

    expert: int
    token: Tensor
    weight: Tensor


def _parts(rows: _Rows, weight_P: Tensor) -> list[_Part]:
    columns = zip(rows.token.split(rows.sizes), weight_P[:, None].split(rows.sizes), strict=True)
    return [_Part(expert, *column) for expert, column in enumerate(columns) if rows.sizes[expert]]


def _activations(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, [n, ...], in the faster memory order.

    torch's product stores activations [n, 2I] by column, so that gate and up are both contiguous for the
    elementwise operations. With oneDNN they are stored by row: its fp32 product copies other left operands.
    """
    return product(left, right) if uses_onednn(left) else product(right.t(), left.t()).t()


def _write_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    """Write `left @ right` into the gradient of a weight, which may have another type."""
    if gradient.dtype == left.dtype:
        product(left, right, gradient)
    else:
        gradient.copy_(product(left, right))


class _StreamedExperts(torch.autograd.Function):
    """Computes one expert after another; gradients are written in place into one tensor per parameter.

    The routing weight is applied before `down_proj`, so that the routing weight's gradient needs no saved
    output. The backward pass casts weights again: to read saved casts from memory takes as long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        chosen: Tensor,
        dtype: torch.dtype,
        activation: Activation,
    ) -> Tensor:
        rows = _sort_by_expert(chosen, len(gate_up), dtype)
        x_low = x.to(dtype)
        weight_P = x_low.new_zeros(len(rows.token)).index_copy_(
            0, rows.position.flatten(), weights.flatten().to(dtype)
        )
        gate_ups, downs, size = gate_up.unbind(0), down.unbind(0), down.shape[2]
        out, saved = _Sum(rows, x, dtype), []
        for part in _parts(rows, weight_P):
            rows_e = x_low.index_select(0, part.token)
            both = _activations(rows_e, gate_ups[part.expert].to(dtype).t())
            gate, up = both.split(size, 1)
            activated = activation.function(gate)
            out.add(part, (activated * up).mul_(part.weight), downs[part.expert].to(dtype).t())
            saved += both, activated
        ctx.save_for_backward(x, gate_up, down, rows.token, rows.position, weight_P, *saved)
        ctx.sizes, ctx.weights_dtype, ctx.activation = rows.sizes, weights.dtype, activation
        return out.total()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, token, position, weight_P, *saved = ctx.saved_tensors
        rows, dtype, size = _Rows(ctx.sizes, token, position), weight_P.dtype, down.shape[2]
        x_low, grad_low = x.to(dtype), grads[0].to(dtype)
        gate_ups, downs = gate_up.unbind(0), down.unbind(0)
        grad_x, grad_gate_up, grad_down = (
            _Sum(rows, x, dtype),
            torch.empty_like(gate_up),
            torch.empty_like(down),
        )
        grad_gate_ups, grad_downs = grad_gate_up.unbind(0), grad_down.unbind(0)
        grad_weight_P = weight_P.new_empty(len(token), dtype=ctx.weights_dtype)
        grad_weights = grad_weight_P.split(rows.sizes)
        for part, both, activated in zip(_parts(rows, weight_P), saved[::2], saved[1::2], strict=True):
            expert, (gate, up) = part.expert, both.split(size, 1)
            grad_rows = grad_low.index_select(0, part.token)
            grad = _activations(grad_rows, downs[expert].to(dtype))
            inner = activated * up
            torch.sum(inner * grad, 1, dtype=ctx.weights_dtype, out=grad_weights[expert])
            _write_product(grad_downs[expert], grad_rows.t(), inner.mul_(part.weight))
            grad.mul_(part.weight)
            grad_both = torch.empty_like(both)
            grad_gate, grad_up = grad_both.split(size, 1)
            torch.mul(grad, activated, out=grad_up)
            ctx.activation.write_gradient(grad.mul_(up), gate, grad_gate)
            _write_product(grad_gate_ups[expert], grad_both.t(), x_low.index_select(0, part.token))
            grad_x.add(part, grad_both, gate_ups[expert].to(dtype))
        for expert, count in enumerate(rows.sizes):
            if not count:
                grad_gate_ups[expert].zero_()
                grad_downs[expert].zero_()
        return grad_x.total(), grad_gate_up, grad_down, grad_weight_P[position], None, None, None


@uncompiled  # the number of rows of each expert, over which it loops, differs from batch to batch
def streamed_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    dtype: torch.dtype,
    activation: Activation = SILU,
) -> Tensor:
    """`experts_reference` with products in `dtype`, and sums over experts in at least fp32; returns x's type.

    It is correct on every device and in every type. On CUDA it synchronises once per call.
    """
    return _StreamedExperts.apply(x, gate_up, down, weights, chosen, dtype, activation)  # pyright: ignore[reportReturnType] (torch's stub of apply)


def grouped_requirement(device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """The unmet requirement of `grouped_experts` in words, or None.

    Args:
        device: The experts' device.
        dtype: Type of the experts' products.
        shape: E, H and I.
    """
    if not is_gpu(device):
        return f"a CUDA device instead of {device.type}"
    needed = triton_reason(device, dtype, shape)
    other = triton_requirement(device)
    return f"{needed}, or {other}" if needed and other else None


def triton_requirement(device: torch.device) -> str | None:
    """The unmet requirement of `triton_experts` in words, or None."""
    if not is_gpu(device):
        return f"a CUDA device instead of {device.type}"
    if runs_triton(device) and torch.cuda.get_device_capability(device) >= _TRITON_CAPABILITY:
        return None
    return "the package triton and compute capability {}.{}".format(*_TRITON_CAPABILITY)


def triton_reason(device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """What torch's `grouped_mm` needs and does not have on a GPU, in words; None if it can run.

    Without it, `grouped_mm` copies the groups' ends to the host, or raises. See `grouped_requirement`.
    """
    experts, hidden, intermediate = shape
    if not is_gpu(device):
        return None
    if dtype != torch.bfloat16:
        return f"products in bfloat16 instead of {str(dtype).removeprefix('torch.')}"
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    if hidden % unit or intermediate % unit:
        sizes = f"multiples of {unit} instead of {hidden} and {intermediate}"
        return f"model.hidden_size and model.moe_intermediate_size in {sizes}"
    if experts >= _GROUPS_BELOW:
        return f"fewer than {_GROUPS_BELOW} experts instead of {experts}"
    if (found := torch.cuda.get_device_capability(device)) < _GROUPED_CAPABILITY:
        return "compute capability {}.{} instead of {}.{}".format(*_GROUPED_CAPABILITY, *found)
    return None


class _Dispatch(torch.autograd.Function):
    """[T, ...] to sorted [R, ...]: each assignment gets a copy of its token.

    The backward pass of `_Dispatch` is `_Combine` and vice versa. So neither needs an atomic addition, and
    both are deterministic.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].sum(1), None, None


class _Combine(torch.autograd.Function):
    """Sorted [R, ...] to [T, ...]: each token gets the sum over its assignments."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return y[inverse].sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return grads[0][token], None, None


def dispatch(x: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
    """[T, ...] to [R, ...]: each assignment gets a copy of its token.

    Args:
        x: One row for each token.
        token: int64 [R], the token of each row of the result.
        inverse: int64 [T, K], the row of the result that each assignment has.
    """
    return _Dispatch.apply(x, token, inverse)  # pyright: ignore[reportReturnType] (torch's stub of apply)


def combine(y: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
    """[R, ...] to [T, ...]: each token gets the sum over its assignments; for arguments see `dispatch`."""
    return _Combine.apply(y, token, inverse)  # pyright: ignore[reportReturnType] (torch's stub of apply)


def inverse_order(order: Tensor, chosen: Tensor) -> Tensor:
    """int64 [T, K]: the index in `order`, int64 [R], of each assignment in `chosen` [T, K]."""
    position = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, position).view_as(chosen)


_Product = Callable[[Any, Tensor, Tensor], Tensor]
"""A function of rows [R, K] sorted by expert, weights [E, K, N] and the experts' ends int32 [E]: [R, N]."""


def _torch_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


def _triton_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    from llm_pretrain.model.kernels.grouped_mm import grouped_mm

    return grouped_mm(rows, weights, ends)


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    dtype: torch.dtype,
    activation: Activation = SILU,
    multiply: _Product = _torch_product,
) -> Tensor:
    """`experts_reference` by torch's grouped matrix products in `dtype`, or `multiply`; returns x's type.

    The groups' ends stay on the device. So the function never synchronises, and compiles to a single graph.
    """
    # keys of 32 bits, because a radix sort passes over them half as often as over 64 bits
    sorted_chosen, order = chosen.flatten().int().sort(stable=True)
    experts = torch.arange(len(gate_up), dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(sorted_chosen, experts, right=True, out_int32=True)
    inverse_TK, token_R = inverse_order(order, chosen), order // chosen.shape[1]

    x_R = dispatch(x.to(dtype), token_R, inverse_TK)
    weight_R1 = dispatch(weights.reshape(-1, 1), order, inverse_TK.view(-1, 1))
    gate, up = multiply(x_R, gate_up.to(dtype).transpose(1, 2), ends).chunk(2, -1)
    product = (activation.function(gate) * up * weight_R1).to(dtype)
    y_R = multiply(product, down.to(dtype).transpose(1, 2), ends)
    return combine(y_R, token_R, inverse_TK).to(x.dtype)


triton_experts = partial(grouped_experts, multiply=_triton_product)
"""`grouped_experts` by our own products in Triton, which also run where torch's cannot."""
