"""State of a run besides model and optimizer: counters, the last and best evaluation, and recent losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llm_pretrain.config.schema import matches_type
from llm_pretrain.training.engine import DIGEST_WORDS
from llm_pretrain.training.spikes import SpikeDetector
from llm_pretrain.training.step import Step


@dataclass(frozen=True)
class Best:
    """The lowest evaluation loss so far.

    Args:
        step: Optimizer steps done when it was found.
        loss: `eval/loss`.
        max_batches: `evaluation.max_batches` then; losses over other batches cannot be compared.
    """

    step: int
    loss: float
    max_batches: int | None


@dataclass
class Progress:
    """Counters of a run, the same on every rank.

    Args:
        step: Optimizer steps done, skipped ones included.
        tokens_seen: Loss tokens of all steps so far.
        skipped_in_a_row: Skipped steps since the last one that moved the parameters.
        digest: Sums of the sample digests' eight words since the last row.
        wandb_id: Id of the run at Weights & Biases, which a resumed run continues.
        evaluation_owed: Whether a stop signal ended this step's evaluation; the resumed run repeats it.
        evaluation: Metrics `eval/…` of the last evaluation, for the model card.
        evaluation_step: Step of that evaluation; None before the first one.
        best: The evaluation of the weights in `weights/best`; None without any.
        spikes: The detector, with the history that later steps are compared with.
    """

    step: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    digest: list[int] = field(default_factory=lambda: [0] * DIGEST_WORDS)
    wandb_id: str | None = None
    evaluation_owed: bool = False
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    best: Best | None = None
    spikes: SpikeDetector = field(default_factory=SpikeDetector)

    def advance(self, num_loss_tokens: int) -> None:
        """Count one finished step."""
        self.step += 1
        self.tokens_seen += num_loss_tokens

    def update(self, step: Step) -> None:
        """Add a finished step whose metrics are on the host; call it in the order of the steps."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step.skipped else 0
        self.digest = [a + b for a, b in zip(self.digest, step.digest, strict=True)]
        if step.loss is not None:
            assert isinstance(step.grad_norm, float)
            self.spikes.record(step.loss, step.grad_norm, step.num_loss_tokens, step.spike)

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Keep this step's evaluation, for the model card."""
        self.evaluation = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and math.isfinite(value)
        }
        self.evaluation_step = self.step

    def take_digest(self) -> list[int]:
        """The digest since the last call, which is then reset."""
        digest, self.digest = self.digest, [0] * DIGEST_WORDS
        return digest

    def extra(self) -> dict[str, object]:
        """The fields for `RunFacts.extra` in a checkpoint's manifest, as plain JSON."""
        own = {name: getattr(self, name) for name in _EXTRA}
        return own | {"best": asdict(self.best) if self.best else None, "spikes": self.spikes.state_dict()}

    @staticmethod
    def wrong_extra(extra: Mapping[str, object]) -> str | None:
        """A line about the first value in a manifest's `extra` that no run saves; None if there is none."""
        for name, (kind, is_sound) in _EXTRA.items():
            if name not in extra:
                return f"run.extra.{name}: expected what a run saves, found none"
            value = extra[name]
            if not matches_type(kind, value) or (value is not None and not is_sound(value)):
                return f"run.extra.{name}: expected what a run saves, found {value!r:.60}"
        return None

    @classmethod
    def resumed(cls, step: int, tokens_seen: int, wandb_id: str | None, extra: dict) -> Progress:
        """The progress of a checkpoint with this `extra()`."""
        own = {name: extra[name] for name in _EXTRA}
        own["best"] = Best(**own["best"]) if own["best"] else None
        own["spikes"] = SpikeDetector.from_state_dict(own["spikes"])
        return cls(step, tokens_seen, wandb_id=wandb_id, **own)


def _is_history(spikes: dict) -> bool:
    """Whether this is a state of `SpikeDetector`, with three numbers for each step."""
    steps: Any = spikes.get("steps")
    return (
        matches_type(int, spikes.get("in_a_row"))
        and matches_type(list[list[float]], steps)
        and all(len(step) == 3 for step in steps)
    )


def _is_best(best: dict) -> bool:
    """Whether these are the fields of `Best`."""
    return best.keys() == {"step", "loss", "max_batches"} and None not in (best["step"], best["loss"])


_EXTRA: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "skipped_in_a_row": (int, lambda count: count >= 0),
    "digest": (list[int], lambda words: len(words) == DIGEST_WORDS),
    "evaluation_owed": (bool, lambda _: True),
    "best": (dict[str, float | None] | None, _is_best),
    "evaluation": (dict[str, float], lambda _: True),
    "evaluation_step": (int | None, lambda _: True),
    "spikes": (dict, _is_history),
}
"""Field of `Progress` in `RunFacts.extra` -> its type there and a check of its value."""
