"""Compiled layers: the same bits on both paths, no graph after the third step, resume and names as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiled_plan import MESHES
from support.engines import run_engine, small_config
from support.launching import checkpoint_tensors, run_options, train
from support.rank_cases import Outcome, run_ranks
from support.stepping import Driven, relative_error

from llm_pretrain.config.loading import compiles, from_dict, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # of what its compiler is written in
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler hides it by itself
]
STEPS = 8
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"num_experts": 0, "hidden_dropout": 0.1}},
    "experts": {
        "model": {"attention_dropout": 0.1},
        "training": {"precision": "bf16", "activation_checkpointing": True},
    },
}


def graphs() -> int:
    """Graphs that were compiled in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def configured(store: Path, kind: str, choice: str) -> Config:
    """Documents of every length, another number of them in each micro batch."""
    changes = KINDS[kind]
    training = changes.get("training", {}) | {"compile": choice, "max_steps": STEPS, "global_batch_size": 4}
    return small_config(store, data={"packing": "best_fit"}, **changes | {"training": training})


def driven(launcher: str, config: Config) -> tuple[Driven, list[int]]:
    """What an engine did, and how many graphs there were when each step began, and at the end."""
    loader = list(global_batches(config, start_step=0))
    per_step = config.gradient_accumulation_steps(1)
    counted: list[int] = []

    def windows() -> Iterator[list[Batch]]:
        for first in range(0, len(loader), per_step):
            counted.append(graphs())
            yield loader[first : first + per_step]

    result = run_engine(launcher, config, windows=windows())
    return result, [*counted, graphs()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_both_paths_compute_the_same_bits_with_graphs_of_three_steps(kind: str, plain_store: Path):
    torch._dynamo.reset()
    config = configured(plain_store, kind, "on")
    left, counted = driven("torchrun", config)
    assert counted[0] < counted[3] == counted[-1], "nothing was compiled, or something after the third step"
    right, again = driven("accelerate", config)
    assert again[-1] == counted[-1], "one path's graphs serve the other"
    assert left.hashes == right.hashes
    assert (left.losses, left.grad_norms) == (right.losses, right.grad_norms)
    eager, _ = driven("torchrun", configured(plain_store, kind, "off"))
    assert left.parameters.keys() == eager.parameters.keys()
    assert left.hashes != eager.hashes, "compiled layers round elsewhere"
    bound = 2e-2 if kind == "experts" else 0.1  # bf16; another draw of the dropped units
    torch.testing.assert_close(left.losses, eager.losses, rtol=bound, atol=0.0)


@pytest.fixture(scope="module")
def on_meshes(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    return run_ranks(masked_store, tmp_path_factory.mktemp("meshes"), plan="compiled_plan", world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_layers_are_compiled_on_every_axis_with_graphs_of_three_steps(
    mesh: str, on_meshes: dict[str, list[Outcome]]
):
    for compiled, eager in zip(on_meshes[f"{mesh} on"], on_meshes[f"{mesh} off"], strict=True):
        assert compiled.error is eager.error is None
        left, right = compiled.driven, eager.driven
        assert left.hashes != right.hashes, "compiled layers round elsewhere"
        torch.testing.assert_close(left.losses, right.losses, rtol=1e-5, atol=0.0)
        assert relative_error(left.parameters, right.parameters) <= 1e-5


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-moe",
        store,
        "training.compile=on training.global_batch_size=8 schedule.warmup_steps=0 "
        "schedule.name=constant checkpoint.save_steps=2 evaluation.eval_steps=2 "
        "evaluation.max_batches=1 evaluation.sample_prompts=[one] evaluation.sample_tokens=4 "
        "logging.parameters_sha256=true",
        *more,
        folder=folder,
    )


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_compiled_run_resumes_exactly(plain_store: Path, tmp_path: Path):
    """With dropout; evaluation and samples compile nothing; a checkpoint has the plain names."""
    dropout = ("--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1")
    assert train(*options(plain_store, tmp_path / "whole", *dropout, "--training.max_steps", "4")) == 0
    before = graphs()
    assert train(*options(plain_store, tmp_path / "cut", *dropout, "--training.max_steps", "2")) == 0
    assert train(*options(plain_store, tmp_path / "cut", *dropout, "--training.max_steps", "4")) == 0
    assert graphs() == before, "evaluation and samples run eagerly, and all runs share what is compiled"
    whole, cut = rows(tmp_path / "whole"), rows(tmp_path / "cut")
    for key in ("train/parameters_sha256", "eval/loss"):
        assert [row.get(key) for row in whole.values()] == [row.get(key) for row in cut.values()]
    assert whole[4]["train/parameters_sha256"]
    names = checkpoint_tensors(tmp_path / "whole", 4)
    assert not [name for name in names if "_orig_mod" in name]


PIPELINE = {"strategy": "fsdp", "pp_size": 2}


@pytest.mark.parametrize(
    ("tree", "processes", "compiled"),
    [
        ({}, 1, True),
        ({"training": {"compile": "off"}}, 1, False),
        ({"distributed": {"strategy": "deepspeed"}}, 1, False),
        ({"distributed": PIPELINE | {"pp_schedule": "1f1b"}}, 2, True),
        ({"distributed": PIPELINE | {"pp_schedule": "zbv_zero_bubble"}}, 1, True),
        ({"distributed": PIPELINE | {"pp_schedule": "zbv_zero_bubble"}}, 2, False),
    ],
    ids=["auto", "off", "deepspeed", "1f1b", "no pipeline", "split backward passes"],
)
def test_what_is_compiled_on_a_gpu(tree: dict[str, Any], processes: int, compiled: bool):
    assert compiles(from_dict(tree), processes, on_gpu=True) is compiled
    assert not compiles(from_dict(tree), processes, on_gpu=False), "auto compiles on a GPU alone"
    assert compiles(from_dict({"training": {"compile": "on"}}), on_gpu=False)


def test_deepspeed_is_not_compiled():
    tree = {"training": {"compile": "on"}, "distributed": {"strategy": "deepspeed"}}
    (line,) = validate(from_dict(tree), needs_data=False)
    assert line.startswith("training.compile: expected auto or off with distributed.strategy deepspeed")
