"""Compares runs step by step with the tolerances of docs/exactness.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from llm_pretrain.audit.variants import Variant
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError
from llm_pretrain.launch.jobs import last_error_lines
from llm_pretrain.runs.rows import rows_of

Rows = Mapping[int, Mapping[str, Any]]
"""Step to row of metrics.jsonl."""

SAMPLES = ("data/batch_sha256", "train/loss_tokens")
LOSSES = ("train/loss", "train/aux_loss")
GRAD_NORM = "train/grad_norm"
DIGEST = "train/parameters_sha256"
KEYS = (*SAMPLES, *LOSSES, GRAD_NORM, DIGEST)
"""Keys compared at every step. Inputs come before the numbers that are computed from them."""
REQUIRED = (*SAMPLES, "train/loss", GRAD_NORM)
"""Keys of every row of every path. A dense model has no auxiliary loss, the Trainer path no digest."""
PARAMETERS = "parameters"
"""Key of the relative norm of the final parameters' difference, in the table and in parity.json."""

LOSS_BOUND = {"fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
"""Largest relative difference of a loss between two splits of one batch, by precision. For bf16 and fp16 it
is the unit round-off u: a micro batch's weight gradients are rounded to u before they are added, so another
split changes an update by about u of itself, and a loss by u of what training has changed about it."""
GRAD_NORM_BOUND = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-9}
"""The same for the gradient norm, 4u: it depends more strongly on the parameters than the loss does."""
PARAMETERS_BOUND = {"fp32": 1e-6}
"""The same for the final parameters, for runs of at most PARAMETERS_STEPS steps."""
PARAMETERS_STEPS = 20
FIRST_LOSS_BOUND = {"fp32": 1e-6}
"""The same for the loss of the first step, before any training, where only the order of sums differs."""
LOSS_STEPS, GRAD_NORM_STEPS, TRAINER_STEPS = 20, 10, 50
"""Number of steps for which the bounds of losses and gradient norm hold, from the first step with another
split. Training amplifies rounding: 1e-7 at the first step was measured as a percent of the norm after 25
steps at a high learning rate, in code that computes the same."""

ROUTING = "moe/load"
"""Share of the tokens of each layer's experts: integers over integers, equal while no token is rerouted."""
REROUTED_BOUND = {"train/loss": 2**-8, "train/aux_loss": 2**-5, GRAD_NORM: 2**-2}
"""Bounds from the step on at which a token goes to another expert, measured. Routing is discrete: where two
experts tie within rounding, another split may choose the other one, and later differences exceed rounding."""
LARGEST_TIE = 0.01
"""Share of a layer's choices that may change at the first such step without a look at the scores. Of a larger
share every choice must be shown to be a tie."""

FindTies = Callable[["Run", "Run", int], str]
"""The choices that differ between a reference and a run at a step in words, if all are ties; else empty."""


def no_ties(reference: Run, run: Run, step: int) -> str:
    """A `FindTies` that looks at nothing."""
    return ""


@dataclass(frozen=True)
class Tolerance:
    """How far the rows of one run may differ from those of another.

    Args:
        exact: Keys whose values must be the same bits.
        bounds: Key to the largest relative difference. `parameters` stands for the final parameters.
        note: What is not compared, and why.
        first_bounds: Replace `bounds` at the first step.
        rerouted: Replaces `bounds` from the first step at which `moe/load` differs; empty for dense models.
        steps: Number of steps for which `bounds` hold; those of the gradient norm hold for GRAD_NORM_STEPS.
        start: First step of this tolerance. Before it every key must be exact.
    """

    exact: tuple[str, ...]
    bounds: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    first_bounds: Mapping[str, float] = field(default_factory=dict)
    rerouted: Mapping[str, float] = field(default_factory=dict)
    steps: int = LOSS_STEPS
    start: int = 1

    def exact_at(self, step: int) -> tuple[str, ...]:
        """Keys that must be the same bits at `step`."""
        return self.exact if step >= self.start else KEYS

    def bounds_at(self, step: int, *, rerouted: bool) -> dict[str, float]:
        """Largest relative differences at `step`; empty before `start` and after `steps`."""
        age = step - self.start
        if not 0 <= age < self.steps:
            return {}
        bounds = dict(self.rerouted if rerouted else self.bounds)
        if age == 0 and not rerouted:
            bounds |= self.first_bounds
        if age >= GRAD_NORM_STEPS:
            bounds.pop(GRAD_NORM, None)
        return bounds

    def checks_routing(self, step: int) -> bool:
        """Whether rerouted tokens are allowed at `step`."""
        return bool(self.rerouted) and 0 <= step - self.start < self.steps

    def notes(self, steps: int) -> list[str]:
        """What is not compared in a run of `steps` steps."""
        notes = [self.note] if self.note else []
        if self.bounds and steps >= self.start + self.steps:
            notes.append(
                f"bounds are promised for {self.steps} steps, of the norm for {GRAD_NORM_STEPS}; later ones "
                "shown"
            )
        return notes


def tolerance_of(variant: Variant, reference: Variant, config: Config, steps: int) -> Tolerance:
    """How far `variant` may differ from `reference`, of the same precision, in runs of `steps` steps."""
    model, precision = config.model, variant.precision
    has_dropout = bool(model.attention_dropout or model.hidden_dropout)
    if "trainer" in (variant.path, reference.path):
        why = ""
        if model.moe_layers:
            why = "transformers' auxiliary loss is another one"
        elif has_dropout:
            why = "transformers draws its dropout in another way"
        elif precision != "fp32":
            why = f"promised in fp32, not in {precision}"
        if why:
            return Tolerance(SAMPLES, note=f"{why}: losses shown, not compared")
        return Tolerance(SAMPLES, {"train/loss": LOSS_BOUND["fp32"]}, steps=TRAINER_STEPS)
    if variant.split == reference.split and variant.mesh == reference.mesh:
        return Tolerance(KEYS)
    if variant.micro_batch_size != reference.micro_batch_size:
        sizes = f"of {variant.micro_batch_size} against {reference.micro_batch_size} sequences"
        if has_dropout:
            return Tolerance(SAMPLES, note=f"dropout draws per micro batch, {sizes}")
        if model.moe_layers and model.router_aux_loss_scope == "micro_batch":
            return Tolerance(SAMPLES, note=f"model.router_aux_loss_scope: micro_batch has those {sizes}")
    bounds = dict.fromkeys(LOSSES, LOSS_BOUND[precision]) | {GRAD_NORM: GRAD_NORM_BOUND[precision]}
    note = ""
    if precision in PARAMETERS_BOUND and steps <= PARAMETERS_STEPS:
        bounds[PARAMETERS] = PARAMETERS_BOUND[precision]
    elif precision in PARAMETERS_BOUND:
        note = f"parameters: promised for runs of up to {PARAMETERS_STEPS} steps, of {steps} shown only"
    first = {"train/loss": FIRST_LOSS_BOUND[precision]} if precision in FIRST_LOSS_BOUND else {}
    return Tolerance(SAMPLES, bounds, note, first, REROUTED_BOUND if model.moe_layers else {})


@dataclass(frozen=True)
class Difference:
    """A difference beyond the tolerance.

    Args:
        step: Optimizer step.
        key: Key of the row, or `parameters`.
        expected, found: Values of the reference and of the run; `missing` where a row has no such key.
        bound: Largest relative difference allowed; None where the values must be the same bits.
    """

    step: int
    key: str
    expected: Any
    found: Any
    bound: float | None = None

    def __str__(self) -> str:
        if self.key == PARAMETERS:
            return f"step {self.step}: the parameters differ by {self.found:.2g}, more than {self.bound:.2g}"
        if self.key == ROUTING:
            return (
                f"step {self.step}: {self.found:.1%} of a layer's choices go elsewhere, not shown to be ties"
            )
        text = f"step {self.step} {self.key}: expected {shorten(self.expected)}, found {shorten(self.found)}"
        relative = relative_difference(self.expected, self.found)
        if self.bound is not None and relative is not None:
            text += f", {relative:.2g} apart instead of at most {self.bound:.2g}"
        return text


@dataclass
class Comparison:
    """Result of comparing one run with another.

    Args:
        verdict: `identical`: every compared key at every step. `not compared`: the samples only.
        first: The first difference beyond the tolerance, by step and then in the order of `KEYS`.
        largest: Key to its largest relative difference over all steps, also where there is no bound.
        note: What is not compared, and why.
        rerouted_at: First step at which a token went to another expert.
    """

    verdict: Literal["identical", "within bound", "differs", "not compared", "failed"]
    first: Difference | None = None
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""
    rerouted_at: int | None = None

    @property
    def violated(self) -> bool:
        return self.verdict in ("differs", "failed")

    def add_difference(self, difference: Difference) -> None:
        """Enter a difference beyond the tolerance that the rows do not show."""
        self.first, self.verdict = self.first or difference, "differs"

    def as_dict(self) -> dict[str, Any]:
        """Its part of parity.json."""
        return {
            "verdict": self.verdict,
            "first_difference": dataclasses.asdict(self.first) if self.first else None,
            "largest_differences": self.largest,
            "note": self.note,
            "routing_parted_at_step": self.rerouted_at,
        }


def compare_rows(
    reference: Rows,
    rows: Rows,
    steps: int,
    tolerance: Tolerance,
    find_ties: Callable[[int], str] = lambda step: "",
    *,
    due: Iterable[int] | None = None,
) -> Comparison:
    """Compare the rows of steps 1 to `steps`, or of those that are `due`; a missing row is a difference.

    `find_ties` is asked about the first step at which more than LARGEST_TIE of a layer's choices differ.
    """
    largest: dict[str, float] = {}
    first, same, rerouted_at, ties = None, True, None, ""
    for step in range(1, steps + 1) if due is None else due:
        left, right = reference.get(step), rows.get(step)
        if left is None or right is None:
            expected, found = ("missing" if row is None else "there" for row in (left, right))
            first = first or Difference(step, "row", expected, found)
            continue
        if rerouted_at is None and tolerance.checks_routing(step) and (share := rerouted_share(left, right)):
            rerouted_at = step
            if share > LARGEST_TIE and first is None and not (ties := find_ties(step)):
                first = first or Difference(step, ROUTING, 0.0, share, LARGEST_TIE)
        bounds = tolerance.bounds_at(step, rerouted=rerouted_at is not None)
        for key in KEYS:
            same = same and left.get(key) == right.get(key)
            relative = relative_difference(left.get(key), right.get(key))
            if relative is not None and key not in SAMPLES:
                largest[key] = max(largest.get(key, 0.0), relative)
            is_exact = key in tolerance.exact_at(step)
            if is_exact or key in bounds:
                first = first or _compare_key(step, key, left, right, bounds.get(key))
    has_digests = bool(rows) and all(row.get(DIGEST) for step, row in rows.items() if step >= 1)
    notes = tolerance.notes(steps)
    if rerouted_at is not None:
        notes.append(
            f"from step {rerouted_at} on a token goes to another expert of a tie: wider bounds from there"
            + (f"; {ties}" if ties else "")
        )
    if first is not None:
        verdict = "differs"
    elif (same and has_digests) or DIGEST in tolerance.exact:  # the Trainer path has no digests
        verdict = "identical"
    else:
        verdict = "within bound" if tolerance.bounds else "not compared"
    return Comparison(verdict, first, largest, "; ".join(notes), rerouted_at)


def _compare_key(
    step: int, key: str, left: Mapping[str, Any], right: Mapping[str, Any], bound: float | None
) -> Difference | None:
    """The difference of one key beyond its bound; None where there is none."""
    if key not in left and key not in right and key not in REQUIRED:
        return None
    expected, found = left.get(key, "missing"), right.get(key, "missing")
    if expected == found and expected != "missing":
        return None
    relative = relative_difference(expected, found)
    if bound is not None and relative is not None and relative <= bound:
        return None
    return Difference(step, key, expected, found, bound)


def relative_difference(left: object, right: object) -> float | None:
    """|left - right| over the larger magnitude; None where one of them is not a number."""
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return None
    if left == right:
        return 0.0
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.inf
    return abs(left - right) / max(abs(left), abs(right))


def rerouted_share(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Largest share of a layer's choices that went to other experts, by two rows' `moe/load`; 0 without."""
    mine, others = left.get(ROUTING), right.get(ROUTING)
    if mine is None or others is None or mine == others:
        return 0.0
    if [len(layer) for layer in mine] != [len(layer) for layer in others]:
        return 1.0
    pairs = zip(mine, others, strict=True)
    return max(sum(abs(a - b) for a, b in zip(*pair, strict=True)) / 2 for pair in pairs)


@dataclass
class Run:
    """A finished launch.

    Args:
        variant: What was launched.
        folder, log: Its run folder and its output.
        exit_code: Of the launcher.
        seconds: From start to end.
        timed_out: Whether it was killed at the time limit.
    """

    variant: Variant
    folder: Path
    log: Path
    exit_code: int = 0
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def rows(self) -> Rows:
        """Rows by step; empty where they cannot be read."""
        try:
            return rows_of(self.folder)
        except PretrainError:
            return {}

    @property
    def error_lines(self) -> tuple[str, ...]:
        """Why it failed."""
        if self.timed_out:
            return (f"no end after {self.seconds:.0f} s, killed",)
        return tuple(last_error_lines(self.log))


@dataclass
class Result:
    """A row of the table.

    Args:
        run: The variant's run.
        comparison: With `against`, or with itself where that is None.
        against: The variant that it was compared with.
        failure: Last lines of the log of a failed launch.
    """

    run: Run
    comparison: Comparison
    against: Variant | None = None
    failure: tuple[str, ...] = ()
    is_reference: bool = False


def compare_runs(
    runs: Sequence[Run], config: Config, steps: int, find_ties: FindTies = no_ties
) -> list[Result]:
    """Compare each run with an earlier one of the same precision, by `choose_reference`."""
    finished = [run.variant for run in runs if run.exit_code == 0]
    by_variant = {run.variant: run for run in runs}
    results = []
    for run in runs:
        against = choose_reference(run.variant, finished, config, steps)
        reference = by_variant[against] if against else None
        tolerance = tolerance_of(run.variant, against, config, steps) if against else Tolerance(KEYS)
        if run.exit_code != 0:
            comparison, rows = Comparison("failed"), run.rows
            if reference and rows:
                last = min(max(rows), steps)
                comparison.first = compare_rows(reference.rows, rows, last, tolerance).first
            results.append(Result(run, comparison, against, run.error_lines))
        elif reference:
            ties = partial(find_ties, reference, run)
            comparison = compare_rows(reference.rows, run.rows, steps, tolerance, ties)
            _compare_parameters(comparison, reference, run, steps, tolerance)
            results.append(Result(run, comparison, against))
        elif len(finished) == 1:
            note = "no other variant to compare it with"
            results.append(Result(run, Comparison("not compared", note=note)))
        else:  # with itself, which finds missing rows and keys
            comparison = compare_rows(run.rows, run.rows, steps, tolerance)
            results.append(Result(run, comparison, is_reference=True))
    return results


def choose_reference(
    variant: Variant, finished: Sequence[Variant], config: Config, steps: int
) -> Variant | None:
    """The variant to compare with; None for the first of its precision.

    It is the first variant of the same split and mesh on another path. Without one it is the first
    earlier variant for which there are bounds, or else the first of the precision.
    """
    pool = [each for each in finished if each.precision == variant.precision]
    candidates = [each for each in pool if each.path != "trainer"]
    if not candidates or candidates[0] == variant:
        return None
    kind = (variant.split, variant.mesh)
    same_kind = next((each for each in candidates if (each.split, each.mesh) == kind), variant)
    if same_kind != variant:
        return same_kind
    earlier = [each for each in takewhile(lambda each: each != variant, pool) if each in candidates]
    bounded = (each for each in earlier if tolerance_of(variant, each, config, steps).bounds)
    return next(bounded, candidates[0])


@dataclass(frozen=True)
class Attempt:
    """One start of the interrupted run.

    Args:
        path, world_size: How it was launched.
        checkpoint: Step of the newest committed checkpoint at its start; 0 without any.
        first_step, last_step: Of the rows that it wrote; None without any.
        killed: Whether it was killed.
    """

    path: str
    world_size: int
    checkpoint: int
    first_step: int | None
    last_step: int | None
    killed: bool

    @property
    def wrong_start(self) -> str:
        """How its first step is not the one after its checkpoint; empty where it is."""
        if self.first_step == self.checkpoint + 1:
            return ""
        found = "wrote no row" if self.first_step is None else f"began at step {self.first_step}"
        return (
            f"{self.path} W={self.world_size} {found}, expected {self.checkpoint + 1} after the checkpoint "
            f"of step {self.checkpoint}"
        )


@dataclass
class InterruptedResult:
    """The row of the interrupted run; `failure` says why an attempt did not run as planned."""

    option: str
    folder: Path
    log: Path
    comparison: Comparison
    attempts: Sequence[Attempt] = ()
    failure: tuple[str, ...] = ()


def compare_interrupted(
    reference: Run, folder: Path, attempts: Sequence[Attempt], config: Config, steps: int
) -> Comparison:
    """Compare an interrupted run with an uninterrupted one: exact up to the first attempt at another W."""
    variant, tolerance = reference.variant, Tolerance(KEYS)
    for attempt in attempts:
        if attempt.world_size != variant.world_size and attempt.first_step is not None:
            accumulation = variant.world_size * variant.accumulation // attempt.world_size
            changed = dataclasses.replace(variant, world_size=attempt.world_size, accumulation=accumulation)
            tolerance = tolerance_of(changed, variant, config, steps)
            tolerance = dataclasses.replace(tolerance, start=max(attempt.first_step, 2))
            break
    run = Run(variant, folder, reference.log)
    comparison = compare_rows(reference.rows, run.rows, steps, tolerance)
    _compare_parameters(comparison, reference, run, steps, tolerance)
    for attempt in attempts:
        if attempt.wrong_start:
            expected = attempt.checkpoint + 1
            comparison.first = Difference(expected, "attempt", expected, attempt.first_step)
            comparison.verdict = "differs"
            break
    return comparison


def _compare_parameters(
    comparison: Comparison, reference: Run, run: Run, steps: int, tolerance: Tolerance
) -> None:
    """Add the distance of the final parameters, where both runs have a checkpoint of their last step."""
    if comparison.verdict == "not compared" or "trainer" in (reference.variant.path, run.variant.path):
        return
    try:  # also where the rows' digests are equal, since a resume reads the checkpoint
        distance = parameters_distance(reference.folder, run.folder, steps)
    except PretrainError as error:
        digests = [each.rows.get(steps, {}).get(DIGEST) for each in (reference, run)]
        if digests[0] is None or digests[0] != digests[1]:
            comparison.note = "; ".join(filter(None, [comparison.note, f"parameters not compared: {error}"]))
            return
        distance = 0.0
    add_parameters_distance(comparison, distance, steps, tolerance)


def add_parameters_distance(
    comparison: Comparison, distance: float, steps: int, tolerance: Tolerance
) -> None:
    """Add the relative norm of the final parameters' difference, and compare it with its bound."""
    comparison.largest[PARAMETERS] = distance
    bound = tolerance.bounds.get(PARAMETERS) if comparison.rerouted_at is None else None
    if DIGEST in tolerance.exact:
        bound = 0.0
    if bound is not None and not distance <= bound:
        comparison.add_difference(Difference(steps, PARAMETERS, 0.0, distance, bound))


def parameters_distance(left: Path, right: Path, step: int) -> float:
    """‖left − right‖ / ‖left‖ over all parameters of two runs' checkpoints of `step`, in float64.

    Raises:
        PretrainError: a checkpoint is missing or damaged.
    """
    from llm_pretrain.checkpoints.folders import folder_name
    from llm_pretrain.checkpoints.opening import open_model

    paths = [folder / "checkpoints" / folder_name(step) for folder in (left, right)]
    mine, others = (dict(open_model(path, average=False).model.named_parameters()) for path in paths)
    if {name: each.shape for name, each in mine.items()} != {
        name: each.shape for name, each in others.items()
    }:
        return math.inf
    difference = norm = 0.0
    for name, parameter in mine.items():
        expected = parameter.detach().double()
        difference += float((expected - others[name].detach().double()).square().sum())
        norm += float(expected.square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def shorten(value: object, length: int = 24) -> str:
    """A value as text for a message; a float keeps every digit."""
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…"
