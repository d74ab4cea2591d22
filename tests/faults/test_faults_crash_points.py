"""A crash at every call that changes the run's folder, on each rank, and a power cut after every one.

Nothing is sampled in the slow tests: the calls are those that the C library is asked for, and playing the
journal of them again must give the folder as it is on the disk, so none is missing. The quick tests take
every power cut of one process, and every few of the kills.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corpora import make_store
from support.crash_checks import (
    Scenario,
    check_continued,
    check_finished,
    check_folder,
    durable_steps,
    make_scenarios,
    run,
    small_options,
)
from support.crash_probe import CrashProbe
from support.faulty_io import (
    CUTS,
    Call,
    Disk,
    Fault,
    Tree,
    build_library,
    read_journal,
    read_tree,
    write_tree,
)

SURVIVOR_SECONDS = 60
"""A rank that has lost another must end by itself within this; it takes a fraction of a second."""

SAVES = ":/checkpoints :/weights"
"""Calls of the saves alone: under async_save their order does not depend on two threads' race."""

ASYNC = ["--checkpoint.async_save", "true"]
MATRIX = [
    (launcher, size, mode)
    for launcher in ("torchrun", "accelerate")
    for size in (1, 2)
    for mode in ([], ASYNC)
]
NAMES = [f"{launcher}-{size}-{'async' if mode else 'sync'}" for launcher, size, mode in MATRIX]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashProbe]:
    """Forks trainings, with faults."""
    folder = tmp_path_factory.mktemp("probe")
    running = CrashProbe(build_library(folder), folder / "own")
    yield running
    running.close()


@pytest.fixture(scope="module")
def crash_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run so small that it takes a fraction of a second."""
    return small_options(
        make_store(tmp_path_factory.mktemp("small") / "store", documents=60, masked=True).path
    )


@pytest.fixture(scope="module")
def alone(probe, crash_options, tmp_path_factory) -> tuple[Scenario, Scenario]:
    """One process: from the start, and going on."""
    return make_scenarios(probe, tmp_path_factory.mktemp("alone"), crash_options, world_size=1)


@pytest.fixture(scope="module")
def pair(probe, crash_options, tmp_path_factory) -> tuple[Scenario, Scenario]:
    """Two processes likewise."""
    return make_scenarios(probe, tmp_path_factory.mktemp("pair"), crash_options, world_size=2)


def journal_of(
    scenario: Scenario, probe: CrashProbe, folder: Path, only: str = ""
) -> tuple[Path, list[Call]]:
    """Run undisturbed; its folder and its calls, which must account for everything that is in the folder."""
    root, file = folder / "counted", folder / "counted.journal"
    ends = run(scenario, probe, root, {rank: Fault(only=only) for rank in range(scenario.world_size)}, file)
    assert {end.exit_code for end in ends} == {0}, ends[0].output
    check_finished(scenario, root)
    calls, disk = read_journal(file), Disk(root, scenario.start)
    for call in calls:
        disk.apply(call)
    assert disk.after_cut("as it is") == read_tree(root), "something was written past the journal"
    return root, calls


def power_cuts(
    scenario: Scenario, root: Path, calls: list[Call]
) -> Iterator[tuple[str, Tree, tuple[int, int]]]:
    """Each different folder that a cut after any call may leave: when, content, steps that must be there."""
    disk, seen = Disk(root, scenario.start), set()
    for call, durable in zip(calls, durable_steps(calls, root, scenario), strict=True):
        disk.apply(call)
        for cut in CUTS:
            tree = disk.after_cut(cut)
            key = (frozenset(tree.items()), durable)
            if key not in seen:
                seen.add(key)
                yield f"{cut}, after call {call.number} of rank {call.rank}: {call.kind}", tree, durable


def failures_of_cuts(
    scenario: Scenario, root: Path, calls: list[Call], *, first: bool = False
) -> dict[str, str]:
    """When → what a power cut there breaks; the first alone, or all."""
    failures, folder = {}, root.parent / "cut"
    for when, tree, durable in power_cuts(scenario, root, calls):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            check_folder(write_tree(tree, folder), scenario, durable)
        except Exception as error:
            failures[when] = f"{type(error).__name__}: {error}"[:300]
            if first:
                break
    return failures


def kill_points(calls: list[Call], world_size: int) -> list[tuple[int, str, int, str]]:
    """(rank, how, number, kind) of every way to die; alone, after a call is before the next."""
    points = []
    for call in (call for call in calls if call.number >= 0):
        ways = ["before", *(["after"] if world_size > 1 else []), *(["half"] if call.call == "write" else [])]
        points += [(call.rank, how, call.number, call.kind) for how in ways]
    last = [call for call in calls if call.number >= 0][-1]
    return points if world_size > 1 else [*points, (last.rank, "after", last.number, last.kind)]


def check_kills(
    scenario: Scenario,
    probe: CrashProbe,
    folder: Path,
    points: list[tuple[int, str, int, str]],
    only: str = "",
) -> float:
    """Kill a rank at each point and go on from there; returns the longest that another rank outlived it."""
    longest = 0.0
    for rank, how, number, kind in points:
        root = folder / "killed"
        shutil.rmtree(root, ignore_errors=True)
        ends = run(scenario, probe, root, {rank: Fault(how, number, only=only)})
        where = f"{scenario.name}: rank {rank} killed {how} call {number}, {kind}"
        assert ends[rank].exit_code == -9, f"{where} did not happen:\n{ends[rank].output[-2000:]}"
        for other, end in enumerate(ends):
            assert other == rank or end.exit_code > 0, f"{where}: rank {other} ended with {end.exit_code}"
            longest = max(longest, end.seconds)
        try:
            check_continued(scenario, probe, root)
        except Exception as error:
            raise AssertionError(f"{where}: {error}") from error
    assert longest < SURVIVOR_SECONDS
    return longest


def test_a_power_cut_after_any_call_leaves_what_was_saved(alone, probe, tmp_path):
    """The newest checkpoint and best that were safe, each bit of them, and the rows up to them."""
    scenario = alone[1]
    root, calls = journal_of(scenario, probe, tmp_path)
    kinds = {call.call for call in calls}
    assert kinds == {"create", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "truncate"}
    assert any(".step-00000002.replaced-" in call.other for call in calls)
    assert any(".best.replaced-" in call.other for call in calls)
    assert any(".step-00000001.old-" in call.other for call in calls)
    assert failures_of_cuts(scenario, root, calls) == {}


def test_a_kill_now_and_then_loses_nothing(alone, probe, tmp_path):
    """One process; every few of the points that the slow test takes all of."""
    scenario = alone[1]
    _, calls = journal_of(scenario, probe, tmp_path)
    points = kill_points(calls, 1)
    assert len(points) > 200
    check_kills(scenario, probe, tmp_path, points[3::24])
