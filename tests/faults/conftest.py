"""What the fault tests share: one small run with everything that can differ, and the run nobody disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corpora import make_store
from support.crash_probe import CrashProbe
from support.faulty_io import build_library
from support.launching import Finished, launch, run_options
from support.once import once

STEPS, SAVE_STEPS = 24, 4


@pytest.fixture(scope="session")
def fault_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store with ragged loss masks, one for all test processes, which compare settings too."""
    return once(
        tmp_path_factory,
        "fault-store",
        lambda folder: make_store(folder / "store", documents=400, masked=True).path,
    )


@pytest.fixture(scope="session")
def options(fault_store: Path) -> list[str]:
    """Options of a mixture of experts with dropout, a row per step, a save every `SAVE_STEPS`."""
    return run_options(
        "tiny-moe",
        fault_store,
        f"training.max_steps={STEPS} checkpoint.save_steps={SAVE_STEPS} "
        "model.hidden_dropout=0.1 model.router_bias_update_rate=1e-3 evaluation.eval_steps=0 "
        "logging.logging_steps=1",
    )


@pytest.fixture(scope="session")
def undisturbed(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run on two processes that nothing happened to; the oracle of every other on two."""
    return once(
        tmp_path_factory, "undisturbed", lambda folder: launch("torchrun", 2, folder / "run", options)
    )


@pytest.fixture(scope="session")
def undisturbed_alone(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same on one process."""
    return once(
        tmp_path_factory, "undisturbed-alone", lambda folder: launch("torchrun", 1, folder / "run", options)
    )


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashProbe]:
    """Forks trainings, with faults."""
    folder = tmp_path_factory.mktemp("probe")
    running = CrashProbe(build_library(folder), folder / "own")
    yield running
    running.close()
