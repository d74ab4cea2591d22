"""`llm-pretrain replay` of runs of both launchers, on meshes, over changed attempts, and of unusual runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.forked_replay import content_of, copy_of, launch_until, run_replay
from support.launching import ROOT, assert_same_tensors, checkpoint_tensors, launch

from llm_pretrain.__main__ import main
from llm_pretrain.files import read_json
from llm_pretrain.launch.jobs import Job

pytestmark = pytest.mark.slow

OPTIONS = (
    *("--config", str(ROOT / "configs" / "tiny-moe.yaml"), "--training.precision", "fp32"),
    *("--training.max_steps", "8", "--schedule.warmup_steps", "2", "--training.global_batch_size", "8"),
    *("--training.micro_batch_size", "2", "--distributed.cpu_threads", "1", "--checkpoint.save_steps", "4"),
    *("--evaluation.eval_steps", "4", "--evaluation.max_batches", "1", "--evaluation.prediction"),
    "[{step: 0, loss: 5.1, low: 5, high: 5.3}, {step: 7, loss: 4.1, low: 4, high: 4.7}]",
)
MESHES = {
    "ddp": (),
    "fsdp": ("--distributed.strategy", "fsdp"),
    "ep": ("--distributed.strategy", "fsdp", "--distributed.ep_size", "2"),
}


def options(store: Path, *more: str) -> list[str]:
    return [*OPTIONS, "--data.sources", f"[{{store: {store}}}]", *more]


def verdicts(result: dict[str, Any]) -> list[str]:
    return [each["verdict"] for each in result["segments"]]


@pytest.mark.parametrize(
    ("ran", "again", "world_size"), [("torchrun", "accelerate", 1), ("accelerate", "torchrun", 2)]
)
def test_a_run_of_one_launcher_replayed_by_the_other(
    ran: str, again: str, world_size: int, plain_store: Path, tmp_path: Path
):
    """With the real launchers, from a copy, whose store lies elsewhere; the run is not touched."""
    before = launch(ran, world_size, tmp_path / "run", options(plain_store))
    assert before.output.count("is above the predicted 5.0000 to 5.3000") == 1, "rank 0 alone says it"
    assert [step for step, row in before.rows.items() if "eval/predicted_loss" in row] == [0, 4]
    run = copy_of(before.folder, tmp_path / "copied")
    store = copy_of(plain_store, tmp_path / "elsewhere")
    content = content_of(run)
    output = tmp_path / "out"
    more = ("--launcher", again, "--data.sources", f"[{{store: {store}}}]", "--output", str(output))
    assert main(["replay", str(run), "--no-record", *more]) == 0
    result = read_json(output / "replay.json")
    assert verdicts(result) == ["identical"] * 2
    status = read_json(output / "steps-1-4" / "status.json")
    assert (status["launcher"], status["world_size"]) == (again, world_size), "really"
    assert content_of(run) == content


@pytest.mark.parametrize(
    ("launcher", "mesh"), [("torchrun", "ddp"), ("torchrun", "ep"), ("accelerate", "fsdp")]
)
def test_a_run_on_a_mesh_is_replayed_bit_for_bit(launcher: str, mesh: str, plain_store: Path, tmp_path: Path):
    run = launch(launcher, 2, tmp_path / "run", options(plain_store, *MESHES[mesh])).folder
    code, result = run_replay(run, tmp_path / "out")
    assert (code, verdicts(result)) == (0, ["identical"] * 2)
    assert [each["rows"] for each in result["segments"]] == [5, 4]
    if launcher == "torchrun":  # another number of processes has a bound
        code, result = run_replay(run, tmp_path / "one", "--world-size", "1", "--from", "4")
        assert (code, verdicts(result)) == (0, ["within bound"])
        assert "2 processes" in result["segments"][0]["note"]
        largest = result["segments"][0]["largest_differences"]
        assert largest["train/loss"] < 1e-5
        assert max(largest.values()) > 0  # the bound was needed; losses alone may be the same bits


@pytest.mark.parametrize("mesh", ["ddp", "fsdp"])
def test_a_run_that_started_from_another_one(
    mesh: str, plain_store: Path, changed_store: Path, tmp_path: Path
):
    """From a state on another mesh, by both launchers; then replayed, as long as the source is the same."""
    other = MESHES["ddp" if mesh == "fsdp" else "fsdp"]
    source = launch("torchrun", 2, tmp_path / "source", options(plain_store, *other)).folder
    own = ("--training.global_batch_size", "4", "--checkpoint.start_from", str(source), *MESHES[mesh])
    runs = [
        launch(each, 2, tmp_path / each, options(changed_store, *own)) for each in ("torchrun", "accelerate")
    ]
    assert all("started from" in each.output and each.exit_code == 0 for each in runs)
    assert runs[0].exact_rows() == runs[1].exact_rows()
    assert_same_tensors(*(checkpoint_tensors(each.folder, 8) for each in runs))
    code, result = run_replay(runs[0].folder, tmp_path / "out")
    assert (code, verdicts(result)) == (0, ["identical"] * 2)
    with (source / "checkpoints" / "step-00000008" / "manifest.json").open("a") as manifest:
        manifest.write("\n")
    code, result = run_replay(runs[0].folder, tmp_path / "again")
    assert (code, verdicts(result)) == (1, ["not replayed", "identical"])
    assert "expected the manifest that the run started from" in result["segments"][0]["note"]


def test_attempts_that_were_launched_otherwise(plain_store: Path, tmp_path: Path):
    """One process, two by the other launcher, then another rate; of the checkpoints between none is left."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    small = tuple(options(plain_store, "--checkpoint.save_steps", "2", "--logging.report", "false"))
    launch_until(Job("torchrun", 1, folder, log, small, 1), 2)
    launch_until(Job("accelerate", 2, folder, log, small, 1), 4)
    last = [*small, "--optimizer.learning_rate", "1e-3", "--checkpoint.keep_last", "2"]
    assert launch("torchrun", 2, folder, last).exit_code == 0
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000006", "step-00000008",
    ]  # fmt: skip
    code, result = run_replay(folder, tmp_path / "out")
    assert (code, verdicts(result)) == (0, ["identical"] * 2)
    legs = [
        (each["first"], each["last"], each["path"], each["world_size"])
        for each in result["segments"][0]["legs"]
    ]
    starts = [leg[0] for leg in legs]
    assert legs[0] == (1, starts[1] - 1, "torchrun", 1)
    assert legs[1][2:] == ("accelerate", 2)
    assert legs[2][2:] == ("torchrun", 2)
