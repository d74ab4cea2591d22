"""Muon for matrices and AdamW for everything else, in one optimizer. Which parameter gets which is decided
in `optimizers.py`; how a batch of matrices is orthogonalised, in `orthogonal.py`.

After github.com/KellerJordan/Muon; `torch.optim.Muon` computes the same, one two-dimensional matrix after
the other. Here equal shapes go through the products together, a three-dimensional parameter is a stack of
matrices, and a parameter that FSDP has sharded is put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from llm_pretrain.training.orthogonal import orthogonalized, product_dtype
from llm_pretrain.training.sharding import as_sharded, gathered, own_part, split_as

BATCH_ELEMENTS = 1 << 24
"""Numbers that are orthogonalised at a time: four buffers of this many are the memory it takes."""


class Muon(Optimizer):
    """Groups with `algorithm="muon"` take orthogonalised momentum, those with "adamw" fused AdamW.

    A matrix W [out, in] with gradient G, at rate lr:

        B ← momentum · B + (1 - momentum) · G
        O ← orthogonalise((1 - momentum) · G + momentum · B)             (Nesterov's)
        W ← (1 - lr · weight_decay) · W - lr · sqrt(max(1, out / in)) · O

    AdamW's groups are updated by torch's fused kernel, to the bit what `torch.optim.AdamW` does.

    State by parameter: `step`, and `momentum_buffer` or `exp_avg` and `exp_avg_sq`.

    Args:
        params: Groups, each with its `algorithm` and, for Muon, the `blocks` its parameters' rows stand for:
            a parameter [..., blocks · out, in] holds that many matrices one above the other.
        lr: Learning rate of groups that say no other.
        momentum: Muon's.
        betas, eps: AdamW's.
        weight_decay: Of both.
        in_bf16: Whether Muon may multiply in bf16, where that is faster. A run in fp32 must not: over another
            number of processes a sum's last bit would turn a rounding there.
    """

    # torch's GradScaler then leaves it to this optimizer to do nothing when it has found an infinity
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        in_bf16: bool = True,
    ):
        self.in_bf16 = in_bf16
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "algorithm": "adamw", "blocks": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        As torch's fused optimizers, it takes `found_inf` (a tensor: anything but 0 and nothing moves, without
        waiting for the device) and `grad_scale` (what gradients are multiplied by) where a GradScaler, or
        the loop, has set them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                self._muon(group, parameters, scale, found_inf)
            else:
                self._adamw(group, parameters, scale, found_inf)
        return loss

    def _adamw(
        self, group: dict[str, Any], parameters: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(
        self, group: dict[str, Any], parameters: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        pieces = []
        for parameter in parameters:
            state = self._state(parameter, "momentum_buffer")
            state["step"] += 1 if found_inf is None else (found_inf == 0).to(state["step"]).reshape(())
            if scale is not None:
                _gradient(parameter).div_(scale)
            pieces += _stack(parameter, state["momentum_buffer"], group["blocks"])
        for batch in _batches(pieces):
            dtype = product_dtype(batch[0].parameter.device, self.in_bf16)
            updates = [piece.momentum_update(group["momentum"], dtype, found_inf) for piece in batch]
            if float(group["lr"]) == 0.0:  # the end of a decay, or torch creating the state to load into
                continue
            for piece, update in zip(batch, orthogonalized(updates, dtype), strict=True):
                piece.apply(update, float(group["lr"]), group["weight_decay"], found_inf)

    def _state(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        """The parameter's state, created where it has none as torch's AdamW creates it."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


@dataclass(frozen=True)
class _Matrices:
    """n matrices of one parameter that are updated together: views, [n, out, in].

    Args:
        parameter, momentum, gradient: What this rank holds of them.
        whole: The parameter, where this rank holds some rows only of its one matrix.
    """

    parameter: Tensor
    momentum: Tensor
    gradient: Tensor
    whole: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, out, in) of what is orthogonalised."""
        whole = () if self.whole is None else (1, *self.whole.shape)
        count, rows, columns = whole or self.parameter.shape
        return count, rows, columns

    def momentum_update(self, momentum: float, dtype: torch.dtype, found_inf: Tensor | None) -> Tensor:
        """Advance the momentum; returns Nesterov's update, whole; collective where the matrix is sharded.

        What is gathered comes in `dtype`, that of the products, so that no more is moved than must be.
        """
        if found_inf is None:
            self.momentum.lerp_(self.gradient, 1 - momentum)
        else:
            _write(self.momentum, self.momentum.lerp(self.gradient, 1 - momentum), found_inf)
        update = self.gradient.lerp(self.momentum, momentum)
        if self.whole is None:
            return update
        return gathered(update[0].to(dtype), self.whole)[None]

    def apply(
        self, update: Tensor, learning_rate: float, weight_decay: float, found_inf: Tensor | None
    ) -> None:
        """Decay and move the parameters by the orthogonalised update [n, out, in], whole."""
        rows, columns = update.shape[-2:]
        # A matrix of out rows takes RMS-1 inputs to RMS-1 outputs when its singular values are near
        # sqrt(out / in); below a square one Jordan's rule leaves them at 1.
        distance = learning_rate * math.sqrt(max(1.0, rows / columns))
        if self.whole is not None:
            update = split_as(update[0], self.whole)[None]
        decayed = 1 - learning_rate * weight_decay
        if found_inf is None:
            self.parameter.mul_(decayed).add_(update, alpha=-distance)
        else:
            _write(self.parameter, (self.parameter * decayed).add_(update, alpha=-distance), found_inf)


def _stack(parameter: Tensor, momentum: Tensor, blocks: int) -> Iterator[_Matrices]:
    """The matrices that a parameter [out, in] or [E, blocks · out, in] stands for, in one or more parts.

    Under FSDP a rank holds whole experts, which it updates without the others, or rows of a matrix.
    """
    gradient = _gradient(parameter)
    *experts, rows, columns = parameter.shape
    parts = [own_part(tensor) for tensor in (parameter, momentum, gradient)]
    whole = as_sharded(parameter)
    if whole is not None and not experts:
        yield _Matrices(*(part[None] for part in parts), whole=whole)
        return
    if not parts[0].numel():  # fewer experts than ranks
        return
    size = (rows // blocks, columns)
    views = (parts[0].view(-1, *size), parts[1].view(-1, *size), parts[2].reshape(-1, *size))
    at_a_time = max(1, BATCH_ELEMENTS // (size[0] * size[1]))
    for together in zip(*(view.split(at_a_time) for view in views), strict=True):
        yield _Matrices(*together)


def _batches(pieces: Iterable[_Matrices]) -> Iterator[list[_Matrices]]:
    """Pieces of equal shape, transposed or not, together, as many as memory is to take; in a fixed order."""
    by_shape: dict[tuple[int, int], list[_Matrices]] = {}
    for piece in pieces:
        _, rows, columns = piece.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(piece)
    for same in by_shape.values():
        batch, elements = [], 0
        for piece in same:
            size = math.prod(piece.shape)
            if batch and elements + size > BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(piece)
            elements += size
        yield batch


def step_buffers(groups: Iterable[dict[str, Any]], dtype: torch.dtype) -> int:
    """Bytes that a step takes for itself at most, on one rank that holds the groups' parameters whole.

    Args:
        groups: An optimizer's; their parameters need no memory, so those of a model on the meta device do.
        dtype: Of the products, `product_dtype`.
    """
    most, kept, itemsize = 0, 0, dtype.itemsize
    pieces: list[_Matrices] = []
    for group in groups:
        for parameter in group["params"] if group.get("algorithm") == "muon" else ():
            *_, rows, columns = parameter.shape
            stack = parameter.detach().view(-1, rows // group["blocks"], columns)
            at_a_time = max(1, BATCH_ELEMENTS // stack[0].numel())
            pieces += [_Matrices(each, each, each) for each in stack.split(at_a_time)]
    for batch in _batches(pieces):
        elements = sum(math.prod(piece.shape) for piece in batch)
        small, large = sorted(batch[0].shape[1:])
        # Nesterov's update in fp32; x before and after an iteration, its Gram matrix and the polynomial of it
        needed = 4 * elements + itemsize * elements * 2 * (large + small) // large
        most, kept = max(most, kept + needed), itemsize * elements  # the last result lives on into the next
    return most


def _write(target: Tensor, value: Tensor, found_inf: Tensor) -> None:
    """Set `target` to `value`, unless an infinity was found: decided where the tensors are."""
    target.copy_(torch.where(found_inf.to(target.device).reshape(()) == 0, value, target))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
