"""The first of documents with equal text and targets is kept, wherever the others are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import make_texts, make_tokenizer, write_jsonl

from llm_pretrain.data import preparation as prepare_module
from llm_pretrain.data.preparation import Preparation, SeenDocuments, prepare_store


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=30))
def test_a_key_is_new_only_once(batches: list[list[int]]):
    seen, known = SeenDocuments(), set()
    for batch in batches:
        expected = []
        for key in batch:
            expected.append(key not in known)
            known.add(key)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected


def test_memory_is_that_of_the_keys():
    generator = np.random.default_rng(0)
    seen = SeenDocuments()
    for _ in range(1000):
        seen.add(generator.integers(0, 1 << 63, 500, dtype=np.uint64))
    assert sum(level.nbytes for level in seen._levels) == 8 * 500_000
    assert len(seen._levels) < 20


def prepare(folder: Path, *corpora: list[dict], **options):
    files = [str(write_jsonl(folder / f"{k}.jsonl", corpus)) for k, corpus in enumerate(corpora)]
    tokenizer = make_tokenizer(folder / "tokenizer")
    return prepare_store(Preparation(files, tokenizer, folder / "store", 0.2, deduplicate=True, **options))


def test_only_equal_text_with_equal_targets_is_a_duplicate(tmp_path: Path):
    kinds: list[dict] = [
        {"text": "ab"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "", "completion": "ab"},
        {"segments": [{"text": "a", "loss": True}, {"text": "b", "loss": False}]},
        {"text": "ab "},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
    ]
    store = prepare(tmp_path, kinds, kinds[::-1], [{"text": "ab", "id": 5}])
    assert store.facts["duplicates"] == len(kinds) + 1
    assert store.facts["input_documents"] == [len(kinds), 0, 0]


def test_a_mask_of_booleans_is_that_of_integers(tmp_path: Path):
    masks: list[list] = [[0, 1, 1], [False, True, True], [0, True, 1]]
    store = prepare(tmp_path, [{"input_ids": [5, 6, 7], "loss_mask": mask} for mask in masks])
    assert store.facts["duplicates"] == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_without_duplicates_is_that_of_the_different_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 2000)
    texts = make_texts(200)
    repeated = texts[:120] + texts[40:200] + texts[::-1]
    halves = [[{"text": text} for text in part] for part in (repeated[:150], repeated[150:])]
    store = prepare(tmp_path / "all", *halves, workers=workers)
    once = prepare(tmp_path / "once", [{"text": text} for text in texts], workers=1)
    assert store.facts["duplicates"] == len(repeated) - len(texts)
    assert store.zlib_bits_per_byte == once.zlib_bits_per_byte
    for split in ("train", "validation"):
        found, expected = (list(s.split(split).iterate()) for s in (store, once))
        assert [ids.tolist() for ids, _ in found] == [ids.tolist() for ids, _ in expected]
