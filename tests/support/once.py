"""What a whole test run needs once, also where several worker processes share its tests."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """`make(folder)` by the first process that asks; the others wait, and get a copy of its result.

    The folder is empty, and every process sees it. What `make` raises is raised everywhere.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    done = folder.with_suffix(".pickle")
    with FileLock(folder.with_suffix(".lock")):
        if done.exists():
            return pickle.loads(done.read_bytes())
        if folder.exists():
            pytest.fail(f"{name} failed in another process, which says why")
        folder.mkdir()
        value = make(folder)
        done.write_bytes(pickle.dumps(value))
    return value
