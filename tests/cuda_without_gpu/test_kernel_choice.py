"""The check of the kernels on a GPU that is not there: each runs, and the next one where one raises.

Fake tensors have no values, so every comparison is said to be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import H100
from fake_steps import CUDA, DENSE, MOE, Watched, fake_config
from torch._subclasses.fake_tensor import FakeTensorMode

from llm_pretrain.config.tree import Config
from llm_pretrain.model import self_check
from llm_pretrain.model.kernels import DTYPES, attention
from llm_pretrain.model.kernels.choice import configured_kernels
from llm_pretrain.model.self_check import check_kernels
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.training.kernel_choice import KernelChoice, choose_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's tracing does what its warnings advise against
DEVICE = f"{H100.name} (9.0)"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(self_check, "_error", lambda found, expected: 0.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def choose(config: Config, folder: Path) -> tuple[Config, KernelChoice]:
    engine: Any = SimpleNamespace(device=CUDA, rank=0, world_size=1, gather_objects=lambda value: [value])
    chosen, choice = choose_kernels(config, engine, RunFolder(folder))
    assert choice is not None
    return chosen, choice


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "dense": (DENSE, {}, {"attention": "varlen", "loss": "llm_pretrain.write_softmax_gradient"}),
    "fp32": (DENSE, {"precision": "fp32"}, {"attention": "softmax"}),
    "fp16": (DENSE, {"precision": "fp16"}, {"attention": "varlen"}),
    "full loss": (DENSE, {"loss_implementation": "full"}, {"loss": "logsumexp"}),
    "moe": (MOE, {}, {"experts": "_grouped_mm"}),
    "moe fp32": (MOE, {"precision": "fp32"}, {"experts": "llm_pretrain.rows_times_rows"}),
    "moe by Triton": (
        MOE,
        {"experts_implementation": "triton"},
        {"experts": "llm_pretrain.rows_times_weights"},
    ),
    "norm": (DENSE, {}, {"norm": "rms_norm"}),
    "optimizer": (DENSE, {}, {"optimizer": "_fused_adamw_"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_of_a_step_is_checked(case: str):
    model, training, operations = CASES[case]
    config = fake_config(model, training=training)
    for part in self_check.PARTS:
        with Watched() as watched:
            checks = check_kernels(
                config.model, configured_kernels(config), CUDA, DTYPES[config.training.precision], (part,)
            )
        assert len(checks) == (part != "experts" or model is MOE)
        assert not [check.problem for check in checks if check.problem]
        if expected := operations.get(part):
            assert [
                each
                for each in watched.operations
                if expected in each and (" cuda" in each or part == "optimizer")
            ]


def test_sound_kernels_stay(tmp_path: Path):
    config = fake_config(MOE)
    chosen, choice = choose(config, tmp_path)
    assert chosen == config
    assert choice.checked["devices"] == [DEVICE]
    assert not choice.replaced


def test_the_next_kernels_take_the_place_of_those_that_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_image(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(attention, "_varlen", no_image)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", no_image)
    chosen, choice = choose(fake_config(MOE), tmp_path)
    assert chosen.training.attention_implementation == "sdpa"
    assert chosen.training.experts_implementation == "triton"
    raised = f"raised RuntimeError: no kernel image on {DEVICE}"
    assert choice.notes == [
        f"experts grouped {raised}; triton takes its place",
        f"attention varlen {raised}; sdpa takes its place",
    ]
