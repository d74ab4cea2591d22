"""Activations of the gate in feed-forward networks, by `model.hidden_act`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
