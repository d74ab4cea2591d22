"""`parity` compares fabricated runs: every verdict, the first difference, tolerances, and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import make_run, training_row

from llm_pretrain.audit.comparison import (
    DIGEST,
    KEYS,
    LOSS_BOUND,
    SAMPLES,
    Difference,
    Tolerance,
    add_parameters_distance,
    compare_rows,
    compare_runs,
    rerouted_share,
    tolerance_of,
)
from llm_pretrain.audit.parity import (
    InterruptedAttempt,
    InterruptedResult,
    VariantResult,
    VariantRun,
    compare_interrupted,
    compare_variants,
    is_violated,
    result_content,
)
from llm_pretrain.audit.variants import Variant, build_variants
from llm_pretrain.commands.parity import render
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, TrainingConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import Machine, last_error_lines
from llm_pretrain.launch.options import write_result

STEPS = 6
TWO_CORES = Machine(gpus=0, cores=2)
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


def test_equal_rows_are_identical_under_any_tolerance():
    for made in (Tolerance(KEYS), BOUNDED, Tolerance(SAMPLES)):
        comparison = compare_rows(rows(), rows(), STEPS, made)
        assert (comparison.verdict, comparison.first) == ("identical", None)
        assert set(comparison.largest.values()) == {0.0}


@pytest.mark.parametrize("key", [key for key in KEYS if key != "train/aux_loss"])
def test_one_changed_bit_differs_where_keys_are_exact(key: str):
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


def test_different_samples_differ_under_any_tolerance():
    for made in (BOUNDED, Tolerance(SAMPLES, note="why")):
        assert compare_rows(rows(), rows(sha256={5: "a"}), STEPS, made).verdict == "differs"
        assert compare_rows(rows(), rows(loss_tokens={5: 999}), STEPS, made).verdict == "differs"


def test_losses_without_a_bound_are_reported_and_not_compared():
    comparison = compare_rows(rows(), rows(loss={2: 1.0}), STEPS, Tolerance(SAMPLES, note="why"))
    assert (comparison.verdict, comparison.note) == ("not compared", "why")
    assert comparison.largest["train/loss"] > 0.5


@pytest.mark.parametrize("made", [Tolerance(KEYS), BOUNDED])
def test_a_missing_row_or_number_differs(made: Tolerance):
    short = {step: row for step, row in rows().items() if step != STEPS}
    for left, right in ((short, rows()), (rows(), short), (rows(), {})):
        first = compare_rows(left, right, STEPS, made).first
        assert first is not None
        assert (first.key, {first.expected, first.found}) == ("row", {"missing", "there"})
    without = rows(sha256={2: ...})
    assert compare_rows(without, without, STEPS, made).verdict == "differs", "nothing is compared"


def test_a_step_skipped_by_one_run_alone_differs():
    skipped = rows(loss={2: None}, grad_norm={2: None})
    assert compare_rows(skipped, skipped, STEPS, BOUNDED).verdict == "identical"
    first = compare_rows(rows(), skipped, STEPS, BOUNDED).first
    assert first is not None
    assert (first.key, first.found) == ("train/loss", None)


def test_runs_without_digests_are_not_called_identical():
    """The Trainer path has none, and equal losses do not imply equal parameters."""
    without = rows(digest=dict.fromkeys(range(1, STEPS + 1), ...))
    assert compare_rows(rows(), without, STEPS, BOUNDED).verdict == "within bound"


def test_before_a_tolerance_starts_every_key_is_exact():
    loss = rows()[4]["train/loss"]
    for step, verdict in ((4, "within bound"), (5, "differs")):
        made = dataclasses.replace(BOUNDED, start=step)
        other = rows(loss={4: loss * (1 + 1e-7)}, digest={4: "a"})
        assert compare_rows(rows(), other, STEPS, made).verdict == verdict


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


def test_routing_of_other_shapes_is_no_tie():
    assert rerouted_share({"moe/load": [[0.5, 0.5]]}, {"moe/load": [[1.0], [1.0]]}) == 1.0


def test_equal_splits_are_exact_and_other_splits_have_bounds():
    assert tolerance_of(on("accelerate", TWO), TWO, MOE, 20).exact == KEYS
    for precision in ("fp32", "bf16", "fp16"):
        one, two = (dataclasses.replace(variant, precision=precision) for variant in (ONE, TWO))
        made = tolerance_of(two, one, MOE, 20)
        assert made.exact == SAMPLES
        assert made.bounds["train/loss"] == made.bounds["train/aux_loss"] == LOSS_BOUND[precision]
        assert ("parameters" in made.bounds) == (precision == "fp32")
    assert tolerance_of(TWO, ONE, MOE, 20).bounds["parameters"] == 1e-6
    longer = tolerance_of(TWO, ONE, MOE, 21)
    assert "parameters" not in longer.bounds
    assert "20 steps" in longer.note


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
def test_bounds_end_after_a_number_of_steps(key: str, step: int, times: float, verdict: str):
    steps = 30
    reference = {n: {**rows()[1], "data/batch_sha256": f"{n:064x}"} for n in range(1, steps + 1)}
    other = {n: dict(row) for n, row in reference.items()}
    other[step][key] *= times  # of a digest: the same text twice
    tolerance = tolerance_of(TWO, ONE, DENSE, steps)
    comparison = compare_rows(reference, other, steps, tolerance)
    assert comparison.verdict == verdict
    assert "later ones shown" in comparison.note
    assert compare_rows(reference, other, min(step, 10), tolerance).note == tolerance.note


def test_one_strategy_is_exact_and_two_strategies_have_bounds():
    sharded = dataclasses.replace(TWO, mesh="fsdp")
    assert tolerance_of(on("accelerate", sharded), sharded, DENSE, 20).exact == KEYS
    made = tolerance_of(sharded, TWO, DENSE, 20)
    assert made.exact == SAMPLES
    assert made.bounds["train/loss"] == 1e-5


@pytest.mark.parametrize("config", [DROPOUT, ATTENTION_DROPOUT])
def test_with_dropout_only_equal_micro_batches_are_compared(config: Config):
    smaller = Variant("torchrun", 2, 4, 2, "fp32", "ddp")
    assert tolerance_of(TWO, ONE, config, 20).bounds, "the same micro batches"
    assert tolerance_of(on("accelerate", smaller), smaller, config, 20).exact == KEYS
    made = tolerance_of(smaller, ONE, config, 20)
    assert not made.bounds
    assert "dropout" in made.note


def test_a_balance_loss_per_micro_batch_is_compared_where_they_are_equal():
    smaller = Variant("torchrun", 2, 4, 2, "fp32", "ddp")
    assert tolerance_of(TWO, ONE, SPLIT_SCOPE, 20).bounds, "the same micro batches"
    assert not tolerance_of(smaller, ONE, SPLIT_SCOPE, 20).bounds
    assert tolerance_of(on("accelerate", smaller), smaller, SPLIT_SCOPE, 20).exact == KEYS


def test_the_trainer_path_has_a_loss_bound_for_dense_models_in_fp32():
    trainer = on("trainer", ONE)
    assert tolerance_of(trainer, ONE, DENSE, 20).bounds == {"train/loss": 1e-5}
    for variant, config in (
        (trainer, MOE),
        (trainer, DROPOUT),
        (dataclasses.replace(trainer, precision="bf16"), DENSE),
    ):
        made = tolerance_of(variant, ONE, config, 20)
        assert (made.exact, dict(made.bounds)) == (SAMPLES, {})
        assert made.note


def variants_of(config: Config, **asked: Any) -> tuple[list[Variant], list[str]]:
    given = {"paths": ["torchrun", "accelerate"], "world_sizes": [1, 2], "accumulations": None}
    return build_variants(config, TWO_CORES, **(given | {"precisions": ["fp32"], "meshes": ["ddp"]} | asked))


def test_the_micro_batch_size_is_configured_or_follows_from_the_accumulation():
    assert [variant.split for variant in variants_of(DENSE)[0]] == [(1, 4, 4)] * 2 + [(2, 2, 4)] * 2
    splits = [variant.split for variant in variants_of(DENSE, accumulations=[1, 4], paths=["torchrun"])[0]]
    assert splits == [(1, 1, 16), (1, 4, 4), (2, 1, 8), (2, 4, 2)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"world_sizes": [1, 5]}, "expected at most 4 on this machine of 2 cores, found 5"),
        ({"accumulations": [1, 3]}, "found 2 * 3 = 6; 1, 2, 4 or 8 would work"),
        ({"paths": ["trainer"]}, "expected torchrun or accelerate"),
        ({"paths": ["accelerate"], "precisions": ["fp16"]}, "silently train in fp32"),
    ],
)
def test_impossible_sizes_are_rejected_by_name(asked: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        variants_of(DENSE, **asked)
    assert any(expected in line for line in caught.value.problems)


def test_a_micro_batch_size_that_does_not_divide_is_rejected_with_sizes_that_do():
    odd = dataclasses.replace(
        DENSE, training=TrainingConfig(micro_batch_size=8, global_batch_size=24, precision="fp32")
    )
    with pytest.raises(ConfigError, match=r"found 2 \* 8 = 16; 2, 3, 4, 6 or 12 would work"):
        variants_of(odd)


def test_fp16_without_a_gpu_leaves_accelerate_out_with_a_note():
    variants, notes = variants_of(DENSE, precisions=["fp32", "fp16"])
    fp16 = [variant for variant in variants if variant.precision == "fp16"]
    assert [(variant.path, variant.world_size) for variant in fp16] == [("torchrun", 1), ("torchrun", 2)]
    assert len(variants) == 6
    assert len(notes) == 1
    assert "accelerate fp16" in notes[0]
    on_gpu, none = build_variants(
        DENSE, Machine(2, 8), paths=["torchrun", "accelerate"], world_sizes=[1], accumulations=None,
        precisions=["fp16"], meshes=["ddp"],
    )  # fmt: skip
    assert (len(on_gpu), none) == (2, [])


def test_a_strategy_leaves_out_paths_without_it():
    paths = ["torchrun", "accelerate", "trainer"]
    variants, notes = variants_of(DENSE, paths=paths, world_sizes=[2], meshes=["ddp", "fsdp", "deepspeed"])
    assert [(variant.mesh, variant.path) for variant in variants] == [
        *(("ddp", path) for path in paths),
        *(("fsdp", path) for path in paths[:2]),
        ("deepspeed", "accelerate"),
    ]
    assert len(notes) == 3
    assert len({variant.name for variant in variants}) == len({str(variant) for variant in variants}) == 6


def test_the_trainer_path_is_left_out_where_it_lacks_a_configured_feature():
    variants, notes = variants_of(DROPOUT, paths=["torchrun", "trainer"])
    assert {variant.path for variant in variants} == {"torchrun"}
    assert len(notes) == 1
    assert "dropout" in notes[0]


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


def test_a_variant_is_compared_with_its_split_on_another_path_or_with_the_first(tmp_path: Path):
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
    assert is_violated(results, None)
    assert not is_violated(results[:3], None)
    text = render(results, None)
    assert "accelerate W=2 A=2 fp32 differs first at step 3 train/loss: expected" in text
    assert text.splitlines()[1].split()[:7] == ["torchrun", "ddp", "1", "4", "4", "fp32", "reference"]


def test_every_precision_has_a_reference_of_its_own(tmp_path: Path):
    variants, _ = variants_of(DENSE, precisions=["fp32", "bf16"])
    results = compare_grid(tmp_path, DENSE, variants)
    assert [each.run.variant.name for each in results if each.is_reference] == [
        "torchrun-w1-a4-fp32", "torchrun-w1-a4-bf16",
    ]  # fmt: skip


def test_with_dropout_a_variant_is_compared_with_one_of_its_micro_batch_size(tmp_path: Path):
    variants, _ = variants_of(DROPOUT, accumulations=[2, 4], paths=["torchrun"])
    assert [variant.micro_batch_size for variant in variants] == [8, 4, 4, 2]
    moved = {variant.name: {"loss": {2: 8.0}, "digest": {2: "a"}} for variant in variants[1:3]}
    results = compare_grid(tmp_path, DROPOUT, variants, **moved)
    assert [each.comparison.verdict for each in results] == [
        "identical", "not compared", "identical", "identical",
    ]  # fmt: skip
    assert results[2].against == variants[1]
    assert not is_violated(results, None)


def test_a_failed_launch_is_a_violation_and_reports_its_first_difference(tmp_path: Path):
    variants, _ = variants_of(DENSE, world_sizes=[1])
    half = {step: row for step, row in rows(sha256={1: "a"}).items() if step <= 3}
    runs = [run_of(variants[0], tmp_path, rows()), run_of(variants[1], tmp_path, half, exit_code=1)]
    results = compare_variants(runs, DENSE, STEPS)
    assert results[1].comparison.verdict == "failed"
    assert results[1].comparison.first is not None
    assert results[1].comparison.first.key == "data/batch_sha256"
    assert is_violated(results, None)
    text = render(results, None)
    assert "ValueError: the cause" in text
    assert str(runs[1].log) in text


def test_where_the_first_variant_failed_the_next_is_the_reference(tmp_path: Path):
    variants, _ = variants_of(DENSE)
    runs = [run_of(variant, tmp_path, rows(), exit_code=int(variant == variants[0])) for variant in variants]
    results = compare_variants(runs, DENSE, STEPS)
    assert [each.comparison.verdict for each in results] == ["failed"] + ["identical"] * 3
    assert [each.is_reference for each in results] == [False, True, False, False]
    assert results[2].against == variants[1]


def test_a_run_without_rows_is_no_reference(tmp_path: Path):
    """A script that does nothing and exits with 0 must not pass."""
    variants, _ = variants_of(DENSE, world_sizes=[1])
    results = compare_variants([run_of(variant, tmp_path, {}) for variant in variants], DENSE, STEPS)
    assert [each.comparison.verdict for each in results] == ["differs", "differs"]


def test_a_single_variant_is_not_compared(tmp_path: Path):
    (result,) = compare_variants([run_of(ONE, tmp_path, rows())], DENSE, STEPS)
    assert result.comparison.verdict == "not compared"


def test_error_lines_are_the_cause_and_not_the_launchers_summary(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(
        "$ torchrun\n[rank0]: StopIteration\n[rank0]: RuntimeError: one\nerror: data.sources: no store\n"
        "W1122 signal\n======\ntorch.distributed.elastic.ChildFailedError: \ntime : now\nexitcode : 65\n"
    )
    assert last_error_lines(log) == ["error: data.sources: no store"]
    log.write_text("Traceback\nValueError: the cause\n")
    assert last_error_lines(log) == ["ValueError: the cause"]
    log.write_text("nothing but\nwords\n")
    assert last_error_lines(log) == ["nothing but", "words"]


def attempts(*starts: tuple[int, int, int]) -> list[InterruptedAttempt]:
    """(world size, checkpoint, first step) of each attempt."""
    return [
        InterruptedAttempt("torchrun", size, checkpoint, first, STEPS, True)
        for size, checkpoint, first in starts
    ]


def interrupted(folder: Path, made: dict[int, dict[str, Any]], *starts: tuple[int, int, int]) -> Any:
    reference = run_of(ONE, folder, rows())
    make_run(folder / "interrupted", made.values())
    return compare_interrupted(reference, folder / "interrupted", attempts(*starts), DENSE, STEPS)


def test_an_interrupted_run_at_one_world_size_is_identical(tmp_path: Path):
    assert interrupted(tmp_path, rows(), (1, 0, 1), (1, 2, 3)).verdict == "identical"


@pytest.mark.parametrize(("step", "verdict"), [(3, "differs"), (4, "within bound"), (5, "within bound")])
def test_an_interrupted_run_has_bounds_from_the_first_other_world_size_on(
    tmp_path: Path, step: int, verdict: str
):
    """Also where it returns to the first world size later."""
    loss = rows()[step]["train/loss"]
    other = rows(loss={step: loss * (1 + 1e-7)}, digest={step: "a"})
    comparison = interrupted(tmp_path, other, (1, 0, 1), (2, 3, 4), (1, 4, 5))
    assert comparison.verdict == verdict


@pytest.mark.parametrize("start", [1, 4])
def test_an_attempt_that_does_not_begin_after_its_checkpoint_is_a_violation(tmp_path: Path, start: int):
    """Also where it silently starts from zero and repeats the right rows."""
    reference = run_of(ONE, tmp_path, rows())
    make_run(tmp_path / "interrupted", rows().values())
    text = f"began at step {start}, expected 3 after the checkpoint of step 2"
    violation = Difference(start, "step", text=text)
    begun = [*attempts((1, 0, 1)), InterruptedAttempt("accelerate", 1, 2, start, STEPS, False, violation)]
    comparison = compare_interrupted(reference, tmp_path / "interrupted", begun, DENSE, STEPS)
    assert comparison.verdict == "differs"
    shown = InterruptedResult("accelerate@1:3", tmp_path, tmp_path / "log", comparison, begun)
    assert is_violated([], shown)
    assert "expected 3 after the checkpoint of step 2" in render([], shown)


def test_two_folders_are_compared_by_the_rows_that_they_have(tmp_path: Path):
    """As from a notebook: without a plan, with a row every other step."""
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


def test_parity_json_has_every_verdict(tmp_path: Path):
    variants, _ = variants_of(DENSE, world_sizes=[1])
    results = compare_grid(tmp_path, DENSE, variants, **{variants[1].name: {"loss": {2: 5.0}}})
    results[0].comparison.largest["train/loss"] = float("inf")
    write_result(tmp_path / "parity.json", result_content({"steps": STEPS}, results, None))
    content = json.loads((tmp_path / "parity.json").read_text())
    assert (content["verdict"], content["steps"], content["interrupted"]) == ("violated", STEPS, None)
    first, second = content["cells"]
    assert (first["reference"], first["compared_with"], first["verdict"]) == (True, None, "identical")
    assert (second["compared_with"], second["verdict"]) == (variants[0].name, "differs")
    found = second["first_difference"]
    assert (found["step"], found["key"], found["found"]) == (2, "train/loss", 5.0)
    assert found["text"] == f"step 2 train/loss: expected {found['expected']!r}, found 5.0"
    assert {"path", "world_size", "accumulation", "micro_batch_size", "precision", "mesh"} <= set(second)
