"""Exported weights appear whole or not at all, hold what the export made, and are pruned."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Run, SmallModel
from safetensors import safe_open
from safetensors.torch import load_file

from llm_pretrain import export
from llm_pretrain.checkpoints import save_weights
from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError

CONFIG = ModelConfig(vocab_size=32, hidden_size=8)
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"):
        (folder / name).write_text(f"content of {name}")
    for name in ("config.json", "pytorch_model.bin", "model.safetensors", "README.md"):
        (folder / name).write_text("not a tokenizer's")
    return folder


@pytest.fixture(autouse=True)
def stub_export(monkeypatch):
    """An export that casts and drops the tied head, so that only the writing is under test."""

    def to_huggingface(state, model, dtype):
        return {name: tensor.to(dtype) for name, tensor in state.items() if name != "lm_head.weight"}

    def config_of(model_type: str):
        def build(model, *, bos_token_id, eos_token_id, pad_token_id, dtype):
            return {"model_type": model_type, "hidden_size": model.hidden_size, "dtype": dtype}

        return build

    monkeypatch.setattr(export, "to_huggingface", to_huggingface, raising=False)
    monkeypatch.setattr(export, "huggingface_config", config_of("qwen3"), raising=False)
    monkeypatch.setattr(export, "native_config", config_of("llm_pretrain"), raising=False)


def write(folder: Path, tokenizer_folder: Path, step: int = 100, *, dtype: str = "bf16", model=None) -> Path:
    return save_weights(
        folder,
        step,
        SmallModel() if model is None else model,
        CONFIG,
        dtype=dtype,
        tokenizer_folder=tokenizer_folder,
        token_ids=TOKEN_IDS,
        keep_last=2,
        sequence_length=48,
    )


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_folder_holds_weights_config_and_tokenizer(tmp_path, tokenizer_folder, name, dtype):
    model = SmallModel()
    path = write(
        tmp_path / "weights", tokenizer_folder, dtype=name, model=torch.compile(model, backend="eager")
    )
    assert path == tmp_path / "weights" / "step-00000100"
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"}
    own_files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in path.iterdir()} == tokenizer_files | own_files
    for file in tokenizer_files:
        assert (path / file).read_text() == f"content of {file}"
    tensors = load_file(path / "model.safetensors")
    assert tensors["experts"].equal(model.experts.detach().to(dtype))
    assert "lm_head.weight" not in tensors
    with safe_open(path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    config = json.loads((path / "config.json").read_text())
    assert config == {"model_type": "qwen3", "hidden_size": 8, "dtype": name}
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "max_length": 48}


def test_a_model_of_no_known_architecture_is_written_and_the_field_named(
    tmp_path, tokenizer_folder, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise ConfigError("model.router_bias_update_rate: 0.1 has no place in Qwen3-MoE")

    monkeypatch.setattr(export, "huggingface_config", refuse)
    with caplog.at_level(logging.WARNING):
        path = write(tmp_path / "weights", tokenizer_folder)
    assert "model.router_bias_update_rate" in caplog.text
    config = json.loads((path / "config.json").read_text())
    assert config == {"model_type": "llm_pretrain", "hidden_size": 8, "dtype": "bf16"}
    assert "experts" in load_file(path / "model.safetensors")


def test_weights_are_pruned_and_replaced(tmp_path, tokenizer_folder):
    for step in (1, 2, 3, 3):
        model = SmallModel()
        path = write(tmp_path / "weights", tokenizer_folder, step, model=model)
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert load_file(path / "model.safetensors")["experts"].equal(model.experts.detach().bfloat16())


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_failed_export_leaves_the_last_one(tmp_path, tokenizer_folder, monkeypatch, function):
    before = write(tmp_path / "weights", tokenizer_folder, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(CheckpointError, match=r"weights of step 2 failed: .*No space left on device"):
            write(tmp_path / "weights", tokenizer_folder, 2)
    assert list((tmp_path / "weights").iterdir()) == [before]


def test_a_refused_value_leaves_nothing(tmp_path, tokenizer_folder, monkeypatch):
    def overflow(*_):
        raise CheckpointError("experts: 7e+04 does not fit float16")

    monkeypatch.setattr(export, "to_huggingface", overflow)
    with pytest.raises(CheckpointError, match="does not fit"):
        write(tmp_path / "weights", tokenizer_folder, dtype="fp16")
    assert list((tmp_path / "weights").iterdir()) == []


def test_weights_are_not_a_resume_source(tmp_path, tokenizer_folder):
    path = write(tmp_path / "weights", tokenizer_folder)
    with pytest.raises(CheckpointError, match="found exported weights"):
        Run(tmp_path / "checkpoints").restore(source=path)
