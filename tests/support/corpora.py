"""Tiny deterministic corpora, a tokenizer and token stores, built in well under a second."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_pretrain.config.tree import Config, DataConfig, EvaluationConfig, SourceConfig, TrainingConfig
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore, facts_digest

WORDS = [
    *("one", "two", "three", "and", "or", "not", "the", "of", "in", "is", "was"),
    *("über", "你好", "naïve", "😀"),
]


def make_tokenizer(folder: Path, *, bos: bool = True) -> Path:
    """A byte-level tokenizer without merges: 256 bytes and <s>, </s>, <pad>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (["<s>"] if bos else []) + ["</s>", "<pad>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    config |= {"bos_token": "<s>"} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_texts(count: int, *, seed: int = 0, longest: int = 60) -> list[str]:
    """`count` different texts of 1 to `longest` words."""
    generator = random.Random(seed)
    return [
        " ".join([f"{index}:", *generator.choices(WORDS, k=generator.randint(1, longest))])
        for index in range(count)
    ]


def write_jsonl(file: Path, records: list[dict]) -> Path:
    """Writes one record per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8"
    )
    return file


def make_store(
    folder: Path,
    *,
    documents: int = 200,
    seed: int = 0,
    masked: bool = False,
    longest: int = 60,
    validation_fraction: float = 0.1,
) -> TokenStore:
    """A small store at `folder`; `masked` makes every other document a prompt with a ragged completion."""
    records: list[dict] = []
    generator = random.Random(seed + 1)
    for index, text in enumerate(make_texts(documents, seed=seed, longest=longest)):
        cut = generator.randint(0, len(text))
        pair = masked and index % 2 == 0
        records.append({"prompt": text[:cut], "completion": text[cut:]} if pair else {"text": text})
    corpus = write_jsonl(folder.with_name(folder.name + "-corpus.jsonl"), records)
    tokenizer = make_tokenizer(folder.with_name(folder.name + "-tokenizer"))
    return prepare_store(
        Preparation([str(corpus)], tokenizer, folder, validation_fraction=validation_fraction, workers=1)
    )


def edit_facts(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of store.json and its digest, as if the store had been written so."""
    facts = json.loads((store / "store.json").read_text())
    change(facts)
    facts["sha256"] = facts_digest(facts)
    (store / "store.json").write_text(json.dumps(facts))


def forge_digests(store: Path) -> None:
    """Give every file the size and the digests that store.json should have of it."""

    def digests(facts: dict[str, Any]) -> None:
        for name, entry in facts["files"].items():
            data = (store / name).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            entry.update(bytes=len(data), sha256=digest, sample=digest)

    edit_facts(store, digests)


def make_config(
    *stores: TokenStore,
    weights: list[float] | None = None,
    sequence_length: int = 64,
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    max_steps: int = 10,
    max_batches: int | None = None,
    **data: object,
) -> Config:
    """A config that trains on `stores`; further arguments are fields of `data`."""
    shares = weights or [1.0] * len(stores)
    sources = [SourceConfig(str(store.path), share) for store, share in zip(stores, shares, strict=True)]
    return Config(
        data=DataConfig(sources=sources, **data),  # type: ignore[arg-type]
        evaluation=EvaluationConfig(max_batches=max_batches),
        training=TrainingConfig(
            sequence_length=sequence_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            max_steps=max_steps,
            precision="fp32",
        ),
    )
