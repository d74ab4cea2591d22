"""A pytest plugin for `mutation_score.py`: chooses tests, writes rows, tells the probes whom they serve."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.reached import NOTES

_config: pytest.Config
_outcomes: dict[str, str] = {}
_spent = 0.0
"""Seconds in fixtures that the next tests share."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", help="file that gets a row of JSON for each test and shared fixture")
    parser.addoption("--chosen", help="file with the ids of the tests to run, a line each")
    parser.addoption("--notes", help="folder that gets a file for each of them: blocks reached")


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    if config.getoption("--notes"):
        import torch._dynamo.config

        torch._dynamo.config.ignore_logging_functions.add(builtins._reached_)  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if chosen := _config.getoption("--chosen"):
        wanted = set(Path(chosen).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]


def write_row(**row: Any) -> None:
    with open(_config.getoption("--rows"), "a") as file:
        file.write(json.dumps(row) + "\n")


def note_name(name: str) -> str:
    """The file of a test or fixture in the folder of notes."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def note_for(name: str) -> None:
    """Let the probes of this process, and of those that it starts, note for the test or fixture `name`."""
    if folder := _config.getoption("--notes"):
        os.environ[NOTES] = str(Path(folder) / note_name(name))
        builtins._reached_.seen.clear()  # type: ignore[attr-defined]


def shared_fixtures(item: pytest.Item) -> list[str]:
    """The fixtures that other tests use too, which only the first of them sets up."""
    found = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    shared = [each for definitions in found for each in definitions if each.scope != "function"]
    return [f"{each.baseid}::{each.argname}" for each in shared]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    global _spent
    if fixturedef.scope == "function":
        return (yield)
    start, before = time.monotonic(), os.environ.get(NOTES)
    name = f"{fixturedef.baseid}::{fixturedef.argname}"
    note_for(name)
    try:
        return (yield)
    finally:
        seconds = time.monotonic() - start
        _spent += seconds
        write_row(fixture=name, seconds=seconds)
        if before is not None and _config.getoption("--notes"):
            builtins._reached_.seen.clear()  # type: ignore[attr-defined]
            os.environ[NOTES] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _spent
    start, _spent = time.monotonic(), 0.0
    note_for(item.nodeid)
    try:
        return (yield)
    finally:
        seconds = time.monotonic() - start - _spent
        outcome = _outcomes.get(item.nodeid, "passed")
        write_row(test=item.nodeid, outcome=outcome, seconds=seconds, fixtures=shared_fixtures(item))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed" and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write_row(test=report.nodeid, outcome="failed", seconds=0.0, fixtures=[])
