"""The stores of a run: one tokenizer, a fingerprint of all that decides the order, other processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from support.corpora import edit_facts, make_config, make_store

from llm_pretrain.data.loader import data_fingerprint, global_batches, open_stores
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError


def test_mixed_sources_share_one_tokenizer(store: TokenStore, tmp_path: Path):
    other = make_store(tmp_path / "other", documents=5)
    assert len(open_stores(make_config(store, other))) == 2
    edit_facts(other.path, lambda facts: facts.update(tokenizer_hash="0" * 64))
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.store: expected the tokenizer of"):
        open_stores(make_config(store, TokenStore(other.path)))


def test_the_fingerprint_changes_with_all_that_decides_the_order(store: TokenStore, masked_store: TokenStore):
    base = data_fingerprint(make_config(store))
    others = [
        make_config(masked_store),
        make_config(store, packing="concat"),
        make_config(store, isolate_documents=False),
        make_config(store, seed=1),
        make_config(store, sequence_length=32),
        make_config(store, weights=[2.0]),
    ]
    for config in others:
        assert data_fingerprint(config) != base
    assert data_fingerprint(make_config(store, micro_batch_size=1, num_workers=2)) == base


def test_a_store_that_was_replaced_after_its_opening_is_not_mixed_in(tmp_path: Path):
    opened = make_store(tmp_path / "store", documents=20)
    config = make_config(opened, max_steps=2)

    def digests(**stores: Any) -> list[bytes]:
        loader = global_batches(config, start_step=0, **stores)
        return [batch.input_ids.numpy().tobytes() for batch in loader]

    before, fingerprint = digests(), data_fingerprint(config)
    (tmp_path / "store").rename(tmp_path / "earlier")
    make_store(tmp_path / "store", documents=30)
    assert digests() != before
    assert digests(stores=[opened]) == before
    assert data_fingerprint(config, [opened]) == fingerprint != data_fingerprint(config)
    with pytest.raises(DataError, match=r"store: expected the store that the run has opened"):
        pickle.loads(pickle.dumps(opened))
