"""The small parts of a decoder layer: linear map, rotation, dense SwiGLU.

Each computes its delicate part in at least fp32 by itself, whatever autocast says. No routing and no
attention here; normalisation is in `norms.py`.

Shapes: B sequences, S positions, H hidden_size, D head_dim, I intermediate_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.model.products import linear


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in float64 where it is float64 already (a float64 model is the tests' reference)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The type in which a linear map of `hidden` runs: autocast's where it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


class Linear(nn.Linear):
    """A linear map without bias that starts at zero; `initialize_weights` draws the values."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], by the processor's faster library; under autocast in its type."""
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight)
        return linear(input, self.weight)


class Embedding(nn.Embedding):
    """A token embedding that starts at zero; `initialize_weights` draws the values."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _RotaryFunction(torch.autograd.Function):
    """Rotation of the pairs (d, d + D/2); its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x)
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=direction)
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, S, heads, D] by the half-rotation convention of Llama and Qwen3.

    Runs in the tables' type (at least fp32), also under autocast.
    """
    if torch.compiler.is_compiling():  # writes into views would end the graph, and it fuses this by itself
        first, second = x.to(cos.dtype).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return _RotaryFunction.apply(x.to(cos.dtype), cos, sin)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _SharedCast(torch.autograd.Function):
    """`copies` times x in one low-precision copy; their gradients are summed in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, copies: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        low = x.to(dtype)
        return (low, *(low.view_as(low) for _ in range(copies - 1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, *others = grads
        total = first.to(ctx.dtype)
        for each in others:
            total.add_(each)
        return total, None, None


def for_products(x: Tensor, copies: int) -> tuple[Tensor, ...]:
    """x for `copies` matrix products, in autocast's type where autocast is on.

    Autocast alone would cast x for each product anew, and keep every copy for the backward pass.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.compiler.is_compiling():  # which casts once by itself
        return (x,) * copies
    dtype = torch.get_autocast_dtype(device)
    if x.dtype == dtype or x.dtype == torch.float64:
        return (x,) * copies
    return _SharedCast.apply(x, dtype, copies)  # pyright: ignore[reportReturnType] (torch's stub of apply)


_CHUNK_ELEMENTS = 1 << 17
"""Elements worked on at a time on a CPU: what stays in its cache from one operation to the next."""


class _SwiGLUFunction(torch.autograd.Function):
    """`silu(gate) * up` that keeps gate and up alone; eager autograd would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        flat = (each.view(-1, gate.shape[-1]) for each in (out, gate, up))
        for part, gate_part, up_part in row_parts(_CHUNK_ELEMENTS, *flat):
            torch.ops.aten.silu.out(gate_part, out=part)
            part.mul_(up_part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        whole = (grads[0].contiguous(), gate, up, grad_gate, grad_up)
        flat = (each.view(-1, gate.shape[-1]) for each in whole)
        for grad, gate_part, up_part, into_gate, into_up in row_parts(_CHUNK_ELEMENTS, *flat):
            torch.ops.aten.silu.out(gate_part, out=into_up)
            into_up.mul_(grad)
            inner = grad * up_part
            torch.ops.aten.silu_backward.grad_input(inner, gate_part, grad_input=into_gate)
        return grad_gate, grad_up


def row_parts(elements: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of tensors [R, ...], part by part, about `elements` of the first one at a time."""
    rows = max(1, elements // tensors[0].shape[1])
    return zip(*(each.split(rows) for each in tensors), strict=True)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, all [..., I] and contiguous on a CPU."""
    if gate.device.type != "cpu" or torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGLUFunction.apply(gate, up)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class FeedForward(nn.Module):
    """Dense SwiGLU (arXiv:2002.05202): `down(silu(gate(x)) * up(x))`, [..., H] to [..., H]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """x as it is, or as `for_products` gave it for two products."""
        for_gate, for_up = for_products(x, 2) if isinstance(x, Tensor) else x
        return self.down_proj(swiglu(self.gate_proj(for_gate), self.up_proj(for_up)))
