"""Fixtures that many tests share. Everything is made here, on the spot: no download, no checked-in data."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.corpora import make_store
from support.finished_runs import RECIPES, FinishedRun, finish_run
from support.fork_server import remove_shared, share_with_workers
from support.once import once


def pytest_configure() -> None:
    """Before pytest-xdist starts its workers, which inherit the environment."""
    # With it pytest writes whole differences, which takes minutes for the long lists that tests of checks
    # compare on purpose with what they must not equal.
    os.environ.pop("CI", None)
    if torch.cuda.is_available():  # cuBLAS reads it once in a process, and tests of determinism need it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    share_with_workers()


def pytest_unconfigure() -> None:
    """After the last worker."""
    remove_shared()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two test processes share two cores; more threads would wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def imports_out_of_the_collectors_sight() -> None:
    """Every training collects garbage; over all that a test process has imported it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def default_algorithms() -> Iterator[None]:
    """A run with `training.deterministic` inside the test process leaves the flag set."""
    yield
    torch.use_deterministic_algorithms(False)


LONG_FIRST = ("distributed", "faults", "end_to_end", "traps", "commands")
"""Folders whose files launch processes, and take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, or a worker ends up alone with one; skip what lacks its GPU or torch."""
    folders = {folder: number for number, folder in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: folders.get(item.path.parent.name, len(folders)))
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if torch.__version__ < (2, 13):
        missing["pipeline"] = "needs torch 2.13"
    for item in items:
        for name in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[name]))


@pytest.fixture(scope="session")
def plain_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store in which every token but a document's first is a target."""
    return once(tmp_path_factory, "plain", lambda folder: make_store(folder / "store", documents=400).path)


@pytest.fixture(scope="session")
def masked_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store with ragged loss masks: every other document is a prompt with a completion."""
    return once(
        tmp_path_factory,
        "masked",
        lambda folder: make_store(folder / "store", documents=400, masked=True).path,
    )


@pytest.fixture(scope="session")
def changed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another token store of the same tokenizer."""
    return once(
        tmp_path_factory, "changed", lambda folder: make_store(folder / "store", documents=300, seed=7).path
    )


@pytest.fixture(scope="session")
def finished_run(
    plain_store: Path, masked_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], FinishedRun]:
    """Name of `finished_runs.RECIPES` -> the run, which every test process shares and none changes."""

    def find(name: str) -> FinishedRun:
        recipe = RECIPES[name]
        store = masked_store if recipe.masked else plain_store
        return once(tmp_path_factory, f"run-{name}", lambda folder: finish_run(recipe, store, folder / "run"))

    return find
