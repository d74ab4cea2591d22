"""Stores that the data tests share."""

from __future__ import annotations

import pytest
from support.corpora import make_store

from llm_pretrain.data.store import TokenStore


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """200 short documents, every token a target."""
    return make_store(tmp_path_factory.mktemp("plain") / "store")


@pytest.fixture(scope="session")
def masked_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """150 documents, half of them prompts with ragged completions."""
    return make_store(tmp_path_factory.mktemp("masked") / "store", documents=150, seed=7, masked=True)
