"""A crash at every call that changes the run's folder, on each rank, and a power cut after every one.

The calls are those that the C library is asked for, and playing the journal of them again must give the
folder as it is on the disk, so none is missing. The slow tests take every one under torchrun, and of kills
and refusals every `EVERY` under Accelerate, where the same code writes. The quick test takes every eighth
power cut of one process.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
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
from support.faulty_io import CUTS, Call, Disk, Fault, Tree, change_tree, read_journal, read_tree, write_tree

SURVIVOR_SECONDS = 60
"""A rank that has lost another must end by itself within this; it takes a fraction of a second."""

SAVES = ":/checkpoints :/weights"
"""Calls of the saves alone: under async_save their order does not depend on two threads' race."""

ASYNC = ["--checkpoint.async_save", "true"]
MATRIX = [
    ("torchrun", 1, [], False),
    ("torchrun", 1, ASYNC, True),
    ("torchrun", 2, [], True),
    ("torchrun", 2, ASYNC, False),
    ("accelerate", 1, ASYNC, False),
    ("accelerate", 2, [], False),
]
"""Launcher, processes, options, and whether the run is disturbed from its start or going on."""
EVERY = {"torchrun": 1, "accelerate": 7}
NAMES = [
    f"{launcher}-{size}-{'async' if mode else 'sync'}-{'fresh' if fresh else 'going on'}"
    for launcher, size, mode, fresh in MATRIX
]


@pytest.fixture(scope="module")
def crash_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run so small that it takes a fraction of a second."""
    return small_options(
        make_store(tmp_path_factory.mktemp("small") / "store", documents=60, masked=True).path
    )


@pytest.fixture(scope="module")
def scenarios(probe, crash_options, tmp_path_factory) -> Callable[..., tuple[Scenario, Scenario]]:
    """A function of launcher, world size and further options: the run from its start, and going on."""

    @functools.cache
    def made(launcher: str, world_size: int) -> tuple[Scenario, Scenario]:
        folder = tmp_path_factory.mktemp(f"{launcher}-{world_size}")
        return make_scenarios(probe, folder, crash_options, world_size=world_size, launcher=launcher)

    def with_options(launcher: str, world_size: int, options: Sequence[str] = ()):
        fresh, going_on = made(launcher, world_size)
        return tuple(replace(each, options=[*each.options, *options]) for each in (fresh, going_on))

    return with_options


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
    scenario: Scenario, root: Path, calls: list[Call], *, first: bool = False, every: int = 1
) -> dict[str, str]:
    """When → what a power cut there breaks; the first alone, or all. `every`: of so many folders one."""
    failures: dict[str, str] = {}
    folder, before = root.parent / "cut", {}
    folder.mkdir()
    for when, tree, durable in islice(power_cuts(scenario, root, calls), None, None, every):
        change_tree(before, tree, folder)
        before = tree
        try:
            check_folder(folder, scenario, durable)
        except Exception as error:
            failures[when] = f"{type(error).__name__}: {error}"[:300]
            if first:
                break
    shutil.rmtree(folder)
    return failures


def kill_points(calls: list[Call], world_size: int) -> list[tuple[int, str, int, str]]:
    """(rank, how, number, kind) of every way to die; alone, after a call is before the next."""
    points = []
    for call in (call for call in calls if call.number >= 0):
        ways = ["before", *(["after"] if world_size > 1 else []), *(["half"] if call.call == "write" else [])]
        points += [(call.rank, how, call.number, call.kind) for how in ways]
    last = [call for call in calls if call.number >= 0][-1]
    return points if world_size > 1 else [*points, (last.rank, "after", last.number, last.kind)]


LATE_MANIFEST = "the manifest is not last"
NOT_SYNCED = {
    "tensors": r"/checkpoints/.*\.safetensors",
    "the manifest": r"manifest\.json",
    "the folder before it gets its name": r"/\.step-\d+\.tmp-[0-9a-f]+$",
    "what lies beside the weights": r"/weights/\.[^/]+/(?!model\.safetensors)[^/]+$",
    "rows": r"/metrics\.jsonl$",
    "status.json": r"status\.json",
}
"""What the enumeration must notice."""


def test_a_power_cut_leaves_what_was_saved(scenarios, probe, tmp_path):
    """The newest checkpoint and best that were safe, each bit of them, and the rows up to them."""
    scenario = scenarios("torchrun", 1)[1]
    root, calls = journal_of(scenario, probe, tmp_path)
    kinds = {call.call for call in calls if not call.path.endswith(".lock")}
    assert kinds == {"create", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "truncate"}
    assert any(".step-00000002.replaced-" in call.other for call in calls)
    assert any(".best.replaced-" in call.other for call in calls)
    assert any(".step-00000001.old-" in call.other for call in calls)
    assert failures_of_cuts(scenario, root, calls, every=8) == {}


@pytest.mark.parametrize(
    "mistake", [LATE_MANIFEST, *(pytest.param(name, marks=pytest.mark.slow) for name in NOT_SYNCED)]
)
def test_a_mistake_in_the_protocol_is_noticed(scenarios, probe, tmp_path, mistake):
    scenario = scenarios("torchrun", 1)[mistake != "rows"]  # else an attempt before has written them
    root, file = tmp_path / "run", tmp_path / "journal"
    name, arguments = "write_manifest_late", []
    if mistake != LATE_MANIFEST:
        name, arguments = "without_fsync", [NOT_SYNCED[mistake]]
    ends = run(scenario, probe, root, {}, file, before=[(f"support.process_faults:{name}", arguments)])
    assert {end.exit_code for end in ends} == {0}, ends[0].output
    assert failures_of_cuts(scenario, root, read_journal(file), first=True)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "size", "mode", "from_start"), MATRIX, ids=NAMES)
def test_every_power_cut(scenarios, probe, tmp_path, launcher, size, mode, from_start):
    """Whole and undamaged after each; and the run goes on from each different folder."""
    scenario = scenarios(launcher, size, mode)[0 if from_start else 1]
    root, calls = journal_of(scenario, probe, tmp_path)
    assert failures_of_cuts(scenario, root, calls) == {}
    continued: set[frozenset] = set()
    for when, tree, _ in power_cuts(scenario, root, calls):
        outline = frozenset(_outline(tree))
        if outline not in continued:
            continued.add(outline)
            shutil.rmtree(tmp_path / "cut", ignore_errors=True)
            try:
                check_continued(scenario, probe, write_tree(tree, tmp_path / "cut"))
            except Exception as error:
                raise AssertionError(f"{when}: {error}") from error
    assert len(continued) > 20


def _outline(tree: Tree) -> Iterator[tuple[str, int]]:
    """Names without their random parts, and whether each is empty: what may make a difference."""
    for name, content in tree.items():
        size = -1 if content is None else len(content) if name.count("/") < 1 or b"\0" * 64 in content else 1
        yield re.sub(r"(tmp|old|replaced)-\w+", r"\1", name), size if content else 0


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "size", "mode", "from_start"), MATRIX, ids=NAMES)
def test_every_kill(scenarios, probe, tmp_path, launcher, size, mode, from_start):
    """Each rank dies before, after and in the midst of its calls."""
    scenario = scenarios(launcher, size, mode)[0 if from_start else 1]
    only = SAVES if mode else ""
    _, calls = journal_of(scenario, probe, tmp_path, only)
    for rank in range(size):
        numbers = [call.number for call in calls if call.rank == rank and call.number >= 0]
        assert sorted(numbers) == list(range(len(numbers)))
        assert len(numbers) >= 5
    points = kill_points(calls, size)[:: EVERY[launcher]]
    assert {rank for rank, *_ in points} == set(range(size))
    assert {how for _, how, *_ in points} >= {"before", "half"}
    longest = 0.0
    for rank, how, number, kind in points:
        root = tmp_path / "killed"
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


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "size", "mode", "no_space"), MATRIX, ids=NAMES)
def test_every_refusal(scenarios, probe, tmp_path, launcher, size, mode, no_space):
    """A call of a rank fails once: the run ends as it should have, or says in a line why it stopped."""
    scenario = scenarios(launcher, size, mode)[1]
    error = errno.ENOSPC if no_space else errno.EIO
    only = SAVES if mode else ""
    _, calls = journal_of(scenario, probe, tmp_path, only)
    for call in [call for call in calls if call.number >= 0][:: EVERY[launcher]]:
        root = tmp_path / "refused"
        shutil.rmtree(root, ignore_errors=True)
        ends = run(scenario, probe, root, {call.rank: Fault("refuse", call.number, error, only=only)})
        where = f"{scenario.name}: rank {call.rank} refused call {call.number}, {call.kind}"
        codes, output = {end.exit_code for end in ends}, "".join(end.output for end in ends)
        try:
            assert "Traceback" not in output
            if codes == {0}:
                check_finished(scenario, root, tidy=False)
            else:
                assert ends[call.rank].exit_code in {73, 74}, f"exit codes {codes}"
                assert codes <= {71, 73, 74}, f"exit codes {codes}"  # 71: it lost the rank that says why
                lines = [each for each in output.splitlines() if each.startswith("error: ")]
                (line,) = [each for each in lines if ": lost the connection to another rank" not in each]
                assert len(lines) == 1 + sum(end.exit_code == 71 for end in ends), lines
                assert os.strerror(error) in line, line
                assert str(root) in line, line
                check_continued(scenario, probe, root)
        except Exception as failure:
            raise AssertionError(f"{where}: {failure}\n{output[-3000:]}") from failure
