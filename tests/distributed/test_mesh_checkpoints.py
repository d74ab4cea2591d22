"""A checkpoint of any mesh and launcher continues on others, and an evaluation is the same on all."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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
)
from support.stepping import relative_error

from llm_pretrain.checkpoints.manifest import read_manifest
from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.checkpoints.weights import save_weights

pytestmark = pytest.mark.slow

SAVED, STEPS = 2, 4
LAYOUTS: dict[str, list[str]] = {
    "one process": ["--distributed.strategy", "ddp"],
    "ddp": ["--distributed.strategy", "ddp"],
    "fsdp": [],
    "hsdp": ["--distributed.dp_replicate_size", "2"],
    "ep": ["--distributed.ep_size", "4"],
    "ep fsdp": ["--distributed.ep_size", "2"],
    "ep hsdp": ["--distributed.dp_replicate_size", "2", "--distributed.ep_size", "2"],
    "tp": ["--distributed.tp_size", "2"],
}
STAGES = {"pp": ["--distributed.pp_size", "2"]}
WHOLE = ("one process", "ddp", "fsdp", "hsdp")
"""Layouts in which a rank computes a sequence alone: evaluations and samples are the same bits."""
SAMPLES = ("--evaluation.sample_prompts", "[one, two]", "--evaluation.sample_tokens", "4")


def run(
    store: Path,
    folder: Path,
    layout: str,
    steps: int,
    launcher: str = "torchrun",
    *,
    options: Sequence[str] = (),
    **more: Any,
) -> Finished:
    chosen = [
        *("--config", str(ROOT / "configs" / "tiny-moe.yaml"), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.max_steps", str(steps), "--schedule.name", "constant", "--schedule.warmup_steps", "0"),
        *("--training.global_batch_size", "16", "--training.precision", "fp32", "--model.num_experts", "8"),
        *("--distributed.strategy", "fsdp", "--distributed.cpu_threads", "1", *(LAYOUTS | STAGES)[layout]),
        *("--model.router_bias_update_rate", "1e-3", "--optimizer.ema_decay", "0.9"),
        *("--evaluation.eval_steps", "1", "--evaluation.max_batches", "6"),
        *(SAMPLES if layout in WHOLE else ()),
        *("--checkpoint.save_steps", "2", "--checkpoint.keep_last", "9"),
        *options,
    ]
    file = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    world_size = 1 if layout == "one process" else 4
    return launch(launcher, world_size, folder, chosen, accelerate_file=file, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def straight(masked_store: Path, folder: Path) -> Finished:
    """Under DDP, from start to end."""
    return run(masked_store, folder / "straight", "ddp", STEPS)


@pytest.fixture(scope="module")
def saved(masked_store: Path, folder: Path) -> dict[str, Finished]:
    return {name: run(masked_store, folder / name, name, SAVED) for name in LAYOUTS}


@pytest.mark.parametrize("layout", ["fsdp", "ep hsdp", "tp"])
def test_both_launchers_write_the_same(
    masked_store: Path, saved: dict[str, Finished], layout: str, tmp_path: Path
):
    by_hand = saved[layout]
    accelerated = run(masked_store, tmp_path / "run", layout, SAVED, "accelerate", real=layout == "fsdp")
    assert accelerated.exact_rows() == by_hand.exact_rows()
    assert len(accelerated.rows) == 1 + SAVED, "with the evaluation before the first step"
    assert_same_tensors(*(checkpoint_tensors(each.folder, SAVED) for each in (by_hand, accelerated)))
    manifest = read_manifest(by_hand.folder / "checkpoints" / f"step-{SAVED:08d}")
    assert (manifest.run.strategy, manifest.run.world_size, len(manifest.files)) == ("fsdp", 4, 4)
    sizes = [each.stat().st_size for each in (by_hand.folder / "checkpoints").rglob("shard-*")]
    assert max(sizes) < 1.1 * min(sizes), "each rank writes as much"


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "ddp"])
def test_an_evaluation_between_steps_is_that_of_ddp(saved: dict[str, Finished], layout: str):
    """Of six batches over four ranks, so that two have none of the second round."""
    found, expected = saved[layout].rows, saved["ddp"].rows
    for step in range(SAVED + 1):
        assert math.isclose(found[step]["eval/loss"], expected[step]["eval/loss"], rel_tol=1e-6)
    if layout in WHOLE:  # before training only the order of sums could differ, and it does not
        assert found[0]["eval/loss"] == expected[0]["eval/loss"]
        samples = [(saved[each].folder / "samples.jsonl").read_text() for each in (layout, "ddp")]
        assert samples[0].splitlines()[:2] == samples[1].splitlines()[:2], "of the first evaluation"


def test_an_evaluation_changes_no_training(masked_store: Path, saved: dict[str, Finished], tmp_path: Path):
    layout = "ep hsdp"
    alone = run(masked_store, tmp_path / "run", layout, SAVED, options=["--evaluation.eval_steps", "0"])
    for step in range(1, SAVED + 1):
        for key in ("train/loss", "train/aux_loss", "train/grad_norm", "moe/load"):
            assert alone.rows[step][key] == saved[layout].rows[step][key]
    assert_same_tensors(*(checkpoint_tensors(each.folder, SAVED) for each in (alone, saved[layout])))


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("write_the_parts_of_every_replica", "hsdp"),
        ("number_experts_by_rank", "ep"),  # as many bytes as there should be
        ("number_layers_by_stage", "pp"),
    ],
)
def test_parts_from_none_or_several_ranks_are_found(
    masked_store: Path, fault: str, layout: str, tmp_path: Path
):
    before = [(f"support.process_faults:{fault}", [])]
    done = run(masked_store, tmp_path / "run", layout, SAVED, before=before, exit_code=None)
    assert done.exit_code != 0
    assert "expected each part of the tensors from one rank" in done.output
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("layout", ["ddp", "hsdp", "ep fsdp", "tp"])
def test_weights_are_those_that_one_process_writes(saved: dict[str, Finished], layout: str, tmp_path: Path):
    """The averages in the checkpoint, rounded, byte for byte."""
    run = saved[layout].folder
    weights, checkpoint = (run / name / f"step-{SAVED:08d}" for name in ("weights", "checkpoints"))
    opened = open_model(checkpoint)
    alone = save_weights(
        tmp_path,
        SAVED,
        opened.model,
        opened.model.config,
        dtype="bf16",
        tokenizer_folder=weights,
        token_ids={},
        keep_last=2,
        sequence_length=8,
    )
    names = [file.name for file in alone.glob("*.safetensors")]
    assert names == ["model.safetensors"]
    assert (weights / names[0]).read_bytes() == (alone / names[0]).read_bytes()


NAMES = list(LAYOUTS)
MOVES = [(source, NAMES[(k + 3) % len(NAMES)]) for k, source in enumerate(NAMES)]
"""Each layout's checkpoint on another, and on each another's checkpoint."""


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_another_mesh_continues(
    masked_store: Path, straight: Finished, saved: dict[str, Finished], source: str, target: str
):
    """It first writes the weights that a kill has left out."""
    folder = saved[source].folder.with_name(f"{source} to {target}")
    shutil.copytree(saved[source].folder, folder)
    written = folder / "weights" / f"step-{SAVED:08d}" / "model.safetensors"
    weights = written.read_bytes()
    shutil.rmtree(written.parent)
    launcher = "torchrun" if target in ("one process", "ddp") else "accelerate"
    rows = run(masked_store, folder, target, STEPS, launcher).rows
    assert written.read_bytes() == weights
    assert sorted(rows) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        expected = straight.rows[step]
        assert rows[step]["data/batch_sha256"] == expected["data/batch_sha256"]
        for key in ("train/loss", "train/aux_loss", "train/grad_norm"):
            assert math.isclose(rows[step][key], expected[key], rel_tol=1e-5), (step, key)
    found, wanted = (checkpoint_tensors(each, STEPS) for each in (folder, straight.folder))
    assert found.keys() == wanted.keys()
    error = relative_error(found, wanted)
    assert error < 1e-5, error
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_process_group_outlives_it(masked_store: Path, tmp_path: Path):
    """One that does aborts a finished run now and then, as the interpreter leaves."""
    options = run_options("tiny-moe", masked_store, "training.max_steps=1 distributed.strategy=fsdp")
    arguments, output = [str(tmp_path / "run"), [*NO_REPORT, *options]], tmp_path / "output"
    request = Request("support.probes:list_threads", arguments, 2, launcher="torchrun", output=str(output))
    assert fork_server().run(request, TIMEOUT_SECONDS) == [0, 0], output.read_text()
    for rank in range(2):
        threads = (tmp_path / "run" / f"threads-{rank}").read_text()
        assert "python" in threads
        assert "gloo" not in threads
