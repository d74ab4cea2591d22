"""Compiled layers: the same bits on both paths, no graph after the third step, resume and names as ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiled_plan import MESHES
from support.engines import run_engine, small_config
from support.faults import Fault, defined, replace_everywhere, replacing
from support.launching import checkpoint_tensors, run_options, train
from support.rank_cases import Outcome, run_ranks
from support.stepping import Driven, relative_error

from llm_pretrain.config.loading import compiles, from_dict, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches
from llm_pretrain.model.layers import RMSNorm
from llm_pretrain.training import model_setup

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


def driven(launcher: str, config: Config, *faults: Fault) -> tuple[Driven, list[int]]:
    """What an engine did, and how many graphs there were when each step began, and at the end."""
    loader = list(global_batches(config, start_step=0))
    per_step = config.gradient_accumulation_steps(1)
    counted: list[int] = []

    def windows() -> Iterator[list[Batch]]:
        for first in range(0, len(loader), per_step):
            counted.append(graphs())
            yield loader[first : first + per_step]

    result = run_engine(launcher, config, *faults, windows=windows())
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


@pytest.mark.slow
def test_what_differs_from_batch_to_batch_stays_out_of_the_graphs(plain_store: Path):
    """Without the opaque parts every other layout of documents is compiled anew."""
    torch._dynamo.reset()
    config = configured(plain_store, "dense", "on")
    opaque = defined("_by_documents")
    open_parts = replacing(opaque, opaque.__wrapped__)
    _, counted = driven("torchrun", config, open_parts)
    assert counted[-1] > counted[3]


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


def check_eager_without_gradients(store: Path, folder: Path, *, compiled: bool = False) -> None:
    """Every compiled graph that runs in a training run with evaluations and samples runs in training."""
    torch._dynamo.reset()
    in_training: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            in_training.append(torch.is_grad_enabled())
            return graph.forward(*arguments)

        return run

    compile_ = torch.nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        if compiled:
            replace_everywhere(patch, model_setup.eagerly, lambda model: nullcontext())
        patch.setattr(torch.nn.Module, "compile", lambda module: compile_(module, backend=backend))
        assert train(*options(store, folder, "--training.max_steps", "2")) == 0
    assert in_training, "nothing was compiled"
    assert all(in_training)


@pytest.mark.slow
def test_evaluations_and_samples_run_eagerly(plain_store: Path, tmp_path: Path):
    check_eager_without_gradients(plain_store, tmp_path / "run")
    with pytest.raises(AssertionError):
        check_eager_without_gradients(plain_store, tmp_path / "mistaken", compiled=True)


def test_what_compiles_itself_stays_compiled_in_evaluations():
    """FlexAttention: uncompiled it would hold all scores."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.nn.Sequential(RMSNorm(2, 1e-6))
    model[0].compile(backend=keep)
    attention, x = torch.compile(lambda x: x + 1, backend=keep), torch.ones(1, 2)
    with model_setup.eagerly(model):
        model(x)
        assert not graphs
        attention(x)
        assert len(graphs) == 1
    model(x)
    assert len(graphs) == 2


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


def test_a_compiler_that_a_gpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    assert model_setup.missing_compiler() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_setup, "find_spec", lambda name: None)
    assert model_setup.missing_compiler() == "the package triton"
    monkeypatch.setattr(model_setup, "find_spec", lambda name: name)
    monkeypatch.setattr(model_setup.shutil, "which", lambda name: None)
    assert model_setup.missing_compiler() == "a C compiler (gcc or clang, or CC)"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_auto_compiles_on_a_gpu_alone(on_gpu: bool):
    assert compiles(from_dict({}), on_gpu=on_gpu) is on_gpu
    assert compiles(from_dict({"training": {"compile": "on"}}), on_gpu=on_gpu)
    assert not compiles(from_dict({"training": {"compile": "off"}}), on_gpu=on_gpu)
    assert not compiles(from_dict({"distributed": {"strategy": "deepspeed"}}), on_gpu=on_gpu)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_auto_leaves_out_split_backward_passes_of_a_pipeline(schedule: str):
    """Of one process there is none, whatever is configured."""
    config = from_dict({"distributed": {"strategy": "fsdp", "pp_size": 2, "pp_schedule": schedule}})
    assert compiles(config, 1, on_gpu=True)
    assert compiles(config, 2, on_gpu=True) is (schedule == "1f1b")


def test_deepspeed_is_not_compiled():
    tree = {"training": {"compile": "on"}, "distributed": {"strategy": "deepspeed"}}
    (line,) = validate(from_dict(tree), needs_data=False)
    assert line.startswith("training.compile: expected auto or off with distributed.strategy deepspeed")
