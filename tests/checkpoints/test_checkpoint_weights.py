"""Exported weights appear whole or not at all, in shards where they are large; the best ones stay."""

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
from support.corpora import make_tokenizer

from llm_pretrain.checkpoints import weights
from llm_pretrain.checkpoints.weights import best_step, save_weights
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
DENSE = dataclasses.replace(CONFIG, vocab_size=320, num_hidden_layers=3, num_experts=0)
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    best_loss: float | None = None,
) -> Path:
    return save_weights(
        folder,
        step,
        decoder(config) if model is None else model,
        config,
        dtype=dtype,
        tokenizer_folder=tokenizer_folder,
        token_ids=TOKEN_IDS,
        keep_last=2,
        sequence_length=48,
        best=None if best_loss is None else {"eval/loss": best_loss},
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
    assert names(tmp_path / "weights") == ["step-00000002", "step-00000003"]
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


def test_weights_are_not_a_resume_source(tmp_path, tokenizer_folder):
    path = write(tmp_path / "weights", tokenizer_folder)
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        Run(tmp_path / "checkpoints").restore(source=path)


def test_shards_hold_every_tensor_once_within_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 4000)
    path = write(tmp_path / "weights", make_tokenizer(tmp_path / "tokenizer"), config=DENSE)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held: dict[str, str] = {}
    size = 0
    for file in files:
        with safe_open(path / file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= 4000 or len(tensors) == 1
        assert not held.keys() & tensors.keys()
        held |= dict.fromkeys(tensors, file)
        size += nbytes
    assert index == {"metadata": {"total_size": size}, "weight_map": held}
    assert opens_as(path, decoder(DENSE), torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "template", "expected"),
    [
        (["<|im_end|>"], None, [2, 300]),
        (["<|other|>"], None, 2),
        (["<|im_end|>", "<end_of_turn>"], "{{ m.content }}<end_of_turn>", [2, 301]),
        (["<|im_end|>", "<|eot_id|>"], "{{ m.content }}<|im_end|>", [2, 300]),
        (["<|end|>", "<|return|>"], "{{ m.content }}<|return|>{{ m.thinking }}<|end|>", [2, 301]),
    ],
)
def test_text_ends_where_a_turn_ends_too(tmp_path, tokens, template, expected):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    spec = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    added = spec["added_tokens"]
    added += [{**added[-1], "id": 300 + i, "content": token} for i, token in enumerate(tokens)]
    (tokenizer / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    if template:
        (tokenizer / "chat_template.jinja").write_text(template, "utf-8")
    path = write(tmp_path / "weights", tokenizer, config=DENSE)
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == expected
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "weights"


def save_best(folder: Path, step: int, best_loss: float | None) -> Path:
    return write(folder, folder.parent / "tokenizer", step, model=decoder(seed=step), best_loss=best_loss)


def is_best(folder: Path, step: int) -> bool:
    """Whether `best` is the model of this step."""
    return opens_as(folder / "best", decoder(seed=step), torch.bfloat16)


def test_best_is_replaced_and_survives_retention(folder: Path):
    assert best_step(folder) is None
    assert save_best(folder, 5, 2.5) == folder / "best"
    for step in (6, 7, 8):
        save_best(folder, step, None)
    assert names(folder) == ["best", "step-00000007", "step-00000008"]
    assert best_step(folder) == 5
    assert is_best(folder, 5)
    save_best(folder, 9, 2.25)
    assert json.loads((folder / "best" / "best.json").read_text()) == {"step": 9, "eval/loss": 2.25}
    assert is_best(folder, 9)
    assert names(folder) == ["best", "step-00000007", "step-00000008"]


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failed_replacement_leaves_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: int
):
    """The first rename moves the old folder aside, the second puts the new one in its place."""
    save_best(folder, 1, 3.0)
    rename, done = os.rename, []

    def failing(*arguments: str) -> None:
        if len(done) == calls:
            raise OSError(errno.EIO, "Input/output error")
        done.append(arguments)
        rename(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(
            CheckpointError, match=r"/best: writing weights, \d+ bytes, failed .*: .*Input/output error"
        ):
            save_best(folder, 2, 2.0)
    assert best_step(folder) == 1
    assert is_best(folder, 1)
    save_best(folder, 3, None)
    assert names(folder) == ["best", "step-00000003"]
    assert is_best(folder, 1)


def test_what_an_interrupted_replacement_left_is_cleaned_up(folder: Path):
    save_best(folder, 1, 3.0)
    os.rename(folder / "best", folder / ".best.replaced-ab12")
    save_best(folder, 2, None)
    assert names(folder) == ["best", "step-00000002"], "the old one counts where there is no new one"
    save_best(folder, 3, 2.0)
    (folder / ".best.replaced-ab12").mkdir()
    save_best(folder, 4, None)
    assert names(folder) == ["best", "step-00000002", "step-00000004"]
    assert best_step(folder) == 3


def test_a_folder_that_does_not_say_its_step_does_not_count(folder: Path):
    save_best(folder, 5, 2.5)
    for content in ("", "[]", '{"step": "5"}'):
        (folder / "best" / "best.json").write_text(content)
        assert best_step(folder) is None
    (folder / "best" / "best.json").unlink()
    assert best_step(folder) is None
