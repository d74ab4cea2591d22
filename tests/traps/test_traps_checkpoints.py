"""Traps of checkpoints and weights: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from support.launching import ACCELERATE_SCRIPT, ROOT
from support.resuming import Attempt, drift

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import CheckpointConfig, Config
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.huggingface import to_huggingface
from llm_pretrain.model.kernels import DTYPES


@pytest.fixture
def small(config) -> Config:
    return config()


def test_a_resumed_run_does_not_drift(small: Config, tmp_path: Path):
    """A run that was stopped after three of six steps, against the same run without a stop."""
    whole = Attempt(small, tmp_path).train(6).parameters()
    Attempt(small, tmp_path).train(3).save()
    for mistake, least in {"none": 0.0, "half-precision weights": 1e-4, "moments dropped": 1e-3}.items():
        second = Attempt(small, tmp_path, seed=1)
        second.restore()
        if mistake == "half-precision weights":
            second.model.bfloat16().float()
        elif mistake == "moments dropped":
            second.optimizer.state.clear()
        found = drift(second.train(3).parameters(), whole)
        assert found > least if least else found == 0.0, mistake


def test_half_precision_is_no_resume_state(small: Config, tmp_path: Path, monkeypatch):
    def check(folder: Path) -> None:
        low = Attempt(small, folder).train(1)
        low.model.bfloat16()
        with pytest.raises(CheckpointError, match="expected a parameter in float32"):
            low.save()

    check(tmp_path / "ours")
    monkeypatch.setattr(torch.Tensor, "is_floating_point", lambda tensor: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check(tmp_path / "trap")


def check_own_state(source: str) -> None:
    """A script has none of its state saved or loaded by the library."""
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not attributes & {"save_state", "load_state", "register_for_checkpointing"}


def test_the_library_saves_no_state():
    check_own_state(ACCELERATE_SCRIPT.read_text())
    with pytest.raises(AssertionError):
        check_own_state("self.accelerator.save_state('state')")


def test_nothing_is_pickled(small: Config, tmp_path: Path, monkeypatch):
    """A checkpoint consists of JSON and safetensors, and is loaded although a pickle lies beside them."""
    path = Attempt(small, tmp_path).train(1).save()
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    (path / ".metadata").write_bytes(pickle.dumps(print))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    Attempt(small, tmp_path).restore()


def test_small_values_survive_the_default_precision():
    def check(chosen: str) -> None:
        tensors = {"model.norm.weight": torch.tensor([1e-8])}
        written = to_huggingface(tensors, ModelConfig(vocab_size=64), DTYPES[chosen])
        assert written["model.norm.weight"].item() == pytest.approx(1e-8, rel=0.01)

    check(CheckpointConfig().weights_dtype)
    with pytest.raises(AssertionError):
        check("fp16")


def check_torch_floor(project: str) -> None:
    """No version of torch below 2.10 satisfies the project's requirement."""
    lines = re.findall(r'^\s*"(torch\b[^"]*)"', project, re.MULTILINE)
    assert len(lines) == 1
    allowed = Requirement(lines[0]).specifier
    assert not any(Version(f"2.{minor}.9") in allowed for minor in range(10))
    assert Version("2.11.0") in allowed


def test_old_versions_of_torch_are_not_installable():
    check_torch_floor((ROOT / "pyproject.toml").read_text())
    with pytest.raises(AssertionError):
        check_torch_floor('"torch>=2.4"')
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(pinned[1]) >= Version("2.10")
