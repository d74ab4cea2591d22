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
"""Keys that every row has. Rows of a dense model have no auxiliary loss, and Trainer rows no digest."""
_MACHINE_KEYS = ("time", "perf/")
"""First characters of the keys that measure the machine."""
_LAUNCH_FACTS = ("launcher", "run_id", "wandb_id")
"""Facts in a checkpoint's manifest that name the run and how it was launched."""
PARAMETERS = "parameters"
"""Key of the relative norm of the final parameters' difference, in the table and in parity.json."""

LOSS_BOUND = {"fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
"""Largest relative difference of a loss between two splits of one batch, by precision. For bf16 and fp16 it
is the unit round-off u. Each micro batch's weight gradients are rounded to u before they are summed. So
another split changes an update by about the fraction u, and a loss by u times its change since the start."""
GRAD_NORM_BOUND = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-9}
"""Bound of the gradient norm, in bf16 and fp16 4u. It depends more on the parameters than the loss does."""
PARAMETERS_BOUND = {"fp32": 1e-6}
"""Bound of the final parameters, for runs of at most PARAMETERS_STEPS steps."""
PARAMETERS_STEPS = 20
FIRST_LOSS_BOUND = {"fp32": 1e-6}
"""Bound of the first step's loss. Before any training only the order of sums differs."""
LOSS_STEPS, GRAD_NORM_STEPS, TRAINER_STEPS = 20, 10, 50
"""Number of steps, from the first step with another split, for which the bounds of losses, of the gradient
norm and of Trainer's loss hold. Training amplifies rounding: at a high learning rate, a difference of 1e-7 at
the first step was measured to grow to 1 % of the gradient norm after 25 steps, in equivalent code."""

ROUTING = "moe/load"
"""Each expert's share of its layer's tokens: a ratio of integers, equal while no token is rerouted."""
REROUTED_BOUND = {"train/loss": 2**-8, "train/aux_loss": 2**-5, GRAD_NORM: 2**-2}
"""Measured bounds from the first step at which a token goes to another expert. Routing is discrete: if two
experts tie within rounding, another split may choose the other expert. Later differences exceed rounding."""
LARGEST_TIE = 0.01
"""Share of a layer's choices that may differ at the first rerouted step without a check of the router's
scores. If more differ, `find_ties` must show that every one of them is a tie."""


@dataclass(frozen=True)
class Tolerance:
    """How far the rows of one run may differ from those of another.

    Args:
        exact: Keys whose values must be equal bit for bit.
        bounds: Key to the largest relative difference. `parameters` stands for the final parameters.
        note: What is not compared, and why.
        first_bounds: Override entries of `bounds` at the first step.
        rerouted: Replaces `bounds` from the first step at which `moe/load` differs; empty for dense models.
        steps: Number of steps for which `bounds` hold; the gradient norm's holds for GRAD_NORM_STEPS.
        start: First step with this tolerance. At earlier steps every key must be equal bit for bit.
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
        step: Optimizer step; None if the difference belongs to no step.
        key: Key of the row, `row` if the whole row is missing, or the name of what else is wrong.
        expected, found: Values of the reference and of the run; `missing` where a row has no such key.
        bound: Largest relative difference allowed; None if the values must be equal bit for bit.
        text: The difference in words, on one line; by default made from the other fields.
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
        verdict: `identical`: every compared key is equal at every step. `not compared`: only the samples
            were compared. `not replayed`: `note` has the reason.
        first: The first difference beyond the tolerance, by step and then in the order of `KEYS`.
        largest: Largest relative difference of each key over all steps, with or without a bound.
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
    """Compare the rows of steps 1 to `steps`, or of the `due` steps; a missing row is a difference.

    `find_ties` gets the first rerouted step, if more than LARGEST_TIE of a layer's choices differ there.
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
    """Yield each value of two rows of a step that is neither equal bit for bit nor within its bound.

    Compares the `keys`, or by default all keys but those that measure the machine. Inputs come first.
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
    """Yield every value, except times and speeds, that is not equal to the reference's bit for bit.

    Args:
        reference, rows: Rows by step.
        steps: Last step to compare; None for the last step of `rows`.
        owed: Step whose evaluation a stop signal postponed to the next attempt; `rows` may lack it.
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
    """Largest share of a layer's choices that differ between two rows' `moe/load`; 0 if a row has none."""
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
    """Compare two runs by their folders: the rows, and the final parameters.

    Args:
        left: Folder of the reference.
        right: Folder of the run.
        steps: Number of steps, each with a row in both runs; None for all steps that either run has.
        tolerance: How far the runs may differ.
        find_ties: As in `compare_rows`.
    """
    reference, rows = rows_of_run(left), rows_of_run(right)
    trained = [step for each in (reference, rows) for step, row in each.items() if is_training_row(row)]
    last = max(trained, default=1) if steps is None else steps
    due = sorted({*trained, last}) if steps is None else None
    comparison = compare_rows(reference, rows, last, tolerance, find_ties, due=due)
    if comparison.verdict == "not compared" or not tolerance.parameters:
        return comparison
    try:  # even if the rows' digests are equal, since a resume reads the checkpoint
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
    """Add the relative distance of the final parameters to a comparison, and check it against its bound."""
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
    """Yield the entries, except `left_out`, that two checkpoints' manifests should share but do not."""
    expected, found = (_numbers(each) for each in (left, right))
    for name in sorted({*expected, *found}.difference(left_out)):
        value, other = (each.get(name, "missing") for each in (expected, found))
        if value != other:
            text = f"{name}: expected {shorten(value, 60)}, found {shorten(other, 60)}"
            yield Difference(right.run.step, name, value, other, text=text)


def _numbers(content: Manifest) -> dict[str, Any]:
    """A manifest's entries by name, without its tensors and without `_LAUNCH_FACTS`."""
    run = {name: value for name, value in vars(content.run).items() if name not in _LAUNCH_FACTS}
    parts = {"scalars": content.scalars, "extra": run.pop("extra"), "fingerprints": run.pop("fingerprints")}
    inner = {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items()}
    return run | {"optimizer": content.optimizer, "scaler": content.scaler} | inner


def tensor_differences(
    reference: Path, folder: Path, left: Manifest, right: Manifest
) -> Iterator[Difference]:
    """Yield the tensors of two sound checkpoints that differ in any bit; memory holds one tensor of each.

    `left` is the manifest of `reference`, `right` the manifest of `folder`.
    """
    from llm_pretrain.checkpoints.opening import CheckpointTensors

    if left.files == right.files:  # equal digests, which were verified, so equal bytes
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
    """Say how many elements of two tensors of one shape and dtype differ, and by how much; empty if none.

    Different bits of NaN and different signs of zero count as differences.
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
