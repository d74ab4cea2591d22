"""The loss head in chunks: projection, cross-entropy, z-loss and their gradients without whole logits.

The same sums as `loss_head.py` makes of whole logits. The gradients are made in the forward pass, while a
chunk's logits are there, and only scaled in the backward pass, so that nothing is computed twice. Which head
runs is decided in `head.py`.

Shapes: T tokens, H hidden_size, V vocab_size, C tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_pretrain.model.layers import at_least_fp32, product_dtype
from llm_pretrain.model.loss_head import LossSums
from llm_pretrain.model.products import fp32_product, product, uses_onednn

_CPU_CHUNK = 1 << 24
"""Logits of a chunk on a CPU (64 MiB in fp32): fewer rows make the products slower, more gain nothing."""
_GPU_CHUNK = 1 << 27
"""Elsewhere, where a product needs thousands of rows to fill the device."""
_CACHED_ELEMENTS = 1 << 17
"""Logits that a CPU takes the softmax of at a time: what stays in its second cache."""
_PARTS = 4
"""In which a CPU computes the weight's gradient."""
_RATIO_TOLERANCE = 1e-5
"""Relative difference up to which two gradients stand in the ratio that the forward pass was told."""


class SumsAndGradients(NamedTuple):
    """What one pass over the tokens gives."""

    losses: Tensor
    """[T] cross-entropy, in at least fp32; 0 where masked, as the next."""
    squares: Tensor
    """[T] lse²."""
    grad_hidden: Tensor | None
    """[T, H]."""
    grad_weight: Tensor | None
    """[V, H]."""


class Scales(NamedTuple):
    """What the gradient is of: `loss` times the cross-entropy sum plus `z_loss` times the z-loss sum."""

    loss: Tensor | float
    z_loss: Tensor | float


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float, Wanted], SumsAndGradients]
"""From hidden [T, H], weight [V, H], labels int64 [T], mask bool [T], z_loss_coef and what is wanted."""


def fused_loss_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    z_loss_coef: float,
    kernel: Kernel | None = None,
) -> LossSums:
    """Cross-entropy and z-loss (PaLM, arXiv:2204.02311, section 5) sums of `hidden @ weight.T`.

    The products run in autocast's type where it is on, everything else in at least fp32; the weight's
    gradient is summed over chunks in at least fp32. Between forward and backward the gradients are held:
    T·H in the products' type and V·H in fp32, in place of the T·V logits. Without autograd (`no_grad`, or
    where nothing needs a gradient) none is computed. Masked tokens cost nothing on a CPU.

    The gradients are right whatever is done with the two sums, and cost nothing more where the objective is
    `loss + z_loss_coef * z_loss` times any factor. Another combination is computed anew in the backward
    pass, except on CUDA where both sums and a coefficient are in use: to look at the factors would be to
    wait for the device, so there another ratio than `z_loss_coef` fails a device-side assertion.

    Args:
        hidden: [B, S, H].
        weight: [V, H].
        labels: int64 [B, S], already shifted; anything where the mask is 0.
        mask: bool [B, S].
        z_loss_coef: The objective's coefficient of the z-loss.
        kernel: Computes sums and gradients of training in the place of this module's own code.
    """
    train = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    options = _Options(z_loss_coef, product_dtype(hidden), train, kernel)
    flat = (hidden.flatten(0, 1), weight, labels.flatten(), mask.flatten())
    loss, z_loss, losses = _FusedSums.apply(*flat, options)  # pyright: ignore[reportGeneralTypeIssues] (torch's stub of apply)
    return LossSums(loss, z_loss, losses.view(labels.shape))


class _Options(NamedTuple):
    z_loss_coef: float
    dtype: torch.dtype
    train: bool
    kernel: Kernel | None


class _FusedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (hidden, weight, labels, mask)
        wanted = Wanted(*(options.train and needed for needed in ctx.needs_input_grad[:2]))
        if options.kernel is not None and options.train:
            result = options.kernel(*tensors, options.z_loss_coef, wanted)
        else:
            result = sums_and_gradients(*tensors, Scales(1.0, options.z_loss_coef), wanted, options.dtype)
        ctx.save_for_backward(*tensors)
        ctx.options, ctx.wanted = options, wanted
        ctx.gradients = (result.grad_hidden, result.grad_weight)
        ctx.mark_non_differentiable(result.losses)
        ctx.set_materialize_grads(False)
        return result.losses.sum(), result.squares.sum(), result.losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        grad_loss, grad_z, _ = grads
        hidden, weight, labels, mask = ctx.saved_tensors
        # Taken away: scaling in place would spoil them for another backward pass, which computes them anew;
        # and a gradient that nothing else holds need not be copied into `.grad`.
        ready, ctx.gradients = ctx.gradients, None
        if ready is not None and grad_loss is not None and _in_ratio(grad_loss, grad_z, ctx.options):
            found = [None if gradient is None else gradient.mul_(grad_loss) for gradient in ready]
        else:
            del ready
            scales = Scales(0.0 if grad_loss is None else grad_loss, 0.0 if grad_z is None else grad_z)
            found = list(
                sums_and_gradients(hidden, weight, labels, mask, scales, ctx.wanted, ctx.options.dtype)[2:]
            )
        for place, like in enumerate((hidden, weight)):
            gradient = found[place]
            found[place] = None if gradient is None else gradient.to(like.dtype)
        return *found, None, None, None


def _in_ratio(grad_loss: Tensor, grad_z: Tensor | None, options: _Options) -> bool:
    """Whether what was computed in the forward pass is the gradient, but for a factor."""
    coefficient, on_host = options.z_loss_coef, grad_loss.device.type != "cuda"
    if coefficient == 0:
        return grad_z is None or (on_host and not grad_z.any())
    if grad_z is None:
        return False
    expected = coefficient * grad_loss
    near = (grad_z - expected).abs() <= _RATIO_TOLERANCE * expected.abs()
    if on_host:
        return bool(near)
    # What overflowed is no broken promise; the gradients say so themselves.
    kept = near | ~grad_loss.isfinite() | ~grad_z.isfinite()
    torch.ops.aten._assert_async.msg(kept, "the z-loss has another coefficient than the loss head was told")
    return True


def sums_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    scales: Scales,
    wanted: Wanted,
    dtype: torch.dtype,
) -> SumsAndGradients:
    """One pass over the tokens. hidden [T, H], weight [V, H], labels int64 [T], mask bool [T]."""
    kept = mask.nonzero()[:, 0] if hidden.device.type == "cpu" else None
    if kept is None or len(kept) == len(mask):
        return _chunks(hidden.to(dtype), weight.to(dtype), labels, mask, scales, wanted)
    some = _chunks(hidden[kept].to(dtype), weight.to(dtype), labels[kept], mask[kept], scales, wanted)
    losses, squares, grad_hidden = (
        None if x is None else x.new_zeros(len(mask), *x.shape[1:]).index_copy_(0, kept, x) for x in some[:3]
    )
    assert losses is not None
    assert squares is not None
    return SumsAndGradients(losses, squares, grad_hidden, some.grad_weight)


def _chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, scales: Scales, wanted: Wanted
) -> SumsAndGradients:
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows = _chunk_rows(hidden, len(weight))
        labels = labels.clamp(min=0)
        losses, squares = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
        grad_hidden = torch.empty_like(hidden) if wanted.hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wanted.weight else None
        onednn = uses_onednn(hidden)  # which takes memory of its own for a result
        buffer = None if onednn else hidden.new_empty(rows, len(weight))
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            states = hidden[chunk]
            if buffer is None:
                logits = fp32_product(states, weight.t())
            else:
                logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
            losses[chunk], squares[chunk] = _softmax_gradient(
                logits, labels[chunk], mask[chunk], scales if any(wanted) else None
            )
            if grad_hidden is not None:
                product(logits, weight, grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), states)
            del logits  # or the next chunk's would be made beside them
    return SumsAndGradients(losses, squares, grad_hidden, grad_weight)


def _chunk_rows(hidden: Tensor, vocab_size: int) -> int:
    """C: chunks of one size as far as possible, since a short last one is slow."""
    size = _CPU_CHUNK if hidden.device.type == "cpu" else _GPU_CHUNK
    chunks = max(1, math.ceil(len(hidden) * vocab_size / size))
    return max(1, math.ceil(len(hidden) / chunks))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, where the total may be wider than the factors."""
    is_narrower = left.dtype != total.dtype
    if not is_narrower and not uses_onednn(total):
        total.addmm_(left, right)
    elif total.is_cuda and torch.cuda.get_device_capability(total.device) >= (8, 0):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # In parts: the result, and a narrower one's copy in the total's type, would otherwise be as large as
        # the total, beside it.
        multiply = torch.mm if is_narrower else fp32_product
        rows = math.ceil(len(total) / _PARTS)
        for into, part in zip(total.split(rows), left.split(rows), strict=True):
            into.add_(multiply(part, right))


def _softmax_gradient(
    logits: Tensor, labels: Tensor, mask: Tensor, scales: Scales | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and lse² of logits [C, V], 0 where masked; the gradient then stands in their place.

    Args:
        logits: Any floating type; left as they are without `scales`.
        labels: int64 [C].
        mask: bool [C].
        scales: The gradient's.
    """
    rows = max(1, _CACHED_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    losses, squares = [], []
    for part, label, keep in zip(*(x.split(rows) for x in (logits, labels, mask)), strict=True):
        wide = at_least_fp32(part)
        target = wide.gather(1, label[:, None])[:, 0]
        if scales is None:
            lse = wide.logsumexp(-1)
        else:
            softmax = wide.softmax(-1)
            # One exponential for both: the largest probability is at least 1/V, so its logarithm is exact.
            lse = wide.amax(-1) - softmax.amax(-1).log()
            softmax.mul_(torch.where(keep, scales.loss + 2 * scales.z_loss * lse, 0)[:, None])
            # Flat: the only shape of scatter_add that CUDA runs deterministically.
            index = label + torch.arange(0, softmax.numel(), softmax.shape[1], device=label.device)
            softmax.view(-1).scatter_add_(0, index, -scales.loss * keep.to(lse.dtype))
            part.copy_(softmax)
        losses.append(torch.where(keep, lse - target, 0))
        squares.append(torch.where(keep, lse.square(), 0))
    return torch.cat(losses), torch.cat(squares)
