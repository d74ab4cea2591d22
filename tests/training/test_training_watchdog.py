"""The watchdog's judgement, in processes that it may end; whole launches are in tests/faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fork_server import python_path
from support.launching import ROOT, environment
from support.watchdog_probe import HANGS, SLOW, TIMEOUT

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import DataError, StuckError
from llm_pretrain.launch import watchdog
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.status import Status, read_status

PROBE = ROOT / "tests" / "support" / "watchdog_probe.py"


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case, in which a process hung or was slow, and their exit codes."""
    folder = tmp_path_factory.mktemp("probes")
    variables = environment() | {"PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    subprocess.run([sys.executable, str(PROBE), str(folder)], env=variables, check=True, timeout=300)
    return folder


def ending(probes: Path, case: str) -> tuple[int, str]:
    """Exit code and output of a case."""
    return json.loads((probes / "codes.json").read_text())[case], (probes / case / "output").read_text()


@pytest.mark.parametrize("act", HANGS, ids=lambda act: act.__name__)
def test_silence_ends_the_process(act: Callable[..., None], probes: Path):
    code, output = ending(probes, act.__name__)
    assert code == StuckError.exit_code, output
    assert "went on" not in output
    folder = RunFolder(probes / act.__name__)
    status = read_status(folder.status)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 71, 3)
    doing = r"(step 7|saving step 8)"
    said = rf"rank 0: no progress for \d s in {doing} \(distributed.timeout_seconds: {TIMEOUT}\)"
    assert re.match(said, status["reason"])
    assert output.splitlines()[-1] == f"error: {status['reason']}"
    for text in (folder.stacks(0).read_text(), output):
        assert f"in {act.__name__}" in text


@pytest.mark.parametrize("act", SLOW, ids=lambda act: act.__name__)
def test_a_sign_of_life_is_enough(act: Callable[..., None], probes: Path):
    assert ending(probes, act.__name__) == (0, "went on\n")
    assert not list((probes / act.__name__).glob("stacks*"))


def test_a_process_that_holds_pythons_lock_ends_by_faulthandler(probes: Path):
    code, output = ending(probes, "locked")
    assert code == 1
    assert "in locked" in output


def test_a_kernel_is_left_alive_with_its_stacks(probes: Path):
    code, output = ending(probes, "kernel")
    assert code == 0
    assert output.endswith("went on\n")
    folder = RunFolder(probes / "kernel")
    assert "interrupt it" in folder.stacks(0).read_text()
    assert read_status(folder.status)["state"] == "running"


def config(timeout_seconds: int = 60) -> Config:
    return Config(distributed=DistributedConfig(timeout_seconds=timeout_seconds))


def test_nothing_is_left_after_the_run_or_an_interrupt():
    before = threading.active_count()
    for error in (None, KeyboardInterrupt, StuckError):
        began = time.monotonic()
        try:
            with watchdog.hang_watchdog(config()):
                assert threading.active_count() == before + 1
                if error:
                    raise error
        except (KeyboardInterrupt, StuckError):
            pass
        assert threading.active_count() == before
        assert watchdog._current is None
        assert time.monotonic() - began < 30, "it does not wait for its next look"
    watchdog.heartbeat("nobody listens")
    assert watchdog.current_phase() == "the run"


def test_an_end_that_is_written_stays(tmp_path: Path):
    """A hang or a lost peer says least: what the run or another rank has written stays."""
    status = Status(tmp_path / "status.json", rank=0, world_size=2, launcher="torchrun")
    other = Status(tmp_path / "status.json", rank=1, world_size=2, launcher="torchrun")
    status.started()
    other.failed(StuckError("rank 1: lost the connection"))
    assert read_status(status.path)["reason"] == "rank 1: lost the connection"
    status.failed(DataError("a broken store"))
    assert json.loads(status.path.read_text())["exit_code"] == DataError.exit_code
    for code, state in ((0, "finished"), (75, "preempted")):
        status.ended(9, code, None)
        other.failed(StuckError("rank 1: no progress"))
        assert read_status(status.path)["state"] == state
