"""GGUF files: llama.cpp computes the same ids, logits and greedy text, or the export is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corpora import make_config, write_jsonl
from transformers import AutoTokenizer

from llm_pretrain.api import open_model
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.loader import open_stores
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import CheckpointError, ConfigError, DataError
from llm_pretrain.export.config_json import huggingface_config, native_config
from llm_pretrain.export.gguf import write_gguf
from llm_pretrain.export.gguf_tokenizer import read_vocabulary
from llm_pretrain.export.huggingface import load_pretrained, to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

gguf = pytest.importorskip("gguf", reason="writing GGUF needs the package gguf")

KINDS = ["sentencepiece-bpe", "bytelevel-bpe", "char"]
TEXTS = [
    "Hello world",
    "  two spaces,   three\t\ttabs\n\n\nand lines \n",
    "你好,世界!春眠不觉晓,处处闻啼鸟。",
    "def f(x):\n    return x ** 2  # café naïve\n",
    "It's 12345 o'clock, isn't it? THEY'LL see",
    "😀👩‍👩‍👧 ไทย العربية \u00a0 ▁ x",
    "text with </s> and <|im_start|> and <s> in it",
    " ",
    "e\u0301 é ﬁ \r\n mixed\r\nends",
]
ENGLISH = "the quick brown fox jumps over a lazy dog while it's raining; return value of the function is"
CHINESE = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少床前明月光疑是地上霜举头望明月低头思故乡"

BASE = ModelConfig(
    vocab_size=704,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not hidden_size / heads
    max_position_embeddings=256,
    initializer_range=0.15,  # far from uniform logits
    rope_theta=5000.0,
    rms_norm_eps=1e-5,
)
MOE = dataclasses.replace(BASE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
SHAPES = {
    "qwen3": BASE,
    "qwen3-untied": dataclasses.replace(BASE, tie_word_embeddings=False),
    "llama": dataclasses.replace(BASE, qk_norm=False),
    "qwen3moe": MOE,
    "mixtral": dataclasses.replace(MOE, qk_norm=False, tie_word_embeddings=False),
    "linear": dataclasses.replace(BASE, rope_type="linear", rope_factor=4.0),
    "yarn": dataclasses.replace(BASE, qk_norm=False, rope_type="yarn", rope_factor=4.0),
    "some-dense": dataclasses.replace(MOE, first_k_dense_replace=1, norm_topk_prob=False),
    "sigmoid": dataclasses.replace(MOE, scoring_func="sigmoid", qk_norm=False, routed_scaling_factor=2.5),
    "sigmoid-shared-bias": dataclasses.replace(
        MOE, scoring_func="sigmoid", n_shared_experts=2, router_bias_update_rate=0.01, first_k_dense_replace=1
    ),
    "ernie4_5_moe": dataclasses.replace(
        MOE, qk_norm=False, n_shared_experts=1, routed_scaling_factor=1.5, first_k_dense_replace=1
    ),
    "qwen2_moe": dataclasses.replace(MOE, qk_norm=False, norm_topk_prob=False, n_shared_experts=1),
    "softmax-bias": dataclasses.replace(MOE, router_bias_update_rate=0.01, n_shared_experts=1),
}


def corpus() -> list[str]:
    """English and Chinese lines that repeat enough to be merged."""
    generator = random.Random(0)
    words = ENGLISH.split()
    lines = [" ".join(generator.choices(words, k=12)) for _ in range(150)]
    lines += ["".join(generator.choices(CHINESE, k=14)) + "。" for _ in range(150)]
    return lines + [text for text in TEXTS if "</s>" not in text and "▁" not in text]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """One tokenizer folder of each kind that llama.cpp can follow."""
    folder = tmp_path_factory.mktemp("tokenizers")
    text = folder / "corpus.txt"
    text.write_text("\n".join(corpus()), encoding="utf-8")
    for kind in KINDS:
        train_tokenizer([str(text)], folder / kind, None if kind == "char" else 640, type=kind)
    return {kind: folder / kind for kind in KINDS}


def write_weights(folder: Path, model: ModelConfig, tokenizer: Path, **ids: int | None) -> Path:
    """A weights folder with random values that are far from uniform, in fp32."""
    decoder = Decoder(model)
    initialize_weights(decoder, 1)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        elif name.endswith(("gate_up_proj", "mlp.gate.weight")):
            parameter.data.mul_(2)
    for name, buffer in decoder.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3, generator=generator)
    shutil.copytree(tokenizer, folder)
    token_ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None} | ids
    try:
        content = huggingface_config(model, dtype="fp32", **token_ids)
    except ConfigError:
        content = native_config(model, dtype="fp32", **token_ids)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(
        to_huggingface(decoder.state_dict(), model, torch.float32),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def our_logprobs(weights: Path, ids: list[int], new: list[int]) -> np.ndarray:
    """Log-probabilities [len(new), V] of our own decoder on the way through `new`."""
    model = load_pretrained(weights).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids + new])).logits
    assert logits is not None
    return logits[0, len(ids) - 1 : -1].double().log_softmax(-1).numpy()


def not_characters(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids whose bytes alone are no text: special, unused, and parts of a character."""
    pieces = tokenizer.token_pieces()
    return [
        index
        for index in range(vocab_size)
        if index >= len(pieces) or not pieces[index] or "\ufffd" in pieces[index].decode(errors="replace")
    ]


def difference(weights: Path, file: Path, text: str, count: int = 12) -> float:
    """Largest difference of log-probabilities (of the 50 likeliest) while llama.cpp continues a text.

    Fails where the ids of the text differ, or where llama.cpp's choice is not our likeliest, of all
    tokens that are whole characters.
    """
    from support.llama_cpp import LlamaCpp

    llama = LlamaCpp(file)
    tokenizer = open_tokenizer(weights)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = start + tokenizer.encode([text])[0]
    assert llama.tokenize(text) == ids
    vocab_size = json.loads((weights / "config.json").read_text())["vocab_size"]
    banned = not_characters(tokenizer, vocab_size)
    new, theirs = llama.greedy(ids, count, vocab_size, banned)
    assert len(new) == count
    ours = our_logprobs(weights, ids, new)
    allowed = ours.copy()
    allowed[:, banned] = -np.inf
    assert new == allowed.argmax(-1).tolist()
    likeliest = np.argsort(-ours, -1)[:, :50]
    assert ours.std() > 0.5
    return float(np.abs(np.take_along_axis(ours - theirs, likeliest, -1)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_gives_the_same_token_ids(tmp_path, tokenizers, kind):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from support.llama_cpp import LlamaCpp

    weights = write_weights(tmp_path / "weights", BASE, tokenizers[kind])
    write_gguf(weights, tmp_path / "model.gguf", "fp32")
    llama, tokenizer = LlamaCpp(tmp_path / "model.gguf"), open_tokenizer(tokenizers[kind])
    texts = [*TEXTS, *corpus()[::25]]
    if kind == "char":  # noted by the export
        texts = [text for text in texts if "▁" not in text]
    expected = tokenizer.encode(texts)
    assert max(map(len, expected)) > 20
    assert [llama.tokenize(text, special=False) for text in texts] == expected


@pytest.mark.parametrize(
    ("shape", "kind"), [(shape, KINDS[index % len(KINDS)]) for index, shape in enumerate(SHAPES)]
)
def test_llama_cpp_computes_the_same_log_probabilities(tmp_path, tokenizers, shape, kind):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    weights = write_weights(tmp_path / "weights", SHAPES[shape], tokenizers[kind])
    notes = write_gguf(weights, tmp_path / "model.gguf", "fp32")
    assert notes == (["llama.cpp reads the character ▁ (U+2581) in a text as a space"] * (kind == "char"))
    assert difference(weights, tmp_path / "model.gguf", "return the 春眠不觉晓") < 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.3), ("fp16", 0.03)])
def test_half_precision_files_stay_close(tmp_path, tokenizers, dtype, bound):
    """llama.cpp rounds activations to the matrices' type, so the bound is the type's, not the export's."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    weights = write_weights(tmp_path / "weights", MOE, tokenizers["bytelevel-bpe"])
    write_gguf(weights, tmp_path / "model.gguf", dtype)
    assert (tmp_path / "model.gguf").stat().st_size < 0.6 * (
        weights / "model.safetensors"
    ).stat().st_size + 1e5
    assert difference(weights, tmp_path / "model.gguf", "the quick brown", count=1) < bound


@pytest.mark.parametrize("kind", ["sentencepiece-bpe", "bytelevel-bpe"])
def test_the_chat_template_makes_the_same_prompt(tmp_path, tokenizers, kind):
    """The same ids, though llama.cpp does not know transformers' `{% generation %}` marks."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from support.llama_cpp import LlamaCpp
    from transformers import AutoTokenizer

    weights = write_weights(tmp_path / "weights", BASE, tokenizers[kind])
    write_gguf(weights, tmp_path / "model.gguf", "fp32")
    messages = [
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    llama, tokenizer = LlamaCpp(tmp_path / "model.gguf"), AutoTokenizer.from_pretrained(weights)
    ids = llama.tokenize(llama.chat_prompt(messages), special_text=True)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == expected
    assert len(set(ids) & set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))) == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"decoder_sparse_step": 2, "norm_topk_prob": False}, "decoder_sparse_step"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"hidden_act": "relu2", "num_experts": 0}, "hidden_act"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused_by_field(tmp_path, tokenizers, changes, field):
    weights = write_weights(
        tmp_path / "weights", dataclasses.replace(MOE, **changes), tokenizers["bytelevel-bpe"]
    )
    with pytest.raises(ConfigError) as caught:
        write_gguf(weights, tmp_path / "model.gguf", "bf16")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [f"model.{field}"]
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]


def change_json(path: Path, change) -> None:
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


def test_the_end_of_a_turn_is_the_chat_templates(tmp_path, tokenizers):
    weights = write_weights(tmp_path / "weights", BASE, tokenizers["bytelevel-bpe"])
    spec = json.loads((weights / "tokenizer.json").read_text("utf-8"))
    ids = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    assert read_vocabulary(weights, BASE.vocab_size).special["eot_token_id"] == ids["<|im_end|>"]
    for file in ("tokenizer.json", "chat_template.jinja"):
        text = (weights / file).read_text("utf-8").replace("<|im_start|>", "<end_of_turn>")
        (weights / file).write_text(text.replace("<|im_end|>' -", "<end_of_turn>' -"), "utf-8")
    assert read_vocabulary(weights, BASE.vocab_size).special["eot_token_id"] == ids["<|im_start|>"]


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path, tokenizers):
    """As older versions of transformers write them."""
    weights = write_weights(tmp_path / "weights", BASE, tokenizers["bytelevel-bpe"])
    named = read_vocabulary(weights, BASE.vocab_size).special
    assert "eos_token_id" in named
    config = json.loads((weights / "tokenizer_config.json").read_text())
    moved = {key: config.pop(key) for key in list(config) if key.endswith("_token")}
    (weights / "tokenizer_config.json").write_text(json.dumps(config))
    (weights / "special_tokens_map.json").write_text(json.dumps(moved))
    assert read_vocabulary(weights, BASE.vocab_size).special == named


def tokenizer_json(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "tokenizer.json", lambda spec: spec.update(changes))


@pytest.mark.parametrize("bos", [True, False])
def test_readers_begin_a_text_as_training_did(tmp_path, tokenizers, bos, capsys):
    """A tokenizer that puts nothing, or something at the end, around a text; ours add BOS only once."""
    tokenizer = shutil.copytree(tokenizers["bytelevel-bpe"], tmp_path / "tokenizer")
    tokenizer_json(post_processor=None if bos else TWO_IN_FRONT)(tokenizer)
    changes = {"add_bos_token": False, "add_eos_token": True, "tokenizer_class": "GPTNeoXTokenizer"}
    changes |= {} if bos else {"bos_token": None}
    change_json(tokenizer / "tokenizer_config.json", lambda content: content.update(changes))
    (tokenizer / "special_tokens_map.json").unlink()
    (tmp_path / "corpus.txt").write_text(ENGLISH)
    store = prepare_store(
        Preparation([str(tmp_path / "corpus.txt")], tokenizer, tmp_path / "store", workers=1)
    )
    *trained, end = store.split("train").document(0)[0].tolist()
    assert trained[0] == (store.bos_token_id if bos else end)
    weights = write_weights(
        tmp_path / "weights", BASE, store.tokenizer_folder, bos_token_id=store.bos_token_id, eos_token_id=end
    )
    assert AutoTokenizer.from_pretrained(weights)(ENGLISH)["input_ids"] == trained
    opened = open_model(weights, tokenizer=tokenizer)
    assert opened.encode(ENGLISH) == trained
    assert capsys.readouterr().err == "", "the original has the same ids"
    file = write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": trained[1:]}])
    other = prepare_store(Preparation([str(file)], tokenizer, tmp_path / "other", workers=1))
    assert other.tokenizer_digests != store.tokenizer_digests, "begins with text"
    assert other.tokenizer_hash == Tokenizer(tokenizer).hash == store.tokenizer_hash
    assert len(open_stores(make_config(store, other))) == 2
    write_gguf(weights, tmp_path / "model.gguf", "fp32")
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from support.llama_cpp import LlamaCpp

    assert LlamaCpp(tmp_path / "model.gguf").tokenize(ENGLISH) == trained


def another_pattern(folder: Path) -> None:
    def change(spec: dict) -> None:
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"

    change_json(folder / "tokenizer.json", change)


TWO_IN_FRONT = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        name: {"id": name, "ids": [i], "tokens": [name]}
        for i, name in ((1, "<|im_start|>"), (2, "<|im_end|>"))
    },
}
REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pattern": ("bytelevel-bpe", another_pattern, r"tokenizer\.json: expected"),
    "normalizer": (
        "bytelevel-bpe",
        tokenizer_json(normalizer={"type": "Lowercase"}),
        r"tokenizer\.json: expected",
    ),
    "two in front": (
        "bytelevel-bpe",
        tokenizer_json(post_processor=TWO_IN_FRONT),
        r"tokenizer\.json: expected",
    ),
    "unigram": (
        "sentencepiece-bpe",
        tokenizer_json(model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}),
        "found 'Unigram'",
    ),
    "no scores": (
        "sentencepiece-bpe",
        lambda folder: (folder / "tokenizer.model").unlink(),
        r"tokenizer\.model: expected",
    ),
    "pipe": (
        "sentencepiece-bpe",
        lambda folder: (folder / "tokenizer.model").unlink() or os.mkfifo(folder / "tokenizer.model"),
        r"tokenizer\.model: expected .*, found: no plain file",
    ),
}
"""name: kind of tokenizer, what is done to its folder, and what is said of it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tmp_path, tokenizers, name):
    kind, change, message = REFUSED[name]
    weights = write_weights(tmp_path / "weights", BASE, tokenizers[kind])
    change(weights)
    with pytest.raises(DataError, match=message) as caught:
        write_gguf(weights, tmp_path / "model.gguf", "bf16")
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("damage", ["missing tensor", "foreign tensor", "too large for fp16"])
def test_broken_weights_leave_no_file(tmp_path, tokenizers, damage):
    weights = write_weights(tmp_path / "weights", MOE, tokenizers["bytelevel-bpe"])
    tensors = load_file(weights / "model.safetensors")
    if damage == "missing tensor":
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    elif damage == "foreign tensor":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    else:
        tensors["model.layers.2.mlp.experts.1.down_proj.weight"][0, 0] = 7e4
    save_file(tensors, weights / "model.safetensors")
    (tmp_path / "model.gguf").write_text("before")
    with pytest.raises(CheckpointError) as caught:
        write_gguf(weights, tmp_path / "model.gguf", "fp16")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "model.gguf").read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.gguf", "weights"]


def test_a_file_that_must_not_be_replaced_by_now_stays(tmp_path, tokenizers):
    weights = write_weights(tmp_path / "weights", BASE, tokenizers["bytelevel-bpe"])
    (tmp_path / "model.gguf").write_text("before")

    def check() -> None:
        raise ConfigError("expected a new path")

    with pytest.raises(ConfigError, match="expected a new path"):
        write_gguf(weights, tmp_path / "model.gguf", "fp32", check=check)
    assert (tmp_path / "model.gguf").read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.gguf", "weights"]
