"""The books of a run: what finished steps leave behind, taken down in order, at once or some steps later.

A step's verdict is first known to the device that computed it. Where nothing but the books depends on it, the
loop goes on, and figures are fetched together when one of them is needed: a GPU that is asked at every step
runs dry at every step. The books come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from llm_pretrain.config import Config
from llm_pretrain.errors import DivergedError
from llm_pretrain.training.engine import Engine, FinishedStep, StepResult
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.recorder import Recorder
from llm_pretrain.training.spikes import Judge

DEVICES = ("cuda",)
"""Kinds of device that compute while the host goes on; a CPU's figures cost nothing to read."""
LONGEST = 32
"""Steps that wait at most, whatever the cadence of rows: so late a divergence is noticed."""


def may_wait(config: Config, engine: Engine) -> bool:
    """Whether a step's verdict may stay on the device until later.

    Not where the next step depends on it on the host: spikes that are skipped or rolled back, fp16's loss
    scale, the digest of the parameters after each row's step. DeepSpeed gives its verdict itself. The
    optimizer must heed `found_inf`, as fused ones do.
    """
    _, optimizer = engine.model_and_optimizer()
    return (
        engine.device.type in DEVICES
        and engine.scaler is None
        and config.training.spike_action == "log"
        and config.distributed.strategy != "deepspeed"
        and not config.logging.parameters_sha256
        and getattr(optimizer, "_step_supports_amp_scaling", False)
    )


class Books:
    """Keeps `progress` and `recorder` up to date with the steps that are taken.

    Args:
        config, engine, progress, recorder: The run's.
        needed: Whether the books must be up to date after this step, rows aside.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        progress: Progress,
        recorder: Recorder,
        needed: Callable[[int], bool],
    ):
        self.config, self.progress, self.recorder = config, progress, recorder
        self._needed = needed
        self._may_wait = may_wait(config, engine)
        self._waiting: list[FinishedStep] = []

    @property
    def judge(self) -> Judge | None:
        """Of the step that comes next; None where its verdict is to stay on the device."""
        return None if self._may_wait else self.progress.spikes.judge(self.config.training.spike_action)

    def enter(self, result: StepResult, learning_rate: float) -> None:
        """Take down one finished step, now or when the books are needed.

        Raises:
            DivergedError: as `check_divergence`, of a step before this one.
        """
        progress = self.progress
        progress.advance(result.counts)
        seconds = self.recorder.lap()
        step = FinishedStep(progress.step, progress.tokens_seen, learning_rate, result, seconds)
        if not self._may_wait:
            self._take_down(step)
            return
        self._waiting.append(step)
        is_full = len(self._waiting) == LONGEST
        if is_full or self.recorder.is_logged(progress.step) or self._needed(progress.step):
            self.settle()

    def settle(self) -> None:
        """Take down all steps that wait. The row of the last is left open, for its evaluation to join.

        Raises:
            DivergedError: as `check_divergence`, of any but the last.
        """
        finished, self._waiting = self._waiting, []
        figures = _figures(finished)
        if finished:
            finished[-1].seconds += self.recorder.lap()  # the wait for the device
        for number, step in enumerate(finished):
            if number:
                self.recorder.flush()
                self.check_divergence(step.step - 1)
            if step.result.unread is not None:
                judge = self.progress.spikes.judge(self.config.training.spike_action)
                own = next(figures)
                step.result = StepResult.of(step.result.counts, own[1:], own[0], judge, None)
            self._take_down(step)

    def _take_down(self, step: FinishedStep) -> None:
        self.progress.learn(step.result)
        self.recorder.step(step)

    def check_divergence(self, step: int) -> None:
        """Stop after too many skipped steps in a row; all ranks count alike.

        Raises:
            DivergedError: `step` is one too many.
        """
        limit, skipped = self.config.training.max_skipped_steps, self.progress.skipped_in_a_row
        if skipped >= limit:
            error = DivergedError(
                f"training.max_skipped_steps: {skipped} steps in a row were skipped, the last is step "
                f"{step} (train/skipped in {self.config.run.folder / 'metrics.jsonl'} says why)"
            )
            error.shared = True
            raise error


def _figures(finished: Sequence[FinishedStep]) -> Iterator[Tensor]:
    """The figures of all steps that have some unread, fetched from the device in one go."""
    unread = [step.result.unread.figures for step in finished if step.result.unread is not None]
    return iter(torch.stack(unread).cpu()) if unread else iter(())
