"""What `parity` makes of rows: each verdict, the first difference, what is promised and what is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import make_run, training_row

from llm_pretrain.commands._launching.machine import Machine
from llm_pretrain.commands._launching.records import last_words
from llm_pretrain.commands._parity.cells import Cell, build_cells
from llm_pretrain.commands._parity.comparison import Difference, compare, judge_parameters, routing_moved
from llm_pretrain.commands._parity.contract import (
    DIGEST,
    KEYS,
    LOSS_BOUND,
    SAMPLES,
    Promise,
    by_steps,
    promise,
)
from llm_pretrain.commands._parity.interruption import Attempt
from llm_pretrain.commands._parity.judging import Judged, Run, judge, judge_interrupted
from llm_pretrain.commands._parity.table import Interrupted, is_violated, render, write_json
from llm_pretrain.config import Config, ModelConfig, TrainingConfig
from llm_pretrain.errors import ConfigError

STEPS = 6
TWO_CORES = Machine(gpus=0, cores=2)
DENSE = Config(training=TrainingConfig(micro_batch_size=4, global_batch_size=16, precision="fp32"))
MOE = dataclasses.replace(DENSE, model=ModelConfig(num_experts=4, num_experts_per_tok=2))
SPLIT_SCOPE = dataclasses.replace(
    MOE, model=dataclasses.replace(MOE.model, router_aux_loss_scope="micro_batch")
)
DROPOUT = dataclasses.replace(DENSE, model=ModelConfig(hidden_dropout=0.1))
ATTENTION_DROPOUT = dataclasses.replace(DENSE, model=ModelConfig(attention_dropout=0.1))

ONE, TWO = Cell("torchrun", 1, 4, 4, "fp32", "ddp"), Cell("torchrun", 2, 2, 4, "fp32", "ddp")


def on(path: str, cell: Cell) -> Cell:
    return dataclasses.replace(cell, path=path)


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


WITHIN = Promise(SAMPLES, {"train/loss": 1e-5, "train/grad_norm": 1e-4})


def test_equal_rows_are_identical_under_any_promise():
    for made in (Promise(KEYS), WITHIN, Promise(SAMPLES)):
        comparison = compare(rows(), rows(), STEPS, [(1, made)])
        assert (comparison.verdict, comparison.first) == ("identical", None)
        assert set(comparison.largest.values()) == {0.0}


@pytest.mark.parametrize("key", [key for key in KEYS if key != "train/aux_loss"])
def test_a_single_other_bit_differs_where_identity_is_promised(key: str):
    reference, other = rows(), rows()
    value = reference[4][key]
    other[4][key] = value[:-1] + "f" if isinstance(value, str) else value * (1 + 3e-16) + (value == 1000)
    assert other[4][key] != value
    comparison = compare(reference, other, STEPS, [(1, Promise(KEYS))])
    assert comparison.verdict == "differs"
    assert comparison.first == Difference(4, key, value, other[4][key])


def test_the_first_difference_is_the_earliest_step_and_there_the_cause_before_the_effect():
    other = rows(loss={2: 9.0, 3: 9.0}, digest={1: "a", 2: "b"}, sha256={2: "c"}, grad_norm={2: 5.0})
    comparison = compare(rows(), other, STEPS, [(1, Promise(KEYS))])
    assert comparison.first == Difference(1, DIGEST, f"{1:064x}", "a")
    other[1] = rows()[1]
    comparison = compare(rows(), other, STEPS, [(1, Promise(KEYS))])
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.key) == (2, "data/batch_sha256")


def test_a_difference_within_its_bound_is_shown_and_one_beyond_differs():
    loss = rows()[3]["train/loss"]
    near = compare(rows(), rows(loss={3: loss * (1 + 9e-6)}, digest={3: "a"}), STEPS, [(1, WITHIN)])
    assert near.verdict == "within bound"
    assert near.largest["train/loss"] == pytest.approx(9e-6, rel=1e-3)
    far = compare(rows(), rows(loss={3: loss * (1 + 2e-5)}), STEPS, [(1, WITHIN)])
    assert far.verdict == "differs"
    assert far.first is not None
    assert (far.first.step, far.first.key, far.first.bound) == (3, "train/loss", 1e-5)
    assert f"{loss!r}" in str(far.first)


def test_samples_are_the_same_or_it_differs_whatever_else_is_promised():
    for made in (WITHIN, Promise(SAMPLES, note="why")):
        assert compare(rows(), rows(sha256={5: "a"}), STEPS, [(1, made)]).verdict == "differs"
        assert compare(rows(), rows(loss_tokens={5: 999}), STEPS, [(1, made)]).verdict == "differs"


def test_losses_that_nothing_is_promised_of_are_shown_and_not_judged():
    comparison = compare(rows(), rows(loss={2: 1.0}), STEPS, [(1, Promise(SAMPLES, note="why"))])
    assert (comparison.verdict, comparison.note) == ("not compared", "why")
    assert comparison.largest["train/loss"] > 0.5


@pytest.mark.parametrize("made", [Promise(KEYS), WITHIN])
def test_a_missing_row_or_number_differs(made: Promise):
    short = {step: row for step, row in rows().items() if step != STEPS}
    for left, right in ((short, rows()), (rows(), short), (rows(), {})):
        first = compare(left, right, STEPS, [(1, made)]).first
        assert first is not None
        assert (first.key, {first.expected, first.found}) == ("row", {"missing", "there"})
    without = rows(sha256={2: ...})
    assert compare(without, without, STEPS, [(1, made)]).verdict == "differs", "nothing is compared"


def test_a_step_skipped_by_both_is_equal_and_by_one_differs():
    skipped = rows(loss={2: None}, grad_norm={2: None})
    assert compare(skipped, skipped, STEPS, [(1, WITHIN)]).verdict == "identical"
    first = compare(rows(), skipped, STEPS, [(1, WITHIN)]).first
    assert first is not None
    assert (first.key, first.found) == ("train/loss", None)


def test_runs_without_digests_are_not_called_identical():
    """The trainer path has none: equal losses do not say that the parameters are equal."""
    without = rows(digest=dict.fromkeys(range(1, STEPS + 1), ...))
    assert compare(rows(), without, STEPS, [(1, WITHIN)]).verdict == "within bound"


def test_a_later_promise_holds_from_its_step():
    loss = rows()[4]["train/loss"]
    for step, verdict in ((4, "within bound"), (5, "differs")):
        promises = [(1, Promise(KEYS)), (step, WITHIN)]
        other = rows(loss={4: loss * (1 + 1e-7)}, digest={4: "a"})
        assert compare(rows(), other, STEPS, promises).verdict == verdict


def routed(moved: float, step: int, **changes: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Rows of a mixture of experts whose routing differs from the others' from `step` on."""
    made = rows(**changes)
    for each, row in made.items():
        share = moved if each >= step else 0.0
        row["moe/load"] = [[0.5, 0.5], [0.5 - share, 0.5 + share]]
    return made


def test_from_the_step_on_at_which_a_token_goes_elsewhere_there_are_wider_bounds():
    """And not one step before: until then the difference is rounding, or an error."""
    made = promise(TWO, ONE, MOE, STEPS)
    loss = rows()[4]["train/loss"]
    off = {"loss": {4: loss * (1 + 1e-3)}, "digest": {4: "a"}}
    reference = routed(0.0, 1)
    assert compare(reference, routed(0.0, 1, **off), STEPS, [(1, made)]).verdict == "differs"
    assert compare(reference, routed(3e-4, 5, **off), STEPS, [(1, made)]).verdict == "differs"
    parted = compare(reference, routed(3e-4, 4, **off), STEPS, [(1, made)])
    assert (parted.verdict, parted.parted) == ("within bound", 4)
    assert "from step 4 on a token goes to another expert" in parted.note
    judge_parameters(parted, 1e-2, STEPS, made)
    assert parted.verdict == "within bound"
    far = routed(3e-4, 4, loss={4: loss * 1.1})
    assert compare(reference, far, STEPS, [(1, made)]).verdict == "differs"


def test_more_than_ties_going_elsewhere_at_once_is_an_error_and_twins_have_no_ties():
    reference = routed(0.0, 1)
    many = compare(reference, routed(0.05, 3), STEPS, [(1, promise(TWO, ONE, MOE, STEPS))])
    assert many.verdict == "differs"
    assert many.first is not None
    assert (many.first.step, many.first.key) == (3, "moe/load")
    twin = promise(on("accelerate", TWO), TWO, MOE, STEPS)
    assert not twin.parted
    assert not promise(TWO, ONE, DENSE, STEPS).parted


def test_final_parameters_are_judged_where_they_are_promised():
    for bound, verdict in (({"parameters": 1e-6}, "differs"), ({}, "within bound")):
        made = Promise(SAMPLES, {**WITHIN.within, **bound})
        comparison = compare(rows(), rows(digest={6: "a"}), STEPS, [(1, made)])
        judge_parameters(comparison, 2e-6, STEPS, made)
        assert (comparison.verdict, comparison.largest["parameters"]) == (verdict, 2e-6)


def test_where_every_bit_is_promised_the_checkpoints_have_the_same_parameters():
    """Also of rows without digests, or with digests of what was not saved."""
    for made in (
        rows(),
        {
            step: {k: v for k, v in row.items() if k != "train/parameters_sha256"}
            for step, row in rows().items()
        },
    ):
        comparison = compare(made, made, STEPS, [(1, Promise(exact=KEYS))])
        judge_parameters(comparison, 0.0, STEPS, Promise(exact=KEYS))
        assert comparison.verdict == "identical"
        judge_parameters(comparison, 1e-9, STEPS, Promise(exact=KEYS))
        assert comparison.verdict == "differs"


def test_routing_of_other_shapes_is_no_tie():
    assert routing_moved({"moe/load": [[0.5, 0.5]]}, {"moe/load": [[1.0], [1.0]]}) == 1.0


def test_both_paths_promise_every_bit_and_other_splits_a_bound():
    assert promise(on("accelerate", TWO), TWO, MOE, 20).exact == KEYS
    for precision in ("fp32", "bf16", "fp16"):
        one, two = (dataclasses.replace(cell, precision=precision) for cell in (ONE, TWO))
        made = promise(two, one, MOE, 20)
        assert made.exact == SAMPLES
        assert made.within["train/loss"] == made.within["train/aux_loss"] == LOSS_BOUND[precision]
        assert ("parameters" in made.within) == (precision == "fp32")
    assert promise(TWO, ONE, MOE, 20).within["parameters"] == 1e-6
    longer = promise(TWO, ONE, MOE, 21)
    assert "parameters" not in longer.within
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
def test_bounds_hold_until_rounding_has_had_time_to_grow(key: str, step: int, times: float, verdict: str):
    steps = 30
    reference = {n: {**rows()[1], "data/batch_sha256": f"{n:064x}"} for n in range(1, steps + 1)}
    other = {n: dict(row) for n, row in reference.items()}
    other[step][key] *= times  # of a digest: the same text twice
    promises = by_steps(promise(TWO, ONE, DENSE, steps))
    comparison = compare(reference, other, steps, promises)
    assert comparison.verdict == verdict
    assert "later ones shown" in comparison.note
    assert compare(reference, other, min(step, 10), promises).note == promises[0][1].note


def test_the_paths_of_one_strategy_promise_every_bit_and_two_strategies_a_bound():
    sharded = dataclasses.replace(TWO, strategy="fsdp")
    assert promise(on("accelerate", sharded), sharded, DENSE, 20).exact == KEYS
    made = promise(sharded, TWO, DENSE, 20)
    assert made.exact == SAMPLES
    assert made.within["train/loss"] == 1e-5


@pytest.mark.parametrize("config", [DROPOUT, ATTENTION_DROPOUT])
def test_with_dropout_only_equal_micro_batches_are_compared(config: Config):
    smaller = Cell("torchrun", 2, 4, 2, "fp32", "ddp")
    assert promise(TWO, ONE, config, 20).within, "the same micro batches"
    assert promise(on("accelerate", smaller), smaller, config, 20).exact == KEYS
    made = promise(smaller, ONE, config, 20)
    assert not made.within
    assert "dropout" in made.note


def test_a_balance_loss_per_micro_batch_is_not_promised_across_splits():
    assert not promise(TWO, ONE, SPLIT_SCOPE, 20).within
    assert promise(on("accelerate", TWO), TWO, SPLIT_SCOPE, 20).exact == KEYS


def test_the_trainer_path_promises_the_loss_of_a_dense_model_in_fp32():
    trainer = on("trainer", ONE)
    assert promise(trainer, ONE, DENSE, 20).within == {"train/loss": 1e-5}
    for cell, config in (
        (trainer, MOE),
        (trainer, DROPOUT),
        (dataclasses.replace(trainer, precision="bf16"), DENSE),
    ):
        made = promise(cell, ONE, config, 20)
        assert (made.exact, dict(made.within)) == (SAMPLES, {})
        assert made.note


def cells_of(config: Config, **asked: Any) -> tuple[list[Cell], list[str]]:
    given = {"paths": ["torchrun", "accelerate"], "world_sizes": [1, 2], "accumulations": None}
    return build_cells(config, TWO_CORES, **(given | {"precisions": ["fp32"], "strategies": ["ddp"]} | asked))


def test_the_micro_batch_size_is_the_configurations_or_follows_from_the_accumulation():
    assert [cell.split for cell in cells_of(DENSE)[0]] == [(1, 4, 4)] * 2 + [(2, 2, 4)] * 2
    splits = [cell.split for cell in cells_of(DENSE, accumulations=[1, 4], paths=["torchrun"])[0]]
    assert splits == [(1, 1, 16), (1, 4, 4), (2, 1, 8), (2, 4, 2)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"world_sizes": [1, 3]}, "expected at most 2, the cores of this machine, found 3"),
        ({"accumulations": [1, 3]}, "found 2 * 3 = 6; 1, 2, 4 or 8 would work"),
        ({"paths": ["trainer"]}, "expected torchrun or accelerate"),
        ({"paths": ["accelerate"], "precisions": ["fp16"]}, "silently train in fp32"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_sizes(asked: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        cells_of(DENSE, **asked)
    assert any(expected in line for line in caught.value.problems)


def test_a_micro_batch_size_that_does_not_divide_is_refused_with_its_sizes():
    odd = dataclasses.replace(
        DENSE, training=TrainingConfig(micro_batch_size=8, global_batch_size=24, precision="fp32")
    )
    with pytest.raises(ConfigError, match=r"found 2 \* 8 = 16; 2, 3, 4, 6 or 12 would work"):
        cells_of(odd)


def test_fp16_without_a_gpu_leaves_accelerate_out_and_says_so():
    cells, notes = cells_of(DENSE, precisions=["fp32", "fp16"])
    fp16 = [cell for cell in cells if cell.precision == "fp16"]
    assert [(cell.path, cell.world_size) for cell in fp16] == [("torchrun", 1), ("torchrun", 2)]
    assert len(cells) == 6
    assert len(notes) == 1
    assert "accelerate fp16" in notes[0]
    on_gpu, none = build_cells(
        DENSE, Machine(2, 8), paths=["torchrun", "accelerate"], world_sizes=[1], accumulations=None,
        precisions=["fp16"], strategies=["ddp"],
    )  # fmt: skip
    assert (len(on_gpu), none) == (2, [])


def test_a_strategy_leaves_out_the_paths_that_do_not_have_it():
    paths = ["torchrun", "accelerate", "trainer"]
    cells, notes = cells_of(DENSE, paths=paths, world_sizes=[2], strategies=["ddp", "fsdp", "deepspeed"])
    assert [(cell.strategy, cell.path) for cell in cells] == [
        *(("ddp", path) for path in paths),
        *(("fsdp", path) for path in paths[:2]),
        ("deepspeed", "accelerate"),
    ]
    assert len(notes) == 3
    assert len({cell.name for cell in cells}) == len({str(cell) for cell in cells}) == 6


def test_the_trainer_path_is_left_out_where_the_configuration_is_not_its_own():
    cells, notes = cells_of(DROPOUT, paths=["torchrun", "trainer"])
    assert {cell.path for cell in cells} == {"torchrun"}
    assert len(notes) == 1
    assert "dropout" in notes[0]


def run_of(cell: Cell, folder: Path, made: dict[int, dict[str, Any]], exit_code: int = 0) -> Run:
    """A finished launch with these rows, and no checkpoint."""
    log = folder / f"{cell.name}.log"
    make_run(folder / cell.name, made.values())
    log.write_text("$ command\nTraceback\nValueError: the cause\n")
    return Run(cell, folder / cell.name, log, exit_code, 1.0)


def judged_grid(folder: Path, config: Config, cells: list[Cell], **changed: dict[str, Any]) -> list[Judged]:
    """Verdicts on cells with equal rows, but for those changed by name."""
    return judge([run_of(cell, folder, rows(**changed.get(cell.name, {}))) for cell in cells], config, STEPS)


def test_each_cell_is_compared_with_its_twin_or_with_the_first(tmp_path: Path):
    """So the path that is wrong is the one that is named."""
    cells, _ = cells_of(DENSE)
    wrong = {"accelerate-w2-a2-fp32": {"loss": {3: 9.0}}}
    judged = judged_grid(tmp_path, DENSE, cells, **wrong)
    first, one, two, other = judged
    assert (first.is_reference, first.against, first.comparison.verdict) == (True, None, "identical")
    assert (one.against, two.against, other.against) == (first.run.cell, first.run.cell, two.run.cell)
    assert [each.comparison.verdict for each in judged] == ["identical", "identical", "identical", "differs"]
    assert is_violated(judged, None)
    assert not is_violated(judged[:3], None)
    text = render(judged, None)
    assert "accelerate W=2 A=2 fp32 differs first at step 3 train/loss: expected" in text
    assert text.splitlines()[1].split()[:7] == ["torchrun", "ddp", "1", "4", "4", "fp32", "reference"]


def test_every_precision_has_a_reference_of_its_own(tmp_path: Path):
    cells, _ = cells_of(DENSE, precisions=["fp32", "bf16"])
    judged = judged_grid(tmp_path, DENSE, cells)
    assert [each.run.cell.name for each in judged if each.is_reference] == [
        "torchrun-w1-a4-fp32", "torchrun-w1-a4-bf16",
    ]  # fmt: skip


def test_with_dropout_a_cell_is_compared_with_one_of_its_micro_batch_size(tmp_path: Path):
    cells, _ = cells_of(DROPOUT, accumulations=[2, 4], paths=["torchrun"])
    assert [cell.micro_batch_size for cell in cells] == [8, 4, 4, 2]
    moved = {cell.name: {"loss": {2: 8.0}, "digest": {2: "a"}} for cell in cells[1:3]}
    judged = judged_grid(tmp_path, DROPOUT, cells, **moved)
    assert [each.comparison.verdict for each in judged] == [
        "identical", "not compared", "identical", "identical",
    ]  # fmt: skip
    assert judged[2].against == cells[1]
    assert not is_violated(judged, None)


def test_a_failed_launch_is_a_violation_and_says_where_it_had_differed(tmp_path: Path):
    cells, _ = cells_of(DENSE, world_sizes=[1])
    half = {step: row for step, row in rows(sha256={1: "a"}).items() if step <= 3}
    runs = [run_of(cells[0], tmp_path, rows()), run_of(cells[1], tmp_path, half, exit_code=1)]
    judged = judge(runs, DENSE, STEPS)
    assert judged[1].comparison.verdict == "failed"
    assert judged[1].comparison.first is not None
    assert judged[1].comparison.first.key == "data/batch_sha256"
    assert is_violated(judged, None)
    text = render(judged, None)
    assert "ValueError: the cause" in text
    assert str(runs[1].log) in text


def test_where_the_first_cell_failed_the_next_is_the_reference(tmp_path: Path):
    cells, _ = cells_of(DENSE)
    runs = [run_of(cell, tmp_path, rows(), exit_code=int(cell == cells[0])) for cell in cells]
    judged = judge(runs, DENSE, STEPS)
    assert [each.comparison.verdict for each in judged] == ["failed"] + ["identical"] * 3
    assert [each.is_reference for each in judged] == [False, True, False, False]
    assert judged[2].against == cells[1]


def test_a_run_without_rows_is_no_reference(tmp_path: Path):
    """A script that ends with 0 and has done nothing must not make everything hold."""
    cells, _ = cells_of(DENSE, world_sizes=[1])
    judged = judge([run_of(cell, tmp_path, {}) for cell in cells], DENSE, STEPS)
    assert [each.comparison.verdict for each in judged] == ["differs", "differs"]


def test_a_single_cell_is_not_called_identical(tmp_path: Path):
    (judged,) = judge([run_of(ONE, tmp_path, rows())], DENSE, STEPS)
    assert judged.comparison.verdict == "not compared"


def test_the_last_words_are_the_cause_and_not_the_launchers_summary(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(
        "$ torchrun\n[rank0]: StopIteration\n[rank0]: RuntimeError: one\nerror: data.sources: no store\n"
        "W1122 signal\n======\ntorch.distributed.elastic.ChildFailedError: \ntime : now\nexitcode : 65\n"
    )
    assert last_words(log) == ["error: data.sources: no store"]
    log.write_text("ValueError: the cause\nsubprocess.CalledProcessError: Command '[…]' returned 1\n")
    assert last_words(log) == ["ValueError: the cause"]
    log.write_text("nothing but\nwords\n")
    assert last_words(log) == ["nothing but", "words"]


def attempts(*starts: tuple[int, int, int]) -> list[Attempt]:
    """(world size, checkpoint, first step) of each attempt."""
    return [Attempt("torchrun", size, checkpoint, first, STEPS, True) for size, checkpoint, first in starts]


def interrupted(folder: Path, made: dict[int, dict[str, Any]], *starts: tuple[int, int, int]) -> Any:
    reference = run_of(ONE, folder, rows())
    make_run(folder / "interrupted", made.values())
    return judge_interrupted(reference, folder / "interrupted", attempts(*starts), DENSE, STEPS)


def test_an_interrupted_run_is_identical_where_the_world_size_never_changed(tmp_path: Path):
    assert interrupted(tmp_path, rows(), (1, 0, 1), (1, 2, 3)).verdict == "identical"


@pytest.mark.parametrize(("step", "verdict"), [(3, "differs"), (4, "within bound"), (5, "within bound")])
def test_from_the_first_other_world_size_on_an_interrupted_run_has_a_bound(
    tmp_path: Path, step: int, verdict: str
):
    """Also where it goes back to the first world size after that."""
    loss = rows()[step]["train/loss"]
    other = rows(loss={step: loss * (1 + 1e-7)}, digest={step: "a"})
    comparison = interrupted(tmp_path, other, (1, 0, 1), (2, 3, 4), (1, 4, 5))
    assert comparison.verdict == verdict


@pytest.mark.parametrize("start", [1, 4, None])
def test_an_attempt_that_begins_elsewhere_than_after_its_checkpoint_is_a_violation(
    tmp_path: Path, start: int | None
):
    """From zero without a word above all, though every row is right."""
    reference = run_of(ONE, tmp_path, rows())
    make_run(tmp_path / "interrupted", rows().values())
    begun = [*attempts((1, 0, 1)), Attempt("accelerate", 1, 2, start, STEPS, False)]
    comparison = judge_interrupted(reference, tmp_path / "interrupted", begun, DENSE, STEPS)
    assert comparison.verdict == "differs"
    shown = Interrupted("accelerate@1:3", tmp_path, tmp_path / "log", comparison, begun)
    assert is_violated([], shown)
    assert "expected 3 after the checkpoint of step 2" in render([], shown)


def test_parity_json_has_every_verdict(tmp_path: Path):
    cells, _ = cells_of(DENSE, world_sizes=[1])
    judged = judged_grid(tmp_path, DENSE, cells, **{cells[1].name: {"loss": {2: 5.0}}})
    judged[0].comparison.largest["train/loss"] = float("inf")
    write_json(tmp_path / "parity.json", {"steps": STEPS}, judged, None)
    content = json.loads((tmp_path / "parity.json").read_text())
    assert (content["verdict"], content["steps"], content["interrupted"]) == ("violated", STEPS, None)
    first, second = content["cells"]
    assert (first["reference"], first["compared_with"], first["verdict"]) == (True, None, "identical")
    assert (second["compared_with"], second["verdict"]) == (cells[0].name, "differs")
    assert second["first_difference"] | {"expected": 0} == {
        "step": 2, "key": "train/loss", "expected": 0, "found": 5.0, "bound": None,
    }  # fmt: skip
    assert {"path", "world_size", "accumulation", "micro_batch_size", "precision", "strategy"} <= set(second)
