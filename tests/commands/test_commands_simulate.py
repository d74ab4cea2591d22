"""`llm-pretrain simulate`: what it prints, finds wrong and refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.tree import Config
from llm_pretrain.forecast.simulated_steps import (
    PAGE,
    Mesh,
    SimulatedStep,
    candidates,
    different_ranks,
    findings,
    pipelines,
    simulator,
)
from llm_pretrain.hardware import CLUSTERS

H100 = CLUSTERS["h100"]
SMALL = ("--config", "tiny-moe", "--model.vocab_size", "4096")
STEP = SimulatedStep(1 << 30, {}, [], None, 0.5, 0.25, {"nvlink": 0.1, "network": 0.2}, {"network": 0.125})


def config(*options: str, world_size: int = 8) -> Config:
    return load_config([*SMALL, *options], needs_data=False, has_bf16=True, world_size=world_size)


def test_a_step_takes_its_longest_part_and_what_it_waits_for():
    assert (STEP.seconds, STEP.bound) == (0.75 + 0.125, "products")
    slow = replace(STEP, hidden={"network": 2.0})
    assert (slow.seconds, slow.bound) == (2.125, "network")
    assert replace(STEP, traffic=0.6).bound == "memory traffic"
    waiting = replace(STEP, idle=1.0)
    assert (waiting.seconds, waiting.bound) == (STEP.seconds + 1.0, "other stages")


def row(**changes: Any) -> dict[str, Any]:
    row = {"kind": "all_gather", "group": "world", "ranks": 64, "on_host": False, "count": 1}
    return row | {"bytes": 1 << 30, "smallest": 1 << 30} | changes


PADDING = {"name": "experts.gate_up_proj", "rows": 128, "ranks": 1024, "factor": 7.5}
FINDINGS: dict[str, tuple[dict[str, Any], str]] = {
    "padded experts": (
        {"padding": PADDING},
        "_proj has 128 rows over 1024 .*size 128 or fewer",
    ),
    "little padding": ({"padding": PADDING | {"factor": 1.01}}, ""),
    "parts below a page": ({"collectives": [row(smallest=64 * PAGE - 1)]}, "4095 bytes, less than a page"),
    "parts of a page": ({"collectives": [row(smallest=64 * PAGE)]}, ""),
    "a slow link": (
        {"hidden": {"network": 0.8}},
        "network is slower than the step: its collectives take 800.0 ms beside 750.0 ms of computation",
    ),
}
"""What changes in the step -> what is said of it; nothing if empty."""


@pytest.mark.parametrize("name", FINDINGS)
def test_what_makes_a_step_slow_is_named(name):
    changes, said = FINDINGS[name]
    lines = findings(replace(STEP, **changes), config(world_size=1), H100)
    assert len(lines) == bool(said)
    assert not said or re.search(said, lines[0])


def test_the_search_tries_meshes_that_divide_and_fit():
    fsdp = config("--distributed.strategy", "fsdp", "--training.global_batch_size", "256", world_size=64)
    experts = fsdp.model.num_experts
    meshes = candidates(fsdp, 64, H100)
    assert {mesh.ep for mesh in meshes} == {ep for ep in (1, 2, 4, 8) if experts % ep == 0}
    for mesh in meshes:
        assert mesh.replicas * mesh.shards * mesh.cp * mesh.tp == 64
        assert mesh.shards * mesh.cp * mesh.tp % mesh.ep == 0
        assert not list(mesh.of(fsdp).distributed.check(64))
    assert {mesh.cp for mesh in meshes} == {1}
    assert {mesh.tp for mesh in meshes} == {
        tp for tp in (1, 2, 4, 8) if fsdp.model.num_key_value_heads % tp == 0
    }
    assert candidates(fsdp, 64, replace(H100, memory_gb=0.001)) == []
    long = replace(fsdp, training=replace(fsdp.training, sequence_length=1 << 15))
    found = candidates(long, 64, H100)
    assert {mesh.cp for mesh in found} == {1, 2, 4, 8}
    assert max(mesh.cp * mesh.tp for mesh in found) == H100.gpus_per_node


def test_the_search_tries_pipelines_that_divide_the_layers():
    batch = ("--training.global_batch_size", "1024", "--model.num_hidden_layers", "12")
    given = config("--distributed.strategy", "fsdp", *batch, world_size=64)
    like = Mesh(8, 8, ep=2)
    found = [mesh for meshes in pipelines(like, given, 64, H100) for mesh in meshes]
    assert {mesh.pp for mesh in found} == {2, 4}
    assert {(mesh.ep, mesh.cp, mesh.tp) for mesh in found} == {(2, 1, 1)}
    for mesh in found:
        assert mesh.pp * mesh.replicas * mesh.shards == 64
        assert not list(check_mesh(mesh.of(given), 64))
    for mesh in [like, *found]:  # whatever the configuration says of a mesh
        divided = config("--distributed.ep_size", "4", *batch, *mesh.options(), world_size=64)
        assert divided.distributed == mesh.of(given).distributed
    few = replace(given, training=replace(given.training, global_batch_size=128))
    assert [mesh for meshes in pipelines(like, few, 64, H100) for mesh in meshes if mesh.pp == 4] == []


def test_the_ranks_of_a_pipeline_that_differ():
    layers = ("--model.num_hidden_layers", "11", "--training.global_batch_size", "128")
    given = config("--distributed.strategy", "fsdp", "--distributed.pp_size", "4", *layers)
    # stages of 2, 3, 3 and 3 layers, of two ranks each
    assert different_ranks(given, 8) == [0, 2, 6]
    assert different_ranks(config(*layers), 8) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("--distributed.ep_size", "2"),
        ("--distributed.dp_replicate_size", "2", "--training.activation_checkpointing", "true"),
        ("--distributed.tp_size", "2"),
        pytest.param(
            ("--distributed.pp_size", "2", "--model.num_hidden_layers", "12"), marks=pytest.mark.pipeline
        ),
    ],
    ids=["experts divided", "replicas, checkpointed", "matrices divided", "stages"],
)
def test_steps_of_a_simulated_gpu(mesh):
    """Extrapolated from four layers and three, or of a stage from three and two, a step is that of all."""
    options = [*SMALL, "--model.num_hidden_layers", "6", "--training.global_batch_size", "128"]
    options += ["--distributed.strategy", "fsdp", *mesh, "--training.precision", "bf16"]
    given = load_config(options, needs_data=False, has_bf16=True, world_size=8)
    with simulator(H100) as worker:
        whole = worker.step(options, given, 8)
        extrapolated = worker.extrapolated(options, given, 8)
    assert extrapolated.peak == pytest.approx(whole.peak, rel=0.001)
    assert extrapolated.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert sum(whole.held.values()) == whole.peak
