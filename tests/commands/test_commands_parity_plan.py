"""`parity` rejects what cannot work before it starts anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.audit.variants import (
    CONFIGURED,
    LEAST_RANKS,
    Interruption,
    ParityPlan,
    choose_save_steps,
    configured_mesh,
    distributed_of,
    make_plan,
    parse_interruptions,
)
from llm_pretrain.commands import parity
from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch import jobs as _launching
from llm_pretrain.launch import options as _options
from llm_pretrain.launch.jobs import Machine

TINY = str(ROOT / "configs" / "tiny-dense.yaml")


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(_launching.subprocess, "Popen", started)
    monkeypatch.setattr(parity, "this_machine", lambda: Machine(gpus=0, cores=2))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--paths", "torchrun,slurm"], 2, "--paths: expected some of torchrun, accelerate, t"),
        (["--paths", "trainer"], 2, "--paths: expected torchrun or accelerate among them"),
        (["--steps", "0"], 2, "--steps: expected 1 or more, found 0"),
        (["--world-size", "0"], 2, "--world-size: expected whole numbers from 1 on"),
        (["--world_size", "1,x"], 2, "found 'x'"),
        (["--world-size", "64"], 2, "--world-size: expected at most 4 on this machine of 2 cores, found 64"),
        (["--accumulation", "5"], 2, "training.global_batch_size 24, found 1 * 5 = 5"),
        (["--mesh", "ddp,tp"], 2, "or sizes such as 2x2 or 2x2+ep2, found 'tp'"),
        (["--strategies", "2x0"], 2, "--mesh: expected some of ddp, fsdp, hsdp, ep, ep+fsdp, ep+hsdp, de"),
        (["--mesh", "hsdp"], 2, "--mesh: expected a mesh that can run (hsdp W=1 is left out: expected 4"),
        (["--mesh", "ep"], 2, "expected a divisor of model.num_experts, 0, found 2"),
        (
            ["--world-size", "2", "--distributed.strategy", "fsdp", "--distributed.dp_shard_size", "3"], 2,
            "distributed: expected a mesh that can run (configured W=2 is left out: distributed.dp_rep",
        ),
        (["--precision", "fp8"], 2, "--precision: expected some of fp32, bf16, fp16, found 'fp8'"),
        (["--training.micro_batch_size", "5"], 2, "training.global_batch_size"),
        (["--training.micro_batch_size", "24"], 2, "found 2 * 24 = 48; 2, 3, 4, 6 or 12 would"),
        (["--training.max_steps", "0"], 2, "training.max_steps: expected more than 0"),
        (["--paths", "torchrun", "--world-size", "1"], 2, "expected two or more runs of one precision"),
        (["--paths", "torchrun", "--world-size", "1", "--precision", "fp32,bf16"], 2, "to compare, found"),
        (["--world-size", "1", "--precision", "fp16"], 2, "silently train in fp32"),
        (["--data.sources", "[{store: /nowhere}]"], 65, "/nowhere"),
        (["--interrupt", "torchrun@2"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "trainer@1:5"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "torchrun@1:9,torchrun@1:5"], 2, "expected ascending steps from 2 on"),
        (["--interrupt", "torchrun@2:5", "--world-size", "1", "--accumulation", "1"], 2, "found 2 * 24 = 48"),
        (["--interrupt", "torchrun@6:5"], 2, "expected at most 4 on this"),
        (["--interrupt", "torchrun@1:17", "--steps", "17"], 2, "--steps: expected more than 17"),
        (["--interrupt", "accelerate@1:5", "--precision", "fp16"], 2, "silently train in fp32"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_before_anything_is_launched(
    words: list[str],
    code: int,
    expected: str,
    plain_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    output = tmp_path / "output"
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, "--output", str(output), *sources, *words]) == code
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == (2 if words == ["--accumulation", "5"] else 1)
    assert "Traceback" not in printed.err
    assert not output.exists()


@pytest.mark.usefixtures("nothing_starts")
def test_the_trainer_path_s_script_may_be_missing(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_options, "PACKAGE_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("train_pretrain.py", "train_pretrain_accelerate.py"):
        (tmp_path / name).touch()
    words = ["--paths", "torchrun,trainer", "--output", str(tmp_path / "out")]
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, *sources, *words]) == 2
    assert (
        f"{tmp_path}: expected examples/train_pretrain_trainer.py there, found none"
        in capsys.readouterr().err
    )


def test_a_rollback_is_compared_as_a_skip(plain_store: Path, tmp_path: Path):
    """The compared runs save nothing, so that there is no checkpoint to go back to."""
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    words = ["--data.sources", f"[{{store: {plain_store}}}]", "--output", str(tmp_path / "out")]
    arguments = parser.parse_args(["--config", TINY, *words, "--training.spike_action", "rollback"])
    plan = make_plan(arguments, Machine(0, 2))
    assert (plan.config.training.spike_action, plan.config.checkpoint.save_steps) == ("skip", 0)


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
def test_a_mesh_replaces_every_configured_size(mesh: str):
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


def test_every_world_size_has_the_meshes_that_it_permits(plain_store: Path):
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
    assert len(plan.variants) == 2 * sum(map(len, found.values()))
    assert len({variant.name for variant in plan.variants}) == len(plan.variants)
    assert len(plan.notes) == 4 * 7 - len(plan.variants) // 2
    assert "hsdp W=3 is left out: expected 4 processes or more" in plan.notes
    assert "2x2 W=1 is left out: expected 4 processes" in plan.notes


def test_a_mesh_s_sizes_reach_the_scripts_and_are_those_of_its_world_size(plain_store: Path):
    plan = plan_of(plain_store, "--mesh", "ep", "--world-size", "2,4", "--training.micro_batch_size", "2")
    for variant in plan.variants:
        options = plan.options_of(variant)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert given["--distributed.strategy"] == plan.strategy_of(variant) == "fsdp"
        assert given["--distributed.ep_size"] == str(variant.world_size)
        assert (given["--distributed.dp_replicate_size"], given["--distributed.dp_shard_size"]) == (
            "1",
            "null",
        )


def test_configured_sizes_are_a_mesh_too(plain_store: Path):
    sizes = ["--distributed.strategy", "fsdp", "--distributed.dp_replicate_size", "2"]
    plan = plan_of(plain_store, *sizes, "--world-size", "2,4", "--training.micro_batch_size", "2")
    assert [(each.mesh, each.world_size) for each in plan.variants] == [(CONFIGURED, 4)] * 2
    assert len(plan.notes) == 1
    assert "configured W=2 is left out: distributed.dp_replicate_size: expected at most half" in plan.notes[0]
    for name in ("ddp", "fsdp", "deepspeed"):
        assert configured_mesh(DistributedConfig(strategy=name)) == name


def test_interruptions_are_read_and_come_after_a_checkpoint():
    first, second = parse_interruptions("torchrun@2:17, accelerate@1:31")
    assert (first.path, first.world_size, first.step) == ("torchrun", 2, 17)
    assert (second.path, second.world_size, second.step) == ("accelerate", 1, 31)
    at_17, at_2 = [first, second], [Interruption("torchrun", 1, 2)]
    assert [choose_save_steps(configured, at_17) for configured in (10, 500, 0, 17)] == [10, 5, 5, 5]
    assert choose_save_steps(500, at_2) == 1
    with pytest.raises(ConfigError, match="from 2 on"):
        parse_interruptions("torchrun@1:1")
