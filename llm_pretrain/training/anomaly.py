"""Anomalous steps: spike detection, the decision to apply or skip a step, and rollback."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, DivergedError, MismatchError
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.model.kernels import is_gpu

if TYPE_CHECKING:
    from llm_pretrain.training.checkpointing import CheckpointManager
    from llm_pretrain.training.metrics import Recorder
    from llm_pretrain.training.progress import Progress
    from llm_pretrain.training.step import Engine, StepMetrics

WINDOW = 128
"""Accepted steps that a bound is computed from, as in llm.c (`OUTLIER_DETECTOR_WINDOW_SIZE`) and
OLMo-core."""
MIN_STEPS = 16
"""Accepted steps before the first detection."""
DEVIATIONS = 8.0
"""Robust standard deviations above the median; OLMo-core's `SkipStepOptimizer` uses 6 ordinary ones."""
LOSS_MARGIN = 0.25
"""Minimum excess of a spike's loss over the median, relative to the median."""
GRAD_NORM_MARGIN = 4.0
"""The same for the gradient norm, which has a long tail in healthy runs too."""
NEW_LEVEL = 32
"""Logged spikes in a row after which the history restarts at the new level."""
MAX_PENDING = 32
"""Maximum number of steps that are recorded together; a divergence is detected at most so many steps late."""

NUM_LOSSES = 4
"""Cross-entropy, z-loss, auxiliary loss, router z-loss: the first entries of `StepMetrics.sums`."""

_MAD_TO_STD = 1.4826
"""Standard deviation ÷ median absolute deviation of a normal distribution (1 / 0.6745)."""

_SKIPPED = {"log": None, "skip": "spike", "rollback": "rollback"}
"""`training.spike_action` -> `train/skipped`."""


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above those of the steps before.

    Args:
        kind: `loss`, `grad_norm` or `loss+grad_norm`; the row's `train/spike`.
        text: The numbers, for a warning.
        skipped: The row's `train/skipped`; None if the spike is only logged.
    """

    kind: str
    text: str
    skipped: str | None


@dataclass
class SpikeDetector:
    """Compares a step with the last accepted ones; spikes are not added to these.

    A pure function of global numbers that are checkpointed: every rank and every resumed run decides the
    same.

    Args:
        steps: Loss, gradient norm and loss tokens of the last `WINDOW` accepted steps, oldest first.
        in_a_row: Spikes since the last accepted step.
    """

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    in_a_row: int = 0
    _sorted: list[list[float]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Losses and gradient norms of `steps` in ascending order, updated step by step; empty until needed."""

    def detect(self, loss: float, grad_norm: float, num_loss_tokens: int, action: str) -> Spike | None:
        """The spike in a step with these global numbers, or None; `action` is `training.spike_action`."""
        if len(self.steps) < MIN_STEPS or self._is_below_margins(loss, grad_norm):
            return None
        losses, grad_norms, tokens = zip(*self.steps, strict=True)
        # the standard error of a mean grows as it is taken over fewer tokens
        widening = max(1.0, math.sqrt(median(tokens) / num_loss_tokens))
        bounds = {
            "loss": (loss, upper_bound(losses, LOSS_MARGIN, widening)),
            "grad_norm": (grad_norm, upper_bound(grad_norms, GRAD_NORM_MARGIN, widening)),
        }
        exceeded = {name: pair for name, pair in bounds.items() if pair[0] > pair[1]}
        if not exceeded:
            return None
        texts = [f"{name} {value:.4g} (bound {bound:.4g})" for name, (value, bound) in exceeded.items()]
        return Spike("+".join(exceeded), " and ".join(texts), _SKIPPED[action])

    def record(self, loss: float, grad_norm: float, num_loss_tokens: int, spike: Spike | None) -> None:
        """Add a step with finite numbers, for which `detect` returned `spike`."""
        if spike is not None:
            self.in_a_row += 1
            if spike.skipped is None and self.in_a_row >= NEW_LEVEL:
                self.steps, self.in_a_row, self._sorted = [], 0, []
            return
        self.in_a_row = 0
        self.steps.append((loss, grad_norm, num_loss_tokens))
        dropped = self.steps.pop(0) if len(self.steps) > WINDOW else None
        for column, values in enumerate(self._sorted):
            insort(values, self.steps[-1][column])
            if dropped is not None:
                del values[bisect_left(values, dropped[column])]

    def state_dict(self) -> dict[str, Any]:
        """A copy of the history as plain JSON, which keeps every float exactly."""
        return {"steps": list(self.steps), "in_a_row": self.in_a_row}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SpikeDetector:
        """The detector with a checkpoint's history."""
        return cls([(loss, norm, tokens) for loss, norm, tokens in state["steps"]], state["in_a_row"])

    def _is_below_margins(self, loss: float, grad_norm: float) -> bool:
        """Whether both numbers are at most median + margin, the smallest value that `upper_bound` can have.

        True for almost every step, whose deviation then need not be computed. Rounding is monotone, so no
        spike is missed.
        """
        if not self._sorted:
            self._sorted = [sorted(step[column] for step in self.steps) for column in (0, 1)]
        losses, grad_norms = self._sorted
        return loss <= _least_bound(losses, LOSS_MARGIN) and grad_norm <= _least_bound(
            grad_norms, GRAD_NORM_MARGIN
        )


def _least_bound(values: Sequence[float], margin: float) -> float:
    """`upper_bound` of sorted values with a deviation of 0."""
    half = len(values) // 2
    center = values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
    return center + max(0.0, margin * center)


def upper_bound(values: Sequence[float], margin: float, widening: float = 1.0) -> float:
    """median + max(8 σ, margin · median) · widening, with σ = 1.4826 · median absolute deviation.

    Median and median absolute deviation hardly move with a few outliers (Hampel's identifier; Iglewicz and
    Hoaglin, How to Detect and Handle Outliers, 1993), so one undetected spike does not hide the next. The
    margin avoids detections in stretches with little variation. There is no lower bound.
    """
    center = median(values)
    deviation = _MAD_TO_STD * median([abs(value - center) for value in values])
    return center + max(DEVIATIONS * deviation, margin * center) * widening


class StepMonitor:
    """Decides whether each optimizer step is applied, and records it in the run's progress and metrics.

    On a GPU the decision stays on the device if nothing on the host depends on it: the optimizer's kernel
    reads `found_inf`, as under `GradScaler`, and updates neither parameters nor moments nor step counters if
    it is 1. Up to `MAX_PENDING` steps are then read back and recorded together, so that the host does not
    wait for the GPU at every step. The recorded metrics are the same.

    Args:
        config, engine, progress: The run's; the engine is prepared.
        recorder: Writes the rows; None for steps outside a run.
        must_record: Tells by a step's number whether an evaluation or a checkpoint follows it, for which all
            steps must be recorded.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        progress: Progress,
        recorder: Recorder | None = None,
        must_record: Callable[[int], bool] = lambda step: False,
    ):
        self.config, self.engine, self.progress, self.recorder = config, engine, progress, recorder
        self._must_record = must_record
        self._is_deferred = decides_on_device(config, engine)
        self._pending: list[StepMetrics] = []

    def reduce_and_decide(self, step: StepMetrics, grad_norm: Tensor | float) -> bool:
        """Sum the step's metrics over ranks and decide, the same on every rank, whether to apply it.

        Args:
            step: With all micro batches added.
            grad_norm: Global gradient norm before clipping; under FSDP a DTensor with partial sums.

        Raises:
            DivergedError: a value is not finite under DeepSpeed, whose engine has stepped already.
        """
        full_tensor = getattr(grad_norm, "full_tensor", None)
        norm: Any = full_tensor() if full_tensor else grad_norm
        sums = step.reduce(self.engine)
        step.grad_norm = torch.as_tensor(norm, dtype=sums.dtype, device=sums.device)
        _, optimizer = self.engine.model_and_optimizer()
        if self._is_deferred:
            is_finite = torch.isfinite(step.numbers()[: 1 + NUM_LOSSES]).all()
            step.found_inf = torch.logical_not(is_finite).float()
            optimizer.found_inf = step.found_inf  # type: ignore[attr-defined]  # torch's name, as GradScaler sets it
            return True
        self._decide(step)
        if self.config.distributed.strategy == "deepspeed":
            from llm_pretrain.distributed.deepspeed import stop_if_diverged

            stop_if_diverged(optimizer, step.skipped, self.progress.step)
        return not step.skipped

    def _decide(self, step: StepMetrics) -> None:
        """Fill in `grad_norm`, `loss`, `skipped` and `spike` from reduced numbers; waits for the device."""
        grad_norm, *losses = step.numbers()[: 1 + NUM_LOSSES].tolist()
        if not math.isfinite(grad_norm):
            step.grad_norm = None
            step.skipped = "overflow" if self.engine.scaler else "nonfinite_gradient"
            return
        step.grad_norm = grad_norm
        if not all(map(math.isfinite, losses)):
            step.skipped = "nonfinite_loss"
            return
        loss, action = losses[0] / step.num_loss_tokens, self.config.training.spike_action
        step.spike = self.progress.spikes.detect(loss, grad_norm, step.num_loss_tokens, action)
        step.loss = loss
        step.skipped = step.spike.skipped if step.spike else None

    def record(self, step: StepMetrics, learning_rate: float) -> None:
        """Record one finished step, now or together with later ones.

        Raises:
            DivergedError: as `check_divergence`, for an earlier step.
        """
        assert self.recorder is not None
        self.progress.advance(step.num_loss_tokens)
        step.step, step.tokens_seen = self.progress.step, self.progress.tokens_seen
        step.learning_rate, step.seconds = learning_rate, self.recorder.elapsed()
        if not self._is_deferred:
            self._record_decided(step)
            return
        self._pending.append(step)
        is_full = len(self._pending) == MAX_PENDING
        if is_full or self.recorder.is_logged(step.step) or self._must_record(step.step):
            self.flush()

    def flush(self) -> None:
        """Record all pending steps, and write all their rows but the last, which may get evaluation metrics.

        Raises:
            DivergedError: as `check_divergence`, for any step but the last.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        assert self.recorder is not None
        on_device = [step for step in pending if step.found_inf is not None]
        numbers = torch.stack([step.numbers() for step in on_device]).cpu() if on_device else ()
        pending[-1].seconds += self.recorder.elapsed()  # the wait for the device
        for step, row in zip(on_device, numbers, strict=True):
            step.grad_norm, step.sums = row[0], row[1:]
        for index, step in enumerate(pending):
            if index:
                self.recorder.flush()
                self.check_divergence(step.step - 1)
            if step.found_inf is not None:
                step.found_inf = None
                self._decide(step)
            self._record_decided(step)

    def _record_decided(self, step: StepMetrics) -> None:
        """Add a step whose metrics are on the host to progress and recorder."""
        assert self.recorder is not None
        self.progress.update(step)
        self.recorder.record(step)

    def check_divergence(self, step: int) -> None:
        """Stop after `training.max_skipped_steps` skipped steps in a row, on every rank.

        Raises:
            DivergedError: the limit is reached at `step`.
        """
        limit, skipped = self.config.training.max_skipped_steps, self.progress.skipped_in_a_row
        if skipped >= limit:
            error = DivergedError(
                f"training.max_skipped_steps: {skipped} steps in a row were skipped, the last is step "
                f"{step} (train/skipped in {self.config.run.folder / 'metrics.jsonl'} says why)"
            )
            error.shared = True
            raise error


def decides_on_device(config: Config, engine: Engine) -> bool:
    """Whether the decision on a step may stay on the device.

    False if the host needs it before the next step: for spikes that are skipped or rolled back, fp16's loss
    scale, or a digest of the parameters in every row. False under DeepSpeed, whose engine ignores the
    decision.
    """
    return (
        is_gpu(engine.device)
        and engine.scaler is None
        and config.training.spike_action == "log"
        and config.distributed.strategy != "deepspeed"
        and not config.logging.parameters_sha256
    )


def rollback(
    checkpoints: CheckpointManager, progress: Progress, step: StepMetrics, warn: Callable[[str], None]
) -> None:
    """Restore model, optimizer, scaler and spike history from the newest periodic checkpoint; collective.

    Step count, schedule and data continue, as after every skipped step. Only periodic checkpoints are used:
    one written after a stop signal does not exist in an uninterrupted run. Without a valid one, `step` is
    skipped instead.
    """
    number = progress.step + 1
    heartbeat(f"rolling back at step {number}", files=True)
    checkpoints.wait()  # a save in the background may be writing the checkpoint
    path = checkpoints.store.newest_periodic(progress.step)
    try:
        if path is None:
            raise CheckpointError("no periodic checkpoint has been written yet")
        target = checkpoints.store.find(expected=checkpoints.fingerprints_at, source=path)
    except (CheckpointError, MismatchError) as error:
        warn(f"step {number}: training.spike_action: rollback acts as skip: {error}")
        step.skipped = "spike"
        return
    assert target is not None
    checkpoints.restore(target)
    # the restored parameters may have a higher loss than the steps after the checkpoint
    progress.spikes = SpikeDetector.from_state_dict(target.run.extra["spikes"])
    warn(f"step {number}: parameters and optimizer restored from {target.path}")
