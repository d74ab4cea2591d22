"""The folder of the best weights: whole or the one before, whatever interrupts its replacement."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from llm_pretrain.checkpoints.weights import best_step, save_weights
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def decoder(seed: int) -> Decoder:
    model = Decoder(CONFIG)
    initialize_weights(model, seed)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "weights"


def write(folder: Path, step: int, best_loss: float | None) -> Path:
    return save_weights(
        folder,
        step,
        decoder(step),
        CONFIG,
        dtype="bf16",
        tokenizer_folder=folder.parent / "tokenizer",
        token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
        keep_last=2,
        sequence_length=48,
        best_loss=best_loss,
    )


def holds(folder: Path, step: int) -> bool:
    """Whether `best` is the model of this step."""
    opened = load_pretrained(folder / "best").state_dict()
    expected = decoder(step).state_dict()
    return all(opened[name].equal(value.to(torch.bfloat16).float()) for name, value in expected.items())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_best_is_replaced_and_survives_retention(folder: Path):
    assert best_step(folder) is None
    assert write(folder, 5, 2.5) == folder / "best"
    for step in (6, 7, 8):
        write(folder, step, None)
    assert names(folder) == ["best", "step-00000007", "step-00000008"]
    assert best_step(folder) == 5
    assert holds(folder, 5)
    write(folder, 9, 2.25)
    assert json.loads((folder / "best" / "best.json").read_text()) == {"step": 9, "eval/loss": 2.25}
    assert holds(folder, 9)
    assert names(folder) == ["best", "step-00000007", "step-00000008"]


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failed_replacement_leaves_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: int
):
    """The first rename moves the old folder aside, the second puts the new one in its place."""
    write(folder, 1, 3.0)
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
            write(folder, 2, 2.0)
    assert best_step(folder) == 1
    assert holds(folder, 1)
    write(folder, 3, None)
    assert names(folder) == ["best", "step-00000003"]
    assert holds(folder, 1)


def test_what_an_interrupted_replacement_left_is_cleaned_up(folder: Path):
    write(folder, 1, 3.0)
    os.rename(folder / "best", folder / ".best.replaced-ab12")
    write(folder, 2, None)
    assert names(folder) == ["best", "step-00000002"], "the old one counts where there is no new one"
    write(folder, 3, 2.0)
    (folder / ".best.replaced-ab12").mkdir()
    write(folder, 4, None)
    assert names(folder) == ["best", "step-00000002", "step-00000004"]
    assert best_step(folder) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"step": "5"}', None])
def test_a_folder_that_does_not_say_its_step_does_not_count(folder: Path, content: str | None):
    write(folder, 5, 2.5)
    (folder / "best" / "best.json").unlink()
    if content is not None:
        (folder / "best" / "best.json").write_text(content)
    assert best_step(folder) is None
