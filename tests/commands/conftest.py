"""A small run that the tests of the commands share."""

from __future__ import annotations

import pytest
from support.finished_runs import FinishedRun


@pytest.fixture(scope="session")
def trained_run(finished_run) -> FinishedRun:
    """A mixture of experts: four steps, saved and evaluated after steps 2 and 4."""
    return finished_run("mixture")
