"""Compares two runs, row by row and tensor by tensor, with the tolerances of docs/exactness.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llm_pretrain.audit.variants import Variant
from llm_pretrain.checkpoints.folders import folder_name
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError
from llm_pretrain.runs.rows import is_training_row, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from llm_pretrain.checkpoints.manifest import Manifest

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
_MACHINE_KEYS = ("time", "perf/")
"""First characters of the keys that measure the machine."""
_LAUNCH_FACTS = ("launcher", "run_id", "wandb_id")
"""Facts in a checkpoint's manifest that name the run and how it was launched."""
PARAMETERS = "parameters"
"""Key of the relative norm of the final parameters' difference, in the table and in parity.json."""

LOSS_BOUND = {"fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
"""Largest relative difference of a loss between two splits of one batch, by precision. For bf16 and fp16 it
is the unit round-off u: a micro batch's weight gradients are rounded to u before they are added, so another
split changes an update by about u of itself, and a loss by u of what training has changed about it."""
GRAD_NORM_BOUND = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-9}
"""Bound of the gradient norm, 4u: it depends more strongly on the parameters than the loss does."""
PARAMETERS_BOUND = {"fp32": 1e-6}
"""Bound of the final parameters, for runs of at most PARAMETERS_STEPS steps."""
PARAMETERS_STEPS = 20
FIRST_LOSS_BOUND = {"fp32": 1e-6}
"""Bound of the loss of the first step, before any training, where only the order of sums differs."""
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
        parameters: Whether both runs save checkpoints whose parameters can be compared.
    """

    exact: tuple[str, ...]
    bounds: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    first_bounds: Mapping[str, float] = field(default_factory=dict)
    rerouted: Mapping[str, float] = field(default_factory=dict)
    steps: int = LOSS_STEPS
    start: int = 1
    parameters: bool = True

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


EXACT = Tolerance(KEYS)
"""No difference at all."""


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
            return Tolerance(SAMPLES, note=f"{why}: losses shown, not compared", parameters=False)
        bounds = {"train/loss": LOSS_BOUND["fp32"]}
        return Tolerance(SAMPLES, bounds, steps=TRAINER_STEPS, parameters=False)
    if variant.split == reference.split and variant.mesh == reference.mesh:
        return EXACT
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
    """A difference beyond the tolerance, or another promise that a run broke.

    Args:
        step: Optimizer step, where it is of one.
        key: Key of the row; `row` where that is missing, or what else of the run is wrong.
        expected, found: Values of the reference and of the run; `missing` where a row has no such key.
        bound: Largest relative difference allowed; None where the values must be the same bits.
        text: In words, on one line; by default of the others.
    """

    step: int | None
    key: str | None
    expected: Any = None
    found: Any = None
    bound: float | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.text:
            return
        expected, found = shorten(self.expected), shorten(self.found)
        text = f"step {self.step} {self.key}: expected {expected}, found {found}"
        relative = relative_difference(self.expected, self.found)
        if self.bound is not None and relative is not None:
            text += f", {relative:.2g} apart instead of at most {self.bound:.2g}"
        object.__setattr__(self, "text", text)


@dataclass
class Comparison:
    """Result of comparing one run, or a part of it, with another.

    Args:
        verdict: `identical`: every compared key at every step. `not compared`: the samples only. `not
            replayed`: with the reason as `note`.
        first: The first difference beyond the tolerance, by step and then in the order of `KEYS`.
        largest: Key to its largest relative difference over all steps, also where there is no bound.
        note: What is not compared, and why.
        rerouted_at: First step at which a token went to another expert.
    """

    verdict: Literal["identical", "within bound", "differs", "not compared", "failed", "not replayed"]
    first: Difference | None = None
    largest: dict[str, float] = field(default_factory=dict)
    note: str = ""
    rerouted_at: int | None = None

    @property
    def violated(self) -> bool:
        return self.verdict in ("differs", "failed")

    def as_dict(self) -> dict[str, Any]:
        """This result in parity.json and replay.json."""
        return {
            "verdict": self.verdict,
            "first_difference": self.first and vars(self.first),
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
            first = first or next(row_differences(step, left, right))
            continue
        if rerouted_at is None and tolerance.checks_routing(step) and (share := rerouted_share(left, right)):
            rerouted_at = step
            if share > LARGEST_TIE and first is None and not (ties := find_ties(step)):
                text = f"step {step}: {share:.1%} of a layer's choices go elsewhere, not shown to be ties"
                first = Difference(step, ROUTING, 0.0, share, LARGEST_TIE, text)
        bounds = tolerance.bounds_at(step, rerouted=rerouted_at is not None)
        for key in KEYS:
            same = same and left.get(key) == right.get(key)
            relative = relative_difference(left.get(key), right.get(key))
            if relative is not None and key not in SAMPLES:
                largest[key] = max(largest.get(key, 0.0), relative)
        keys = [key for key in KEYS if key in bounds or key in tolerance.exact_at(step)]
        first = first or next(row_differences(step, left, right, keys, bounds), None)
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


def row_differences(
    step: int,
    expected: Mapping[str, Any] | None,
    found: Mapping[str, Any] | None,
    keys: Sequence[str] | None = None,
    bounds: Mapping[str, float] | None = None,
) -> Iterator[Difference]:
    """Numbers of two rows of a step that are not the same bits or within their bound.

    They are those of the `keys`, or all but those that measure the machine. Inputs come first.
    """
    if expected is None or found is None:
        left, right = ("missing" if row is None else "there" for row in (expected, found))
        yield Difference(step, "row", left, right)
        return
    every = dict.fromkeys([*(key for key in SAMPLES if key in expected), *expected, *found])
    for key in [key for key in every if not key.startswith(_MACHINE_KEYS)] if keys is None else keys:
        left, right, bound = expected.get(key, "missing"), found.get(key, "missing"), (bounds or {}).get(key)
        is_there = key in expected or key in found or key not in REQUIRED
        if is_there and json.dumps(left) == json.dumps(right):
            continue
        relative = relative_difference(left, right)
        if bound is None or relative is None or relative > bound:
            yield Difference(step, key, left, right, bound)


def exact_differences(
    reference: Rows, rows: Rows, *, steps: int | None = None, owed: int | None = None
) -> Iterator[Difference]:
    """All numbers that are not the reference's, bit for bit, without times and speeds.

    Args:
        reference, rows: Merged by step.
        steps: Number of steps that must be there; None for those up to the last of `rows`.
        owed: Step whose evaluation a stop signal postponed to the next attempt.
    """
    last = steps if steps is not None else max(rows, default=-1)
    for step in sorted(step for step in {*reference, *rows} if step <= last):
        for each in row_differences(step, reference.get(step), rows.get(step)):
            if each.key == "row":
                text = f"step {step}: a row is {each.found}, the reference's is not"
                yield Difference(step, "row", each.expected, each.found, text=text)
            elif step != owed or each.key in rows[step]:
                yield each


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


def compare_runs(
    left: Path,
    right: Path,
    steps: int | None = None,
    tolerance: Tolerance = EXACT,
    find_ties: Callable[[int], str] = lambda step: "",
) -> Comparison:
    """Compare the folder of a run with that of its reference: rows, and the parameters at the end.

    Args:
        left: Folder of the reference.
        right: Folder of the run.
        steps: Number of steps of both, each with a row; None for the rows and steps that one of them has.
        tolerance: How far they may differ.
        find_ties: As in `compare_rows`.
    """
    reference, rows = rows_of_run(left), rows_of_run(right)
    trained = [step for each in (reference, rows) for step, row in each.items() if is_training_row(row)]
    last = max(trained, default=1) if steps is None else steps
    due = sorted({*trained, last}) if steps is None else None
    comparison = compare_rows(reference, rows, last, tolerance, find_ties, due=due)
    if comparison.verdict == "not compared" or not tolerance.parameters:
        return comparison
    try:  # also where the rows' digests are equal, since a resume reads the checkpoint
        distance = parameters_distance(left, right, last)
    except PretrainError as error:
        digests = [each.get(last, {}).get(DIGEST) for each in (reference, rows)]
        if digests[0] is None or digests[0] != digests[1]:
            comparison.note = "; ".join(filter(None, [comparison.note, f"parameters not compared: {error}"]))
            return comparison
        distance = 0.0
    add_parameters_distance(comparison, distance, last, tolerance)
    return comparison


def rows_of_run(folder: Path) -> Rows:
    """Rows of a run by step; empty where they cannot be read."""
    try:
        return rows_of(folder)
    except PretrainError:
        return {}


def add_parameters_distance(
    comparison: Comparison, distance: float, steps: int, tolerance: Tolerance
) -> None:
    """Add the relative norm of the final parameters' difference, and compare it with its bound."""
    comparison.largest[PARAMETERS] = distance
    bound = tolerance.bounds.get(PARAMETERS) if comparison.rerouted_at is None else None
    if DIGEST in tolerance.exact:
        bound = 0.0
    if bound is not None and not distance <= bound:
        text = f"step {steps}: the parameters differ by {distance:.2g}, more than {bound:.2g}"
        first = comparison.first or Difference(steps, PARAMETERS, 0.0, distance, bound, text)
        comparison.first, comparison.verdict = first, "differs"


def parameters_distance(left: Path, right: Path, step: int) -> float:
    """‖left − right‖ / ‖left‖ over all parameters of two runs' checkpoints of `step`, in float64.

    Raises:
        PretrainError: a checkpoint is missing or damaged.
    """
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


def manifest_differences(
    left: Manifest, right: Manifest, left_out: Collection[str] = ()
) -> Iterator[Difference]:
    """Numbers of two checkpoints' manifests that equal runs agree on and these do not, but for `left_out`."""
    expected, found = (_numbers(each) for each in (left, right))
    for name in sorted({*expected, *found}.difference(left_out)):
        value, other = (each.get(name, "missing") for each in (expected, found))
        if value != other:
            text = f"{name}: expected {shorten(value, 60)}, found {shorten(other, 60)}"
            yield Difference(right.run.step, name, value, other, text=text)


def _numbers(content: Manifest) -> dict[str, Any]:
    """What a manifest says by name, without what names the run, how it was launched, and its tensors."""
    run = {name: value for name, value in vars(content.run).items() if name not in _LAUNCH_FACTS}
    parts = {"scalars": content.scalars, "extra": run.pop("extra"), "fingerprints": run.pop("fingerprints")}
    inner = {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items()}
    return run | {"optimizer": content.optimizer, "scaler": content.scaler} | inner


def tensor_differences(
    reference: Path, folder: Path, left: Manifest, right: Manifest
) -> Iterator[Difference]:
    """Tensors of two sound checkpoints that are not the same bits; one of each is in memory.

    `left` and `right` are their manifests.
    """
    from llm_pretrain.checkpoints.opening import CheckpointTensors

    if left.files == right.files:  # the same bytes: their digests were verified
        return
    with CheckpointTensors(reference, left) as expected, CheckpointTensors(folder, right) as found:
        for name in dict.fromkeys([*left.tensors, *right.tensors]):
            ours, theirs = (shorten(each.tensors.get(name, "missing"), 60) for each in (left, right))
            if ours != theirs:
                text = f"{name}: expected {ours}, found {theirs}"
                yield Difference(right.run.step, name, ours, theirs, text=text)
            elif text := tensor_difference(expected.read(name), found.read(name)):
                yield Difference(right.run.step, name, text=f"{name}: {text}")


def tensor_difference(expected: Tensor, found: Tensor) -> str:
    """How many elements of two tensors of one shape and dtype differ, and by how much; empty where none do.

    Bits of NaN and the sign of zero count.
    """
    import torch

    size = expected.element_size()
    left, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (expected, found))
    if torch.equal(left, right):
        return ""
    elements = int((left.view(-1, size) != right.view(-1, size)).any(-1).sum())
    largest = float((expected.double() - found.double()).abs().max())
    largest = math.inf if math.isnan(largest) else largest
    return f"{elements:,} of {expected.numel():,} elements, at most {largest:.2g} apart"


def shorten(value: object, length: int = 24) -> str:
    """A value as text for a message; a float keeps every digit."""
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…"
