"""Whole sharded runs: their checkpoints move between strategies, launchers and numbers of processes.

One run by one process, continued sharded over two by Accelerate, continued by hand and again by one process.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.fork_server import Request, fork_server
from support.launching import (
    NO_REPORT,
    ROOT,
    TIMEOUT_SECONDS,
    Finished,
    assert_same_tensors,
    checkpoint_tensors,
    launch,
    run_options,
    train,
)
from support.stepping import relative_error

from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.export.huggingface import load_pretrained

FIRST, RESUMED_FROM, STEPS = 2, 4, 6
PRINTED = "distributed.strategy: fsdp"


def options(store: Path, steps: int, strategy: str) -> list[str]:
    """Three evaluation batches on two ranks: one has none left in the second round."""
    return run_options(
        "tiny-moe",
        store,
        f"training.max_steps={steps} schedule.name=constant schedule.warmup_steps=0 "
        f"training.global_batch_size=16 distributed.strategy={strategy} "
        "training.activation_checkpointing=true logging.parameters_sha256=true "
        "model.hidden_dropout=0.1 model.router_bias_update_rate=1e-3 "
        "model.tie_word_embeddings=true evaluation.eval_steps=2 evaluation.max_batches=3 "
        "checkpoint.save_steps=2 evaluation.sample_tokens=4 checkpoint.keep_last=9",
        "--evaluation.sample_prompts",
        "[one, two]",
    )


@pytest.fixture(scope="module")
def runs(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each continues a copy of the one before it; `whole` is by one process from start to end."""
    folder = tmp_path_factory.mktemp("runs")

    def alone(name: str, steps: int, strategy: str) -> Finished:
        arguments = options(masked_store, steps, strategy)
        assert train(*arguments, "--run.output_dir", str(folder / name)) == 0
        return Finished(0, "", folder / name)

    def copy(source: str, target: str, up_to: int) -> Path:
        later = [f"step-{step:08d}" for step in range(up_to + 1, STEPS + 1)]
        ignored = shutil.ignore_patterns(*later, "best", "metrics.jsonl", "samples.jsonl")
        shutil.copytree(folder / source, folder / target, ignore=ignored)
        return folder / target

    finished = {"whole": alone("whole", STEPS, "ddp"), "first": alone("first", FIRST, "fsdp")}
    chosen = options(masked_store, STEPS, "fsdp")
    file = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    target = copy("first", "accelerated", FIRST)
    finished["accelerated"] = launch("accelerate", 2, target, chosen, accelerate_file=file, real=True)
    target = copy("accelerated", "by hand", RESUMED_FROM)
    finished["by hand"] = launch("torchrun", 2, target, chosen)
    copy("accelerated", "alone", RESUMED_FROM)
    return finished | {"alone": alone("alone", STEPS, "ddp")}


@pytest.mark.slow
def test_the_other_launcher_continues_bit_for_bit(runs: dict[str, Finished]):
    straight, continued = runs["accelerated"], runs["by hand"]
    rows = straight.rows
    assert sorted(rows) == list(range(FIRST + 1, STEPS + 1))
    assert sorted(continued.rows) == list(range(RESUMED_FROM + 1, STEPS + 1))
    assert continued.exact_rows() == {step: straight.exact_rows()[step] for step in continued.rows}
    for step, row in continued.rows.items():
        assert row["train/parameters_sha256"] == rows[step]["train/parameters_sha256"] is not None
    left, right = (checkpoint_tensors(run.folder, STEPS) for run in (straight, continued))
    assert any(name.startswith("optimizer.state.") for name in left)
    assert_same_tensors(left, right)
    assert [run.status["launcher"] for run in (straight, continued)] == ["accelerate", "torchrun"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerated", "by hand", "alone"])
def test_every_layout_trains_the_same(runs: dict[str, Finished], name: str):
    """The same samples, and losses and parameters of a single process up to rounding."""
    whole, rows = runs["whole"].rows, runs[name].rows
    for step, row in rows.items():
        assert row["data/batch_sha256"] == whole[step]["data/batch_sha256"]
        for key in ("train/loss", "train/aux_loss", "train/grad_norm", "eval/loss"):
            if key in row:
                assert math.isclose(row[key], whole[step][key], rel_tol=1e-5), (step, key)
    assert "eval/loss" in rows[STEPS]
    expected, found = (checkpoint_tensors(runs[each].folder, STEPS) for each in ("whole", name))
    parameters = [key for key in expected if not key.startswith("optimizer.")]
    error = relative_error(
        {key: found[key] for key in parameters}, {key: expected[key] for key in parameters}
    )
    assert error < 1e-6
    moments = [key for key in expected if key.endswith("exp_avg")]
    assert moments
    error = relative_error({key: found[key] for key in moments}, {key: expected[key] for key in moments})
    assert error < 1e-5


@pytest.mark.slow
def test_weights_are_whole_and_plainly_named(runs: dict[str, Finished]):
    folder = runs["accelerated"].folder
    tensors = checkpoint_tensors(folder, STEPS)
    for path in (folder / "weights" / f"step-{STEPS:08d}", folder / "weights" / "best"):
        state = load_pretrained(path).state_dict()
        names = [name for name in tensors if not name.startswith("optimizer.")]
        assert {*names, "lm_head.weight"} == set(state)
    state = load_pretrained(folder / "weights" / f"step-{STEPS:08d}").state_dict()
    for name in names:
        expected = tensors[name] if "bias" in name else tensors[name].bfloat16().float()
        assert torch.equal(state[name], expected), name
    opened = open_model(folder / "checkpoints" / f"step-{STEPS:08d}").model.state_dict()
    assert all(torch.equal(opened[name], tensors[name]) for name in names)
    best = json.loads((folder / "weights" / "best" / "best.json").read_text())
    assert best["eval/loss"] == min(
        row["eval/loss"] for row in runs["accelerated"].rows.values() if "eval/loss" in row
    )


@pytest.mark.slow
def test_samples_are_those_of_one_process(runs: dict[str, Finished]):
    """In fp32 sharding changes no token, and rank 0 alone writes."""
    rows = {
        name: [json.loads(line) for line in (runs[name].folder / "samples.jsonl").read_text().splitlines()]
        for name in ("whole", "accelerated")
    }
    later = [row for row in rows["whole"] if row["step"] > FIRST]
    assert len(later) == 4
    assert rows["accelerated"] == later


@pytest.mark.slow
def test_the_manifest_says_how_it_was_sharded(runs: dict[str, Finished]):
    manifest = runs["accelerated"].folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["run"]["strategy"] == "fsdp"
    assert content["run"]["world_size"] == 2
    assert len(content["files"]) == 2, "each rank writes its own part"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_process_group_outlives_it(masked_store: Path, tmp_path: Path):
    """One that does aborts a finished run now and then, as the interpreter leaves."""
    folder = tmp_path / "run"
    argv = [*NO_REPORT, *options(masked_store, 1, "fsdp"), "--evaluation.eval_steps", "0"]
    arguments = ["train_pretrain", str(folder), argv]
    request = Request(
        "support.leave_probe:train", arguments, 2, launcher="torchrun", output=str(tmp_path / "out")
    )
    assert fork_server().run(request, TIMEOUT_SECONDS) == [0, 0], (tmp_path / "out").read_text()
    for rank in range(2):
        threads = (folder / f"threads-{rank}").read_text()
        assert "python" in threads
        assert "gloo" not in threads
