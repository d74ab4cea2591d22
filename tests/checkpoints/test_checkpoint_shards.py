"""Large weights are written in shards that everybody opens; text ends where a turn ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.corpora import make_tokenizer

from llm_pretrain.checkpoints import weights
from llm_pretrain.checkpoints.state import Piece
from llm_pretrain.checkpoints.tensor_files import read_tensors, write_pieces
from llm_pretrain.checkpoints.weights import convert_weights, save_weights
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export.huggingface import load_pretrained
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TOKEN_IDS: dict[str, int | None] = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}


def save(folder: Path, tokenizer: Path) -> tuple[Path, Decoder]:
    model = Decoder(CONFIG)
    initialize_weights(model, 3)
    path = save_weights(
        folder,
        1,
        model,
        CONFIG,
        dtype="bf16",
        tokenizer_folder=tokenizer,
        token_ids=TOKEN_IDS,
        keep_last=2,
        sequence_length=48,
    )
    return path, model


def test_shards_hold_every_tensor_once_within_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 4000)
    path, model = save(tmp_path / "weights", make_tokenizer(tmp_path / "tokenizer"))
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
    opened = load_pretrained(path).state_dict()
    assert all(opened[name].equal(value.bfloat16().float()) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_transformers_opens_shards(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 4000)
    path, _ = save(tmp_path / "weights", make_tokenizer(tmp_path / "tokenizer"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        ours = load_pretrained(path).eval()(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
    assert ours is not None
    assert (ours - theirs).abs().max() < 1e-5
    assert ours.std() > 0


def test_weights_that_fit_are_one_file(tmp_path):
    path, _ = save(tmp_path / "weights", make_tokenizer(tmp_path / "tokenizer"))
    assert [file.name for file in path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("tokens", "template", "expected"),
    [
        (["<|im_end|>"], None, [257, 300]),
        (["<|other|>"], None, 257),
        (["<|im_end|>", "<end_of_turn>"], "{{ m.content }}<end_of_turn>", [257, 301]),
        (["<|im_end|>", "<|eot_id|>"], "{{ m.content }}<|im_end|>", [257, 300]),
        (["<|im_end|>", "<|eot_id|>"], "{{ m.content }}{{ eos_token }}", [257, 300]),
        (["<|end|>", "<|return|>"], "{{ m.content }}<|return|>{{ m.thinking }}<|end|>", [257, 301]),
        (["<|end|>", "<|return|>"], None, [257, 301]),
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
    path, _ = save(tmp_path / "weights", tokenizer)
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == expected
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == 257


def test_a_failed_conversion_leaves_what_was_there(tmp_path, monkeypatch):
    path, _ = save(tmp_path / "weights", make_tokenizer(tmp_path / "tokenizer"))
    convert_weights(path, tmp_path / "out", "fp32")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "fsync_file", full)
        with pytest.raises(CheckpointError, match=r"/out: writing .*failed .*: .*No space left"):
            convert_weights(path, tmp_path / "out", "fp16")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "tokenizer", "weights"]


def test_pieces_of_all_ranks_are_read_by_one_process(tmp_path: Path):
    whole = {"matrix": torch.arange(12.0).view(4, 3), "vector": torch.arange(5.0)}
    files = []
    for rank, rows in enumerate(((0, 1), (1, 4))):
        pieces = [Piece("matrix", whole["matrix"][slice(*rows)], (rows[0], 0))]
        pieces += [Piece("vector", whole["vector"], (0,))] * (rank == 0)
        files += write_pieces(pieces, tmp_path, rank=rank)
    read = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    read_tensors(read, tmp_path, files)
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    with pytest.raises(CheckpointError, match=r"reading tensors failed: .*matrix: not all values are in"):
        read_tensors(read, tmp_path, files[:1])
    (tmp_path / files[1]).write_bytes((tmp_path / files[1]).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"shard-00002.*: expected a safetensors file"):
        read_tensors(read, tmp_path, files)
