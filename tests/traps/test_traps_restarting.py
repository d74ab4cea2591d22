"""Traps of leaving and starting again: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.engines import SCRIPTS, small_config
from support.launching import ROOT, kill_outright, train_tiny
from support.probes import ACCELERATE, LIMIT_SECONDS, TORCHRUN, Launch, finish_probe, start_probe

import llm_pretrain.training.trainer as trainer
from llm_pretrain.config.loading import dump_yaml
from llm_pretrain.errors import EXIT_PREEMPTED
from llm_pretrain.runs.status import Status, read_status

RESTART_PROBE = ROOT / "tests" / "support" / "restart_probe.py"
STOP_PROBE = ROOT / "tests" / "support" / "stop_probe.py"

FORMING = ("init_process_group", "InitProcessGroupKwargs", "PartialState", "init_distributed")

UNTOLD = "not told of the launcher's death"
STOPS: dict[str, tuple[list[str], signal.Signals, list[str]]] = {
    "torchrun killed": ([*TORCHRUN, "--nproc_per_node", "2"], signal.SIGKILL, ["ours", UNTOLD]),
    "torchrun, SIGUSR1": (
        [*TORCHRUN, "--nproc_per_node", "2", "--signals-to-handle", "SIGTERM,SIGUSR1"],
        signal.SIGUSR1,
        ["ours", "no SIGUSR1"],
    ),
    "accelerate, SIGTERM": ([*ACCELERATE, "--cpu", "--num_processes", "1"], signal.SIGTERM, ["ours"]),
    "accelerate, SIGTERM, the mistake": (
        [*ACCELERATE, "--cpu", "--num_processes", "1"],
        signal.SIGTERM,
        [UNTOLD],
    ),
}
"""name: (launcher, the signal it alone gets, each rank's variant of the probe)."""


Started = tuple[subprocess.Popen[str], Path]


@pytest.fixture(scope="module")
def launched(store_folder, tmp_path_factory) -> Iterator[Callable[[str], Started]]:
    """`launched(name)`: a launcher of this file, started, with its folder."""
    running: list[Started] = []

    def start(name: str) -> Started:
        folder = tmp_path_factory.mktemp("launched")
        config = small_config(store_folder, distributed={"timeout_seconds": 30})
        (folder / "config.yaml").write_text(dump_yaml(config))
        if name in STOPS:
            launcher, _, variants = STOPS[name]
            command = [*launcher, str(STOP_PROBE), str(folder), *variants]
        else:
            restarting = ["--max-restarts", "2", "--nproc_per_node", "2"]
            command = [*TORCHRUN, *restarting, str(RESTART_PROBE), str(folder)]
        running.append((start_probe(command, folder), folder))
        return running[-1]

    yield start
    for process, folder in running:
        for file in folder.glob("*.pid"):
            with suppress(psutil.NoSuchProcess):
                if str(folder) in (left := psutil.Process(int(file.read_text()))).cmdline():
                    left.kill()
        if process.poll() is None:
            kill_outright(process)
            process.wait()


def wait_for(what: str, happened) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], folder: Path, number: signal.Signals, variants: list[str]) -> None:
    """Send the launcher alone a signal, when every rank waits for one; returns when it has gone."""
    ready = [folder / f"{variant}.pid" for variant in variants]
    for file in ready:
        wait_for(f"{file} did not start: {(folder / 'output').read_text()[-2000:]}", file.exists)
    os.kill(process.pid, number)
    process.wait(LIMIT_SECONDS)


def check_stopped(folder: Path, variant: str, expected: str, patience: float = 60) -> None:
    """The process has been told to stop, knows by which signal, and is gone after `patience` seconds."""
    worker = int((folder / f"{variant}.pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait(patience)
    file = folder / f"{variant}.signal"
    assert file.exists(), "it was not told"
    assert file.read_text() == expected
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [("torchrun killed", "SIGTERM"), ("torchrun, SIGUSR1", "SIGUSR1"), ("accelerate, SIGTERM", "SIGTERM")],
)
def test_workers_stop_with_their_launcher(name, told, launched):
    _, number, variants = STOPS[name]
    process, folder = launched(name)
    stop(process, folder, number, variants)
    check_stopped(folder, "ours", told)
    mistakes = [(folder, variant) for variant in variants[1:]]
    if not mistakes:
        (process, folder), (_, _, variants) = launched(f"{name}, the mistake"), STOPS[f"{name}, the mistake"]
        stop(process, folder, number, variants)
        mistakes = [(folder, variants[0])]
    for where, variant in mistakes:
        with pytest.raises((AssertionError, psutil.TimeoutExpired)):
            check_stopped(where, variant, told, patience=2)


@pytest.fixture(scope="module")
def restarted(launched) -> Launch:
    return finish_probe(*launched("restart"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", SCRIPTS)
def test_a_restarted_process_meets_those_of_its_own_attempt(launcher, restarted):
    def check(name: str) -> None:
        assert restarted.variant(name) == [2.0, 2.0], restarted.output[-3000:]

    assert restarted.exit_code == 1, "its workers left with 75, which torchrun does not say"
    check(launcher)
    with pytest.raises(AssertionError, match="connectFullMesh"):
        check(f"{launcher} one store")


def check_meeting_points(source: str) -> None:
    """Whatever forms a process group forms it at the attempt's own meeting point."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    forming = [call for call in calls if ast.unparse(call.func).split(".")[-1] in FORMING]
    assert forming
    for call in forming:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("init_method") == "rendezvous_init_method()", ast.unparse(call)


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_process_group_is_formed_at_the_meeting_point(script):
    check_meeting_points((ROOT / f"{script}.py").read_text())
    with pytest.raises(AssertionError):
        check_meeting_points("dist.init_process_group(backend, timeout=timeout)")


def test_the_status_file_knows_what_the_launcher_does_not_say(masked_store, tmp_path, monkeypatch):
    def check(folder: Path, *, forgets: bool = False) -> None:
        with monkeypatch.context() as patch:
            if forgets:
                patch.setattr(Status, "ended", lambda *_: None)
            patch.setattr(trainer.Trainer, "_stop_requested", lambda self: self.progress.step == 1)
            with suppress(AssertionError):  # on the exit code, which is 75
                train_tiny(masked_store, folder)
        assert read_status(folder / "status.json")["exit_code"] == EXIT_PREEMPTED

    check(tmp_path / "ours")
    with pytest.raises(AssertionError):
        check(tmp_path / "trap", forgets=True)
