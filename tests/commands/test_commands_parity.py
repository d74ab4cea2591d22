"""`parity` plans what can work, and compares fabricated runs: verdicts, first differences, tolerances."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT
from support.run_folders import make_run, training_row

from llm_pretrain.audit.comparison import (
    DIGEST,
    KEYS,
    SAMPLES,
    Difference,
    Tolerance,
    add_parameters_distance,
    compare_rows,
    compare_runs,
    tolerance_of,
)
from llm_pretrain.audit.parity import (
    VariantResult,
    VariantRun,
    compare_variants,
    is_violated,
)
from llm_pretrain.audit.variants import (
    LEAST_RANKS,
    ParityPlan,
    Variant,
    build_variants,
    distributed_of,
    make_plan,
)
from llm_pretrain.commands import parity
from llm_pretrain.commands.parity import render
from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, TrainingConfig
from llm_pretrain.launch.jobs import Machine

STEPS = 6
DENSE = Config(training=TrainingConfig(micro_batch_size=4, global_batch_size=16, precision="fp32"))
MOE = dataclasses.replace(DENSE, model=ModelConfig(num_experts=4, num_experts_per_tok=2))
SPLIT_SCOPE = dataclasses.replace(
    MOE, model=dataclasses.replace(MOE.model, router_aux_loss_scope="micro_batch")
)
DROPOUT = dataclasses.replace(DENSE, model=ModelConfig(hidden_dropout=0.1))
ATTENTION_DROPOUT = dataclasses.replace(DENSE, model=ModelConfig(attention_dropout=0.1))

ONE, TWO = Variant("torchrun", 1, 4, 4, "fp32", "ddp"), Variant("torchrun", 2, 2, 4, "fp32", "ddp")


def on(path: str, variant: Variant) -> Variant:
    return dataclasses.replace(variant, path=path)


def rows(**changes: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Rows of a run; `loss={3: 1.5}` changes a value of step 3 (`…` removes it)."""
    made = {}
    for step in range(1, STEPS + 1):
        row = training_row(step, train__parameters_sha256=f"{step:064x}")
        row["data/batch_sha256"] = f"{step:08x}" * 8
        made[step] = row
    names = {"sha256": "data/batch_sha256", "digest": DIGEST}
    for name, values in changes.items():
        for step, value in values.items():
            key = names.get(name, f"train/{name}")
            made[step][key] = value
            if value is ...:
                del made[step][key]
    return made


BOUNDED = Tolerance(SAMPLES, {"train/loss": 1e-5, "train/grad_norm": 1e-4})


@pytest.mark.parametrize("key", [key for key in KEYS if key != "train/aux_loss"])
def test_one_changed_bit_differs_where_keys_are_exact(key):
    reference, other = rows(), rows()
    value = reference[4][key]
    other[4][key] = value[:-1] + "f" if isinstance(value, str) else value * (1 + 3e-16) + (value == 1000)
    assert other[4][key] != value
    comparison = compare_rows(reference, other, STEPS, Tolerance(KEYS))
    assert comparison.verdict == "differs"
    assert comparison.first == Difference(4, key, value, other[4][key])


def test_the_first_difference_is_the_earliest_step_and_an_input_before_a_result():
    other = rows(loss={2: 9.0, 3: 9.0}, digest={1: "a", 2: "b"}, sha256={2: "c"}, grad_norm={2: 5.0})
    comparison = compare_rows(rows(), other, STEPS, Tolerance(KEYS))
    assert comparison.first == Difference(1, DIGEST, f"{1:064x}", "a")
    other[1] = rows()[1]
    comparison = compare_rows(rows(), other, STEPS, Tolerance(KEYS))
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.key) == (2, "data/batch_sha256")


def test_a_difference_within_its_bound_is_reported_and_a_larger_one_differs():
    loss = rows()[3]["train/loss"]
    near = compare_rows(rows(), rows(loss={3: loss * (1 + 9e-6)}, digest={3: "a"}), STEPS, BOUNDED)
    assert near.verdict == "within bound"
    assert near.largest["train/loss"] == pytest.approx(9e-6, rel=1e-3)
    far = compare_rows(rows(), rows(loss={3: loss * (1 + 2e-5)}), STEPS, BOUNDED)
    assert far.verdict == "differs"
    assert far.first is not None
    assert (far.first.step, far.first.key, far.first.bound) == (3, "train/loss", 1e-5)
    assert f"{loss!r}" in far.first.text


UNBOUNDED = Tolerance(SAMPLES, note="why")
NO_DIGESTS = dict.fromkeys(range(1, STEPS + 1), ...)
SKIPPED = {"loss": {2: None}, "grad_norm": {2: None}}


@pytest.mark.parametrize(
    ("made", "reference", "changes", "verdict"),
    [
        *((made, {}, {}, "identical") for made in (Tolerance(KEYS), BOUNDED, UNBOUNDED)),
        (BOUNDED, {}, {"sha256": {5: "a"}}, "differs"),
        (BOUNDED, {}, {"loss_tokens": {5: 999}}, "differs"),
        (UNBOUNDED, {}, {"sha256": {5: "a"}}, "differs"),
        (UNBOUNDED, {}, {"loss_tokens": {5: 999}}, "differs"),
        (UNBOUNDED, {}, {"loss": {2: 1.0}}, "not compared"),
        # the Trainer path has no digests, and equal losses do not imply equal parameters
        (BOUNDED, {}, {"digest": NO_DIGESTS}, "within bound"),
        (BOUNDED, SKIPPED, SKIPPED, "identical"),
        (BOUNDED, {}, SKIPPED, "differs"),
        (BOUNDED, {"sha256": {2: ...}}, {"sha256": {2: ...}}, "differs"),  # nothing is compared
    ],
)
def test_samples_are_always_compared_and_losses_by_their_bound(made, reference, changes, verdict):
    comparison = compare_rows(rows(**reference), rows(**changes), STEPS, made)
    assert comparison.verdict == verdict
    assert verdict != "not compared" or (comparison.note, comparison.largest["train/loss"] > 0.5) == (
        "why",
        True,
    )


@pytest.mark.parametrize("made", [Tolerance(KEYS), BOUNDED])
def test_a_missing_row_or_number_differs(made):
    short = {step: row for step, row in rows().items() if step != STEPS}
    for left, right in ((short, rows()), (rows(), short), (rows(), {})):
        first = compare_rows(left, right, STEPS, made).first
        assert first is not None
        assert (first.key, {first.expected, first.found}) == ("row", {"missing", "there"})


def routed(moved: float, step: int, **changes: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Rows of a mixture of experts whose routing changes by `moved` from `step` on."""
    made = rows(**changes)
    for each, row in made.items():
        share = moved if each >= step else 0.0
        row["moe/load"] = [[0.5, 0.5], [0.5 - share, 0.5 + share]]
    return made


def test_bounds_are_wider_from_the_first_rerouted_token_on():
    """And not one step earlier, where a difference is rounding or an error."""
    made = tolerance_of(TWO, ONE, MOE, STEPS)
    loss = rows()[4]["train/loss"]
    off = {"loss": {4: loss * (1 + 1e-3)}, "digest": {4: "a"}}
    reference = routed(0.0, 1)
    assert compare_rows(reference, routed(0.0, 1, **off), STEPS, made).verdict == "differs"
    assert compare_rows(reference, routed(3e-4, 5, **off), STEPS, made).verdict == "differs"
    rerouted = compare_rows(reference, routed(3e-4, 4, **off), STEPS, made)
    assert (rerouted.verdict, rerouted.rerouted_at) == ("within bound", 4)
    assert "from step 4 on a token goes to another expert" in rerouted.note
    add_parameters_distance(rerouted, 1e-2, STEPS, made)
    assert rerouted.verdict == "within bound"
    far = routed(3e-4, 4, loss={4: loss * 1.1})
    assert compare_rows(reference, far, STEPS, made).verdict == "differs"


def test_rerouting_more_than_ties_differs_and_equal_splits_have_no_ties():
    reference = routed(0.0, 1)
    many = compare_rows(reference, routed(0.05, 3), STEPS, tolerance_of(TWO, ONE, MOE, STEPS))
    assert many.verdict == "differs"
    assert many.first is not None
    assert (many.first.step, many.first.key) == (3, "moe/load")
    twin = tolerance_of(on("accelerate", TWO), TWO, MOE, STEPS)
    assert not twin.rerouted
    assert not tolerance_of(TWO, ONE, DENSE, STEPS).rerouted


def test_more_rerouting_is_within_bound_where_every_choice_is_shown_to_be_a_tie():
    """Asked once, about the first such step, and only where nothing differs before it."""
    asked: list[int] = []

    def find_ties(step: int) -> str:
        asked.append(step)
        return "choices that differ then: 2" if step == 3 else ""

    reference, made = routed(0.0, 1), tolerance_of(TWO, ONE, MOE, STEPS)
    shown = compare_rows(reference, routed(0.05, 3, digest={3: "a"}), STEPS, made, find_ties)
    assert (shown.verdict, shown.rerouted_at, asked) == ("within bound", 3, [3])
    assert "from step 3 on" in shown.note
    assert shown.note.endswith("choices that differ then: 2")
    loss = rows()[4]["train/loss"]
    beyond = routed(0.05, 3, loss={4: loss * 1.1}, digest={4: "a"})
    assert compare_rows(reference, beyond, STEPS, made, find_ties).verdict == "differs"
    assert compare_rows(reference, routed(0.05, 2), STEPS, made, find_ties).verdict == "differs"
    assert asked == [3, 3, 2]
    before = routed(0.05, 3, loss={2: loss * 1.1})
    assert compare_rows(reference, before, STEPS, made, find_ties).verdict == "differs"
    few = routed(0.005, 3, digest={3: "a"})
    assert compare_rows(reference, few, STEPS, made, find_ties).verdict == "within bound"
    assert asked == [3, 3, 2], "neither"


def test_final_parameters_are_compared_where_they_have_a_bound():
    for bound, verdict in (({"parameters": 1e-6}, "differs"), ({}, "within bound")):
        made = Tolerance(SAMPLES, {**BOUNDED.bounds, **bound})
        comparison = compare_rows(rows(), rows(digest={6: "a"}), STEPS, made)
        add_parameters_distance(comparison, 2e-6, STEPS, made)
        assert (comparison.verdict, comparison.largest["parameters"]) == (verdict, 2e-6)


def test_where_all_keys_are_exact_the_checkpoints_must_be_equal_too():
    """Also where rows have no digests, or digests of other parameters than were saved."""
    for made in (
        rows(),
        {
            step: {k: v for k, v in row.items() if k != "train/parameters_sha256"}
            for step, row in rows().items()
        },
    ):
        comparison = compare_rows(made, made, STEPS, Tolerance(exact=KEYS))
        add_parameters_distance(comparison, 0.0, STEPS, Tolerance(exact=KEYS))
        assert comparison.verdict == "identical"
        add_parameters_distance(comparison, 1e-9, STEPS, Tolerance(exact=KEYS))
        assert comparison.verdict == "differs"


SMALLER = Variant("torchrun", 2, 4, 2, "fp32", "ddp")
SHARDED = dataclasses.replace(TWO, mesh="fsdp")
TRAINER = on("trainer", ONE)
COMPARED: dict[str, tuple[Variant, Variant, Config, str | float | None]] = {
    "equal splits": (on("accelerate", TWO), TWO, MOE, "exact"),
    "another strategy": (SHARDED, TWO, DENSE, 1e-5),
    "dropout, equal splits": (on("accelerate", SMALLER), SMALLER, DROPOUT, "exact"),
    "dropout, equal micro batches": (TWO, ONE, DROPOUT, 1e-5),
    "dropout, other micro batches": (SMALLER, ONE, DROPOUT, None),
    "attention dropout, other micro batches": (SMALLER, ONE, ATTENTION_DROPOUT, None),
    "micro batches balanced, other ones": (SMALLER, ONE, SPLIT_SCOPE, None),
    "trainer": (TRAINER, ONE, DENSE, 1e-5),
    "trainer with experts": (TRAINER, ONE, MOE, None),
    "trainer with dropout": (TRAINER, ONE, DROPOUT, None),
    "trainer in bf16": (dataclasses.replace(TRAINER, precision="bf16"), ONE, DENSE, None),
}
"""What is compared with what -> "exact", the bound of the loss, or None for samples alone."""


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_compared_is_exact_or_has_a_bound_or_none(name):
    variant, reference, config, expected = COMPARED[name]
    made = tolerance_of(variant, reference, config, 20)
    assert made.exact == (KEYS if expected == "exact" else SAMPLES)
    assert made.bounds.get("train/loss") == (None if expected == "exact" else expected)
    if expected is None:
        assert not made.bounds
        assert made.note
    if variant.path == "trainer" and expected:
        assert dict(made.bounds) == {"train/loss": 1e-5}


@pytest.mark.parametrize(
    ("key", "step", "times", "verdict"),
    [
        ("train/loss", 1, 1 + 2e-6, "differs"),  # nothing has been trained: only the order of a sum differs
        ("train/loss", 2, 1 + 2e-6, "within bound"),
        ("train/loss", 20, 1 + 2e-5, "differs"),
        ("train/loss", 21, 1.5, "within bound"),
        ("train/grad_norm", 10, 1 + 2e-4, "differs"),
        ("train/grad_norm", 11, 1.5, "within bound"),
        ("data/batch_sha256", 30, 2, "differs"),
    ],
)
def test_bounds_end_after_a_number_of_steps(key, step, times, verdict):
    steps = 30
    reference = {n: {**rows()[1], "data/batch_sha256": f"{n:064x}"} for n in range(1, steps + 1)}
    other = {n: dict(row) for n, row in reference.items()}
    other[step][key] *= times  # of a digest: the same text twice
    tolerance = tolerance_of(TWO, ONE, DENSE, steps)
    comparison = compare_rows(reference, other, steps, tolerance)
    assert comparison.verdict == verdict
    assert "later ones shown" in comparison.note
    assert compare_rows(reference, other, min(step, 10), tolerance).note == tolerance.note


def variants_of(config: Config, **asked: Any) -> tuple[list[Variant], list[str]]:
    given = {"paths": ["torchrun", "accelerate"], "world_sizes": [1, 2], "accumulations": None}
    given |= {"precisions": ["fp32"], "meshes": ["ddp"]}
    return build_variants(config, Machine(gpus=0, cores=2), **(given | asked))


def test_the_micro_batch_size_is_configured_or_follows_from_the_accumulation():
    assert [variant.split for variant in variants_of(DENSE)[0]] == [(1, 4, 4)] * 2 + [(2, 2, 4)] * 2
    splits = [variant.split for variant in variants_of(DENSE, accumulations=[1, 4], paths=["torchrun"])[0]]
    assert splits == [(1, 1, 16), (1, 4, 4), (2, 1, 8), (2, 4, 2)]


def test_fp16_without_a_gpu_leaves_accelerate_out_with_a_note():
    variants, notes = variants_of(DENSE, precisions=["fp32", "fp16"])
    fp16 = [variant for variant in variants if variant.precision == "fp16"]
    assert [(variant.path, variant.world_size) for variant in fp16] == [("torchrun", 1), ("torchrun", 2)]
    assert len(variants) == 6
    assert len(notes) == 1
    assert "accelerate fp16" in notes[0]


def test_a_strategy_or_a_feature_leaves_out_paths_without_it():
    paths = ["torchrun", "accelerate", "trainer"]
    variants, notes = variants_of(DENSE, paths=paths, world_sizes=[2], meshes=["ddp", "fsdp", "deepspeed"])
    assert [(variant.mesh, variant.path) for variant in variants] == [
        *(("ddp", path) for path in paths),
        *(("fsdp", path) for path in paths[:2]),
        ("deepspeed", "accelerate"),
    ]
    assert len(notes) == 3
    assert len({variant.name for variant in variants}) == len({str(variant) for variant in variants}) == 6


def run_of(variant: Variant, folder: Path, made: dict[int, dict[str, Any]], exit_code: int = 0) -> VariantRun:
    """A finished launch with these rows, and no checkpoint."""
    log = folder / f"{variant.name}.log"
    make_run(folder / variant.name, made.values())
    log.write_text("$ command\nTraceback\nValueError: the cause\n")
    return VariantRun(variant, folder / variant.name, log, exit_code, 1.0)


def compare_grid(
    folder: Path, config: Config, variants: list[Variant], **changed: dict[str, Any]
) -> list[VariantResult]:
    """Results of variants with equal rows, except those changed by name."""
    runs = [run_of(variant, folder, rows(**changed.get(variant.name, {}))) for variant in variants]
    return compare_variants(runs, config, STEPS)


def test_a_variant_is_compared_with_its_split_on_another_path_or_with_the_first(tmp_path):
    """So the wrong path is the one that is reported."""
    variants, _ = variants_of(DENSE)
    wrong = {"accelerate-w2-a2-fp32": {"loss": {3: 9.0}}}
    results = compare_grid(tmp_path, DENSE, variants, **wrong)
    first, one, two, other = results
    assert (first.is_reference, first.against, first.comparison.verdict) == (True, None, "identical")
    assert (one.against, two.against, other.against) == (
        first.run.variant,
        first.run.variant,
        two.run.variant,
    )
    assert [each.comparison.verdict for each in results] == ["identical", "identical", "identical", "differs"]
    assert is_violated(results)
    assert not is_violated(results[:3])
    text = render(results)
    assert "accelerate W=2 A=2 fp32 differs first at step 3 train/loss: expected" in text
    assert text.splitlines()[1].split()[:7] == ["torchrun", "ddp", "1", "4", "4", "fp32", "reference"]


def test_a_failed_launch_is_a_violation_and_reports_its_first_difference(tmp_path):
    variants, _ = variants_of(DENSE, world_sizes=[1])
    half = {step: row for step, row in rows(sha256={1: "a"}).items() if step <= 3}
    runs = [run_of(variants[0], tmp_path, rows()), run_of(variants[1], tmp_path, half, exit_code=1)]
    results = compare_variants(runs, DENSE, STEPS)
    assert results[1].comparison.verdict == "failed"
    assert results[1].comparison.first is not None
    assert results[1].comparison.first.key == "data/batch_sha256"
    assert is_violated(results)
    text = render(results)
    assert "ValueError: the cause" in text
    assert str(runs[1].log) in text


def test_the_reference_is_the_first_of_its_precision_that_did_not_fail(tmp_path):
    variants, _ = variants_of(DENSE)
    runs = [run_of(variant, tmp_path, rows(), exit_code=int(variant == variants[0])) for variant in variants]
    results = compare_variants(runs, DENSE, STEPS)
    assert [each.comparison.verdict for each in results] == ["failed"] + ["identical"] * 3
    assert [each.is_reference for each in results] == [False, True, False, False]
    assert results[2].against == variants[1]


def test_a_run_without_rows_is_no_reference(tmp_path):
    """A script that does nothing and exits with 0 must not pass."""
    variants, _ = variants_of(DENSE, world_sizes=[1])
    results = compare_variants([run_of(variant, tmp_path, {}) for variant in variants], DENSE, STEPS)
    assert [each.comparison.verdict for each in results] == ["differs", "differs"]
    (alone,) = compare_variants([run_of(ONE, tmp_path / "alone", rows())], DENSE, STEPS)
    assert alone.comparison.verdict == "not compared"


def test_two_folders_are_compared_by_the_rows_that_they_have(tmp_path):
    sparse = {step: row for step, row in rows().items() if step % 2 == 0}
    make_run(tmp_path / "left", [*sparse.values(), {"step": 5, "time": 1.0, "eval/loss": 2.0}])
    for name, changes, verdict in (
        ("same", {}, "identical"),
        ("near", {"loss": {4: rows()[4]["train/loss"] * (1 + 9e-6)}, "digest": {4: "a"}}, "differs"),
    ):
        other = rows(**changes)
        make_run(tmp_path / name, [other[step] for step in sparse])
        assert compare_runs(tmp_path / "left", tmp_path / name).verdict == verdict
    near = compare_runs(tmp_path / "left", tmp_path / "near", tolerance=BOUNDED)
    assert (near.verdict, near.first) == ("within bound", None)
    make_run(tmp_path / "short", [sparse[2]])
    short = compare_runs(tmp_path / "left", tmp_path / "short").first
    assert short == Difference(4, "row", "there", "missing")
    assert compare_runs(tmp_path / "none", tmp_path / "none").violated, "nothing is compared"


SIZES: dict[str, tuple[str, int, int | None, int]] = {
    "ddp": ("ddp", 1, None, 1),
    "fsdp": ("fsdp", 1, None, 1),
    "hsdp": ("fsdp", 2, None, 1),
    "ep": ("fsdp", 1, None, 4),
    "ep+fsdp": ("fsdp", 1, None, 2),
    "ep+hsdp": ("fsdp", 2, None, 2),
    "deepspeed": ("deepspeed", 1, None, 1),
    "2x2": ("fsdp", 2, 2, 1),
    "1x4+ep4": ("fsdp", 1, 4, 4),
}
"""Mesh on four processes to strategy, dp_replicate_size, dp_shard_size and ep_size."""


@pytest.mark.parametrize("mesh", SIZES)
def test_a_mesh_replaces_every_configured_size(mesh):
    other = DistributedConfig(strategy="fsdp", dp_replicate_size=8, dp_shard_size=8, ep_size=8, cpu_threads=1)
    found = distributed_of(mesh, 4, other)
    sizes = found.strategy, found.dp_replicate_size, found.dp_shard_size, found.ep_size
    assert sizes == SIZES[mesh]
    assert found.cpu_threads == 1
    assert set(LEAST_RANKS) < set(SIZES)


def plan_of(store: Path, *words: str) -> ParityPlan:
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    preset = str(ROOT / "configs" / "tiny-moe.yaml")
    sources = ["--data.sources", f"[{{store: {store}}}]"]
    arguments = parser.parse_args(["--config", preset, *sources, "--model.num_experts", "12", *words])
    return make_plan(arguments, Machine(0, 2))


def test_every_world_size_has_the_meshes_that_it_permits(plain_store):
    names = "ddp,fsdp,hsdp,ep,ep+fsdp,ep+hsdp,2x2"
    plan = plan_of(
        plain_store, "--mesh", names, "--world-size", "1,2,3,4", "--training.micro_batch_size", "2"
    )
    found: dict[int, list[str]] = {}
    for variant in plan.variants:
        if variant.path == "accelerate":
            found.setdefault(variant.world_size, []).append(variant.mesh)
    assert {size: ",".join(meshes) for size, meshes in found.items()} == {
        1: "ddp,fsdp",
        2: "ddp,fsdp,ep",
        3: "ddp,fsdp,ep",
        4: names,
    }
    assert len(plan.notes) == 4 * 7 - len(plan.variants) // 2
    assert "2x2 W=1 is left out: expected 4 processes" in plan.notes
