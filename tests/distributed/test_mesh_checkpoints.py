"""A checkpoint of any mesh continues on every other one."""

from __future__ import annotations

import math
import shutil
from itertools import permutations
from pathlib import Path

import pytest
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, launch
from support.stepping import relative_error

pytestmark = pytest.mark.slow

SAVED, STEPS = 2, 4
LAYOUTS: dict[str, list[str]] = {
    "ddp": ["--distributed.strategy", "ddp"],
    "fsdp": [],
    "hsdp": ["--distributed.dp_replicate_size", "2"],
    "ep": ["--distributed.ep_size", "4"],
    "ep fsdp": ["--distributed.ep_size", "2"],
    "ep hsdp": ["--distributed.dp_replicate_size", "2", "--distributed.ep_size", "2"],
}


def run(store: Path, folder: Path, layout: str, steps: int, launcher: str = "torchrun") -> Finished:
    chosen = [
        *("--config", str(ROOT / "configs" / "tiny-moe.yaml"), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.max_steps", str(steps), "--schedule.name", "constant", "--schedule.warmup_steps", "0"),
        *("--training.global_batch_size", "16", "--training.precision", "fp32", "--model.num_experts", "8"),
        *("--distributed.strategy", "fsdp", "--distributed.cpu_threads", "1", *LAYOUTS[layout]),
        *("--model.router_bias_update_rate", "1e-3", "--optimizer.ema_decay", "0.9"),
        *("--evaluation.eval_steps", "0", "--checkpoint.save_steps", "2", "--checkpoint.keep_last", "9"),
    ]
    return launch(launcher, 4, folder, chosen, accelerate_file=ROOT / "configs" / "accelerate" / "fsdp2.yaml")


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


@pytest.mark.parametrize("layout", ["hsdp", "ep fsdp", "ep hsdp"])
def test_both_launchers_write_the_same(
    masked_store: Path, saved: dict[str, Finished], layout: str, tmp_path: Path
):
    by_hand, accelerated = saved[layout], run(masked_store, tmp_path / "run", layout, SAVED, "accelerate")
    assert accelerated.exact_rows() == by_hand.exact_rows()
    assert len(accelerated.rows) == SAVED
    assert_same_tensors(*(checkpoint_tensors(each.folder, SAVED) for each in (by_hand, accelerated)))
    sizes = [each.stat().st_size for each in (by_hand.folder / "checkpoints").rglob("shard-*")]
    assert sizes, "one file for each rank"
    assert max(sizes) < 1.1 * min(sizes), "each writes as much"


@pytest.mark.parametrize(("source", "target"), list(permutations(LAYOUTS, 2)))
def test_another_mesh_continues(
    masked_store: Path, straight: Finished, saved: dict[str, Finished], source: str, target: str
):
    folder = saved[source].folder.with_name(f"{source} to {target}")
    shutil.copytree(saved[source].folder, folder)
    rows = run(masked_store, folder, target, STEPS).rows
    assert sorted(rows) == list(range(1, STEPS + 1))
    for step, expected in straight.rows.items():
        assert rows[step]["data/batch_sha256"] == expected["data/batch_sha256"]
        for key in ("train/loss", "train/aux_loss", "train/grad_norm"):
            assert math.isclose(rows[step][key], expected[key], rel_tol=1e-5), (step, key)
    found, wanted = (checkpoint_tensors(each, STEPS) for each in (folder, straight.folder))
    assert found.keys() == wanted.keys()
    error = relative_error(found, wanted)
    assert error < 1e-5, error
    shutil.rmtree(folder)
