"""Fixtures that many tests share. Everything is made here, on the spot: no download, no checked-in data."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import make_store
from support.finished_runs import RECIPES, FinishedRun, finish_run
from support.fork_server import remove_shared, share_with_workers
from support.once import once


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-xdist starts its workers, which inherit the environment."""
    words = config.option.markexpr.replace("not gpu", "").split()
    if "gpu" not in words:  # other tests launch ranks, and compare numbers, of a CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
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


LONG_FIRST = (
    *("test_commands_plan", "test_meshes", "test_data_batches", "test_traps_ranks", "test_simulated_steps"),
    *("test_golden_rows", "test_scaling_law", "test_faults_crash_points", "test_training_watchdog"),
    *("test_loop", "test_commands_replay", "test_failed_saves", "test_loop_evaluations", "test_spikes"),
    *("distributed", "faults", "end_to_end", "traps", "commands", "training"),
)
"""Files of more than ten seconds, then folders whose files launch processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, or a worker ends up alone with one; skip what lacks its GPU or torch."""
    places = {name: number for number, name in enumerate(LONG_FIRST)}

    def place(item: pytest.Item) -> int:
        return min(places.get(name, len(places)) for name in (item.path.stem, item.path.parent.name))

    items.sort(key=place)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device, and -m gpu"
    if torch.__version__ < (2, 13):
        missing["pipeline"] = "needs torch 2.13"
    for item in items:
        for name in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[name]))


def store(name: str, **options: Any) -> Any:
    """The fixture of a token store, which all test processes share."""

    @pytest.fixture(scope="session", name=f"{name}_store")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return once(tmp_path_factory, name, lambda folder: make_store(folder / "store", **options).path)

    return made


plain_store = store("plain", documents=400)
"""Every token but a document's first is a target."""
masked_store = store("masked", documents=400, masked=True)
"""With ragged loss masks: every other document is a prompt with a completion."""
changed_store = store("changed", documents=300, seed=7)
"""Another one of the same tokenizer."""


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
