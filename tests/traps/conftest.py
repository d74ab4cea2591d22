"""What the trap tests share: a small corpus, a small model's configuration, and engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.corpora import make_store
from support.engines import reset_accelerate, small_config
from support.once import once

from llm_pretrain.config.tree import Config


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory) -> Path:
    """A token store in which every other document is a prompt that does not count."""

    def make(folder: Path) -> Path:
        return make_store(folder / "store", documents=150, masked=True, longest=8).path

    return once(tmp_path_factory, "store", make)


@pytest.fixture
def config(store_folder) -> Callable[..., Config]:
    """`config(**changes)`: a small configuration over the store; see `small_config`."""
    return lambda **changes: small_config(store_folder, **changes)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch) -> Iterator[None]:
    """One thread, no GPU, no launcher's settings, and none of Accelerate's state left over."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    reset_accelerate()
