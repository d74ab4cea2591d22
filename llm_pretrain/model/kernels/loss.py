"""Cross-entropy and z-loss sums of the output projection, in at least fp32 also under autocast.

Two implementations have one signature. One computes whole logits. The other computes chunks of logits, and
the gradients in the forward pass.

Shapes: B sequences, S positions, T = B*S tokens, H hidden_size, V vocab_size, C tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_pretrain.model.kernels.layers import (
    at_least_fp32,
    is_gpu,
    linear,
    onednn_product,
    product,
    product_dtype,
    runs_triton,
    uses_onednn,
)

IGNORE_INDEX = -100
"""Label of a position without loss, as in `torch.nn.functional.cross_entropy`."""

CPU_CHUNK = 1 << 24
"""Logits of a chunk on a CPU (64 MiB in fp32). Smaller chunks are slower, larger ones are not faster."""
GPU_CHUNK = 1 << 27
"""Logits of a chunk on other devices, which only a product of thousands of rows keeps busy."""
CPU_SOFTMAX_ELEMENTS = 1 << 17
"""Logits whose softmax a CPU computes at a time in a chunk, so that they stay in its second-level cache."""
CPU_CROSS_ENTROPY_ELEMENTS = 1 << 18
"""Logits whose loss a CPU computes at a time if logits are not chunked."""
CPU_WEIGHT_PARTS = 4
"""Number of parts in which a CPU computes the weight's gradient."""
_RATIO_TOLERANCE = 1e-5
"""Relative tolerance in comparing the ratio of the two sums' gradients with `z_loss_coef`."""


class LossSums(NamedTuple):
    """Sums over the tokens whose loss_mask is 1."""

    loss: Tensor
    """Σ m · CE, 0-dim."""
    z_loss: Tensor
    """Σ m · lse², 0-dim (PaLM, arXiv:2204.02311, section 5)."""
    token_losses: Tensor
    """[B, S] CE per position, 0 where masked, without gradient."""


def full_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, z_loss_coef: float = 0.0
) -> LossSums:
    """`cross_entropy_sums` of the logits `hidden @ weight.T`; see also `fused_linear_cross_entropy`."""
    return cross_entropy_sums(linear(hidden, weight), labels, mask)


def cross_entropy_sums(logits: Tensor, labels: Tensor, mask: Tensor) -> LossSums:
    """Cross-entropy and z-loss sums of logits; the only new tensor of the logits' size is their gradient.

    Args:
        logits: [B, S, V], in any floating type.
        labels: int64 [B, S], already shifted; any value where the mask is 0.
        mask: bool [B, S].
    """
    loss, z_loss, losses = _CrossEntropySums.apply(logits.flatten(0, 1), labels.flatten(), mask.flatten())  # pyright: ignore[reportGeneralTypeIssues] (torch's stub of apply)
    return LossSums(loss, z_loss, losses.view(labels.shape))


class _CrossEntropySums(torch.autograd.Function):
    """Σ m·CE and Σ m·lse² of logits [T, V]; forward and backward pass read the logits once each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        labels = labels.clamp(min=0)
        log_partition, target = _partition_and_target(logits, labels)
        losses = torch.where(mask, log_partition - target, 0)
        z_loss = torch.where(mask, log_partition.square(), 0).sum()
        ctx.save_for_backward(logits, labels, mask, log_partition)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), z_loss, losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_loss, grad_z, _ = grads
        logits, labels, mask, log_partition = ctx.saved_tensors
        keep = mask.to(log_partition.dtype)
        on_softmax, on_target = keep * (grad_loss + 2 * grad_z * log_partition), keep * -grad_loss
        grad = torch.empty_like(logits)
        _write_softmax_gradient(grad, logits, labels, log_partition, on_softmax, on_target)
        return grad, None, None


def _partition_and_target(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`logsumexp` of each row of logits [C, V], and the logit of the row's label; [C], at least fp32."""
    parts = logits.split(_cached_rows(logits, CPU_CROSS_ENTROPY_ELEMENTS))
    log_partition = torch.cat([at_least_fp32(part).logsumexp(-1) for part in parts])
    return log_partition, at_least_fp32(logits.gather(1, labels[:, None])[:, 0])


def _write_softmax_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, on_softmax: Tensor, on_target: Tensor
) -> None:
    """Write `on_softmax * exp(logits - lse)`, plus `on_target` at each row's label, to `out`.

    Args:
        out: [C, V]; may be the tensor `logits`.
        logits: [C, V].
        labels: int64 [C].
        lse, on_softmax, on_target: [C], in at least fp32.
    """
    rows = _cached_rows(logits, CPU_CROSS_ENTROPY_ELEMENTS)
    columns = (out, logits, *(each[:, None] for each in (labels, lse, on_softmax, on_target)))
    for into, part, label, partition, scale, at_label in zip(*(x.split(rows) for x in columns), strict=True):
        softmax = (at_least_fp32(part) - partition).exp_().mul_(scale)
        into.copy_(softmax.scatter_add_(1, label, at_label))


def _cached_rows(logits: Tensor, elements: int) -> int:
    """Rows of logits [T, V] to compute at a time: about `elements` logits on a CPU, else all rows."""
    return len(logits) if logits.device.type != "cpu" else max(1, elements // logits.shape[1])


class SumsAndGradients(NamedTuple):
    """Results of one pass over the tokens."""

    losses: Tensor
    """[T] cross-entropy, in at least fp32; 0 where masked."""
    squares: Tensor
    """[T] lse²; 0 where masked."""
    grad_hidden: Tensor | None
    """[T, H]."""
    grad_weight: Tensor | None
    """[V, H]."""


class Scales(NamedTuple):
    """Coefficients of the cross-entropy sum and the z-loss sum in the objective."""

    loss: Tensor | float
    z_loss: Tensor | float


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool


SoftmaxGradient = Callable[[Tensor, Tensor, Tensor, Scales | None], tuple[Tensor, Tensor]]
"""A function with the arguments and results of `_softmax_gradient`."""


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    z_loss_coef: float,
    softmax_gradient: SoftmaxGradient | None = None,
) -> LossSums:
    """Cross-entropy and z-loss sums of `hidden @ weight.T` without whole logits.

    The forward pass computes the gradients while a chunk's logits exist. The backward pass only scales them,
    so nothing is computed twice. In fp16, the backward pass computes logits again, and then the gradients.
    Products run in autocast's type inside an autocast region, everything else in at least fp32; the weight's
    gradient is summed over chunks in at least fp32. Between the passes, memory holds the gradients, T·H in
    the products' type and V·H in fp32, instead of the T·V logits. Under `no_grad`, or if no input requires a
    gradient, none is computed. On a CPU, masked tokens are left out of the products.

    The gradients are right for every combination of the two sums. `loss + z_loss_coef * z_loss` costs nothing
    extra, also times a factor. For other combinations, the backward pass computes the gradients again. CUDA
    is the exception if both sums and a coefficient are in use: to compare the factors would synchronise with
    the device, so a ratio other than `z_loss_coef` fails a device-side assertion.

    Args:
        hidden: [B, S, H].
        weight: [V, H].
        labels: int64 [B, S], already shifted; any value where the mask is 0.
        mask: bool [B, S].
        z_loss_coef: The objective's coefficient of the z-loss.
        softmax_gradient: `softmax_gradient_of_part` with its options, if `weight` has a part of the rows.
    """
    train = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    chosen = softmax_gradient or _softmax_gradient
    options = _Options(z_loss_coef, product_dtype(hidden), train, chosen)
    flat = (hidden.flatten(0, 1), weight, labels.flatten(), mask.flatten())
    loss, z_loss, losses = _FusedLinearCrossEntropy.apply(*flat, options)  # pyright: ignore[reportGeneralTypeIssues] (torch's stub of apply)
    return LossSums(loss, z_loss, losses.view(labels.shape))


class _Options(NamedTuple):
    z_loss_coef: float
    dtype: torch.dtype
    train: bool
    softmax_gradient: SoftmaxGradient


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (hidden, weight, labels, mask)
        wanted = Wanted(*(options.train and needed for needed in ctx.needs_input_grad[:2]))
        # In fp16, the loss scale must multiply the softmax's gradient before rounding. Only the backward pass
        # knows the loss scale.
        now = Wanted(hidden=False, weight=False) if options.dtype == torch.float16 else wanted
        result = sums_and_gradients(
            *tensors, Scales(1.0, options.z_loss_coef), now, options.dtype, options.softmax_gradient
        )
        ctx.save_for_backward(*tensors)
        ctx.options, ctx.wanted = options, wanted
        ctx.gradients = (result.grad_hidden, result.grad_weight) if any(now) else None
        ctx.mark_non_differentiable(result.losses)
        ctx.set_materialize_grads(False)
        return result.losses.sum(), result.squares.sum(), result.losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        grad_loss, grad_z, _ = grads
        hidden, weight, labels, mask = ctx.saved_tensors
        # The context drops the gradients, which are scaled in place: a second backward pass must compute them
        # again. And autograd puts a gradient into `.grad` without a copy if nothing else references it.
        ready, ctx.gradients = ctx.gradients, None
        if ready is not None and grad_loss is not None and _in_ratio(grad_loss, grad_z, ctx.options):
            found = [None if gradient is None else gradient.mul_(grad_loss) for gradient in ready]
        else:
            del ready
            scales = Scales(0.0 if grad_loss is None else grad_loss, 0.0 if grad_z is None else grad_z)
            again = (ctx.wanted, ctx.options.dtype, ctx.options.softmax_gradient)
            found = list(sums_and_gradients(hidden, weight, labels, mask, scales, *again)[2:])
        for place, like in enumerate((hidden, weight)):
            gradient = found[place]
            found[place] = None if gradient is None else gradient.to(like.dtype)
        return *found, None, None, None


def _in_ratio(grad_loss: Tensor, grad_z: Tensor | None, options: _Options) -> bool:
    """Whether the forward pass computed the gradients of this objective, up to a factor."""
    coefficient, on_host = options.z_loss_coef, not is_gpu(grad_loss.device)
    if coefficient == 0:
        return grad_z is None or (on_host and not grad_z.any())
    if grad_z is None:
        return False
    expected = coefficient * grad_loss
    near = (grad_z - expected).abs() <= _RATIO_TOLERANCE * expected.abs()
    if on_host:
        return bool(near)
    # Factors that overflowed are no error here: they make the gradients non-finite, too.
    valid = near | ~grad_loss.isfinite() | ~grad_z.isfinite()
    torch.ops.aten._assert_async.msg(valid, "the z-loss has another coefficient than z_loss_coef")
    return True


def sums_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    scales: Scales,
    wanted: Wanted,
    dtype: torch.dtype,
    softmax_gradient: SoftmaxGradient,
) -> SumsAndGradients:
    """One pass over the tokens. hidden [T, H], weight [V, H], labels int64 [T], mask bool [T]."""
    kept = mask.nonzero()[:, 0] if hidden.device.type == "cpu" else None
    if kept is None or len(kept) == len(mask):
        return _chunks(hidden.to(dtype), weight.to(dtype), labels, mask, softmax_gradient, scales, wanted)
    states, weight = hidden[kept].to(dtype), weight.to(dtype)
    some = _chunks(states, weight, labels[kept], mask[kept], softmax_gradient, scales, wanted)
    losses, squares, grad_hidden = (
        None if x is None else x.new_zeros(len(mask), *x.shape[1:]).index_copy_(0, kept, x) for x in some[:3]
    )
    assert losses is not None
    assert squares is not None
    return SumsAndGradients(losses, squares, grad_hidden, some.grad_weight)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    softmax_gradient: SoftmaxGradient,
    scales: Scales,
    wanted: Wanted,
) -> SumsAndGradients:
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows = _chunk_rows(hidden, len(weight))
        labels = labels.clamp(min=0)
        losses, squares = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
        grad_hidden = torch.empty_like(hidden) if wanted.hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wanted.weight else None
        onednn = uses_onednn(hidden)  # oneDNN allocates its results itself
        buffer = None if onednn else hidden.new_empty(rows, len(weight))
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            states = hidden[chunk]
            if buffer is None:
                logits = onednn_product(states, weight.t())
            else:
                logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
            losses[chunk], squares[chunk] = softmax_gradient(
                logits, labels[chunk], mask[chunk], scales if any(wanted) else None
            )
            if grad_hidden is not None:
                product(logits, weight, grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), states)
            del logits  # frees the memory before the next chunk's logits are allocated
    return SumsAndGradients(losses, squares, grad_hidden, grad_weight)


def _chunk_rows(hidden: Tensor, vocab_size: int) -> int:
    """C. Chunks have sizes as equal as possible, since a short last chunk is slow."""
    size = CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK
    chunks = max(1, math.ceil(len(hidden) * vocab_size / size))
    return max(1, math.ceil(len(hidden) / chunks))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`; `total` may have a wider type than the factors."""
    is_narrower = left.dtype != total.dtype
    if not is_narrower and not uses_onednn(total):
        total.addmm_(left, right)
    elif is_gpu(total.device) and torch.cuda.get_device_capability(total.device) >= (8, 0):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # In parts, because the whole product, with its copy in the total's type, would take as much memory as
        # the total.
        multiply = torch.mm if is_narrower else onednn_product
        rows = math.ceil(len(total) / CPU_WEIGHT_PARTS)
        for into, part in zip(total.split(rows), left.split(rows), strict=True):
            into.add_(multiply(part, right))


def _softmax_gradient(
    logits: Tensor, labels: Tensor, mask: Tensor, scales: Scales | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and lse² of each row, 0 where masked; the gradient of the logits overwrites the logits.

    Args:
        logits: [C, V], any floating type. They stay unchanged if `scales` is None.
        labels: int64 [C].
        mask: bool [C].
        scales: Coefficients of the objective.
    """
    if runs_triton(logits.device) and logits.dtype != torch.float64:
        return _softmax_gradient_on_gpu(logits, labels, mask, scales)
    rows = _cached_rows(logits, CPU_SOFTMAX_ELEMENTS)
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
            # Flattened, because scatter_add on CUDA is deterministic for one dimension only.
            index = label + torch.arange(0, softmax.numel(), softmax.shape[1], device=label.device)
            softmax.view(-1).scatter_add_(0, index, -scales.loss * keep.to(lse.dtype))
            part.copy_(softmax)
        losses.append(torch.where(keep, lse - target, 0))
        squares.append(torch.where(keep, lse.square(), 0))
    return torch.cat(losses), torch.cat(squares)


def _softmax_gradient_on_gpu(
    logits: Tensor, labels: Tensor, mask: Tensor, scales: Scales | None
) -> tuple[Tensor, Tensor]:
    """`_softmax_gradient` in two passes over the logits."""
    from llm_pretrain.model.kernels.cross_entropy import log_partition, write_softmax_gradient

    lse, target = log_partition(logits, labels)
    if scales is not None:
        keep = mask.to(lse.dtype)
        on_softmax, on_target = keep * (scales.loss + 2 * scales.z_loss * lse), keep * -scales.loss
        write_softmax_gradient(logits, labels, lse, on_softmax, on_target)
    return torch.where(mask, lse - target, 0), torch.where(mask, lse.square(), 0)


def softmax_gradient_of_part(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    scales: Scales | None,
    *,
    first: int,
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """`_softmax_gradient` of logits of a part of the vocabulary.

    Args:
        logits, labels, mask, scales: See `_softmax_gradient`; labels are ids of the whole vocabulary.
        first: First id of the part.
        combine: Takes each row's logsumexp over this part, and the logit of the row's label, which is 0 if
            the label is in another part. Returns both for the whole vocabulary.
    """
    is_own = (labels >= first) & (labels < first + logits.shape[1])
    labels = torch.where(is_own, labels - first, 0)
    if runs_triton(logits.device) and logits.dtype != torch.float64:
        from llm_pretrain.model.kernels.cross_entropy import log_partition, write_softmax_gradient

        write: Callable[..., None] = write_softmax_gradient
    else:
        log_partition, write = _partition_and_target, functools.partial(_write_softmax_gradient, logits)
    lse, target = log_partition(logits, labels)
    lse, target = combine(lse, torch.where(is_own, target, 0))
    if scales is not None:
        keep = mask.to(lse.dtype)
        on_softmax, on_target = keep * (scales.loss + 2 * scales.z_loss * lse), keep * is_own * -scales.loss
        write(logits, labels, lse, on_softmax, on_target)
    return torch.where(mask, lse - target, 0), torch.where(mask, lse.square(), 0)
