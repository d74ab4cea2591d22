"""Stores and tokenizers that the data tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import make_store

from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer

TEXTS = [
    "def f(x):\n    return x  +  1\n\n\n\nclass A:\n\tpass\r\n" * 3,
    "   leading and trailing   ",
    "你好，世界。今天天气很好。" * 4,
    "emoji 😀😃👩‍👩‍👧 and e\u0301 combining",
    "control \x01\x07\x1b and \u2028 and \ufeff and </s><s><unk>",
    "aaaaaaa aaaa ababab abababa\n\n\n\n\n        spaces         ",
]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """200 short documents, every token a target."""
    return make_store(tmp_path_factory.mktemp("plain") / "store")


@pytest.fixture(scope="session")
def masked_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """150 documents, half of them prompts with ragged completions."""
    return make_store(tmp_path_factory.mktemp("masked") / "store", documents=150, seed=7, masked=True)


@pytest.fixture(scope="session")
def training_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text files of many kinds, and a module of the standard library for bulk."""
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_bytes(text.encode())
    return [str(folder), argparse_file()]


def argparse_file() -> str:
    """Some real text that is on every machine."""
    import argparse

    return str(Path(argparse.__file__))


@pytest.fixture(scope="session")
def tokenizer(training_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece tokenizer trained on `training_files`."""
    folder = tmp_path_factory.mktemp("tokenizer") / "trained"
    train_tokenizer(training_files, folder, 1000)
    return open_tokenizer(folder)
