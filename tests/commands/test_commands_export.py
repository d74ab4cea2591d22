"""`llm-pretrain export`: what it opens, writes and refuses."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.corpora import make_tokenizer

from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.checkpoints.weights import save_weights
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.files import MARKER
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with weights of two steps, the second different."""
    return make_run(tmp_path, CONFIG)


def make_run(tmp_path: Path, config: ModelConfig) -> Path:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    for step in (1, 2):
        model = Decoder(config)
        initialize_weights(model, step)
        save_weights(
            tmp_path / "run" / "weights",
            step,
            model,
            config,
            dtype="bf16",
            tokenizer_folder=tokenizer,
            token_ids={"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258},
            keep_last=2,
            sequence_length=48,
        )
    return tmp_path / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(folder).state_dict()


@pytest.mark.parametrize("source", ["", "weights", "weights/step-00000002"])
def test_a_run_stands_for_its_newest_weights(run, tmp_path, capsys, source):
    out = tmp_path / "out"
    assert main(["export", str(run / source), "--to", "huggingface", "--output", str(out)]) == 0
    assert "step-00000002" in capsys.readouterr().out
    ours, theirs = weights(run / "weights" / "step-00000002"), weights(out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_type_changes_and_everything_else_comes_along(run, tmp_path):
    out = tmp_path / "out"
    source = run / "weights" / "step-00000001"
    assert main(["export", str(source), "--to", "huggingface", "--output", str(out), "--dtype", "fp32"]) == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert {file.name for file in source.iterdir()} == {file.name for file in out.iterdir()}


def test_an_export_replaces_itself_with_overwrite_and_nothing_else(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    command = ["export", str(run), "--to", "huggingface", "--output", str(out)]
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert main([*command, "--overwrite"]) == 0
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
    (out / "thesis.txt").write_text("mine")
    assert main([*command, "--overwrite"]) == 2
    assert "found thesis.txt in it, which this program did not write" in capsys.readouterr().err
    (out / "thesis.txt").unlink()
    (out / MARKER).unlink()
    assert main([*command, "--overwrite"]) == 2, "without its list of files"


FOUND: dict[str, tuple[str, str, int, str]] = {
    "weights of another program": ("theirs", "huggingface", 2, "found something else; choose another"),
    "a link to weights": ("link", "huggingface", 2, "expected"),
    "a folder": ("theirs", "gguf", 2, "expected a f"),
    "a file": ("text", "huggingface", 2, "expected a f"),
    **{
        f"a file of {content}": (name, "gguf", 73, "expected a new file, or one that this program wrote")
        for name, content in (("text", "text"), ("model", "another's GGUF"), ("notes", "notes about this"))
    },
    **{
        f"the source, {place}": (f"run/{place}", "huggingface", 2, "expected a folder without the weights")
        for place in ("weights/step-00000002", "weights", ".")
    },
}
"""What stands at the output -> its place, the kind of export, the exit code, and what is said."""


@pytest.mark.parametrize("name", FOUND)
def test_what_is_no_export_of_this_kind_is_never_replaced(run, tmp_path, capsys, name):
    place, kind, code, said = FOUND[name]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(run / "weights" / "step-00000001")
    files = {"text": b"the only copy", "model": b"GGUF of another", "notes": b"notes about llm_pretrain"}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["export", str(run), "--to", kind, "--output", str(tmp_path / place), "--overwrite"]) == code
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_is_exported_in_full_precision(trained_run, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    checkpoint = trained_run.folder / "checkpoints" / "step-00000004"
    output = tmp_path / "model"
    assert main(["export", str(checkpoint), "--to", "huggingface", "--output", str(output)]) == 0
    exported, full = load_pretrained(output).state_dict(), open_model(checkpoint).model.state_dict()
    assert exported.keys() == full.keys()
    assert all(torch.equal(exported[name], full[name]) for name in full)
    rounded = load_pretrained(trained_run.folder / "weights" / "step-00000004").state_dict()
    assert any(not torch.equal(rounded[name], full[name]) for name in full)
    assert (output / "tokenizer.json").is_file()
    assert not list(scratch.iterdir()), "what was needed on the way is gone"
