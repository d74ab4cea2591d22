"""Exported weights appear whole or not at all, hold what the export made, and are pruned."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_helpers import Run

from llm_pretrain.checkpoints.weights import save_weights
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import update_router_bias
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=4,
)
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


def decoder(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    model = Decoder(config)
    initialize_weights(model, seed)
    return model


def write(
    folder: Path,
    tokenizer_folder: Path,
    step: int = 100,
    *,
    dtype: str = "bf16",
    model: torch.nn.Module | None = None,
    config: ModelConfig = CONFIG,
) -> Path:
    return save_weights(
        folder,
        step,
        decoder() if model is None else model,
        config,
        dtype=dtype,
        tokenizer_folder=tokenizer_folder,
        token_ids=TOKEN_IDS,
        keep_last=2,
        sequence_length=48,
    )


def opens_as(path: Path, model: Decoder, dtype: torch.dtype) -> bool:
    """Whether the folder holds exactly the model's values, rounded to `dtype`."""
    opened, state = load_pretrained(path).state_dict(), model.state_dict()
    return opened.keys() == state.keys() and all(
        opened[name].equal(value if name.endswith("bias") else value.to(dtype).float())
        for name, value in state.items()
    )


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_folder_holds_weights_config_and_tokenizer(tmp_path, tokenizer_folder, name, dtype):
    model = decoder()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    compiled = torch.compile(model, backend="eager")
    path = write(tmp_path / "weights", tokenizer_folder, dtype=name, model=compiled)
    assert path == tmp_path / "weights" / "step-00000100"
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"}
    own_files = {"config.json", "generation_config.json", "model.safetensors", ".llm_pretrain.json"}
    assert {file.name for file in path.iterdir()} == tokenizer_files | own_files
    for file in tokenizer_files:
        assert (path / file).read_text() == f"content of {file}"
    assert opens_as(path, model, dtype)
    with safe_open(path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118  # a handle, not a dict
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"]) == ("qwen3_moe", 1)
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "max_new_tokens": 48}
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_a_model_of_no_known_architecture_is_written_and_the_field_named(tmp_path, tokenizer_folder, caplog):
    config = dataclasses.replace(CONFIG, router_bias_update_rate=0.1)
    model = decoder(config)
    update_router_bias(model, torch.arange(8).view(2, 4), 0.1)
    with caplog.at_level(logging.INFO):
        path = write(tmp_path / "weights", tokenizer_folder, model=model, config=config)
    assert "model.router_bias_update_rate" in caplog.text
    content = json.loads((path / "config.json").read_text())
    assert (content["model_type"], content["eos_token_id"]) == ("llm_pretrain", 2)
    assert opens_as(path, model, torch.bfloat16)


def test_weights_are_pruned_and_replaced(tmp_path, tokenizer_folder):
    for seed, step in enumerate((1, 2, 3, 3)):
        model = decoder(seed=seed)
        path = write(tmp_path / "weights", tokenizer_folder, step, model=model)
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert opens_as(path, model, torch.bfloat16)


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_failed_export_leaves_the_last_one(tmp_path, tokenizer_folder, monkeypatch, function):
    before = write(tmp_path / "weights", tokenizer_folder, 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(
            CheckpointError, match=r"0002: writing weights, \d+ bytes, failed .*: .*No space left on device"
        ):
            write(tmp_path / "weights", tokenizer_folder, 2)
    assert list((tmp_path / "weights").iterdir()) == [before]


def test_a_value_too_large_leaves_nothing(tmp_path, tokenizer_folder):
    model = decoder()
    with torch.no_grad():
        model.state_dict()["model.norm.weight"][3] = 7e4
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .*70000"):
        write(tmp_path / "weights", tokenizer_folder, dtype="fp16", model=model)
    assert list((tmp_path / "weights").iterdir()) == []


def test_weights_are_not_a_resume_source(tmp_path, tokenizer_folder):
    path = write(tmp_path / "weights", tokenizer_folder)
    with pytest.raises(CheckpointError, match="expected a checkpoint with"):
        Run(tmp_path / "checkpoints").restore(source=path)
