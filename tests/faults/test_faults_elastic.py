"""A machine is lost for good, and another comes in its place: two agents of `torchrun --nnodes 1:2`."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.fork_server import free_port
from support.hanging import ranks_of
from support.interrupting import assert_exact, newest_checkpoint, wait_for_step
from support.launching import ACCELERATE_SCRIPT, ROOT, TORCHRUN_SCRIPT, Finished, kill_outright
from support.stopping import Launch, begin, wait_until

LOST_AT, STOPPED_AT = 6, 10
"""Rows at which the second agent is killed, and at which the worker that is left waits for a new one."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torch takes in no agent that comes later."""

AGREEING = ("data/batch_sha256", "train/loss_tokens", "train/tokens", "train/learning_rate")
CLOSE = ("train/loss", "train/aux_loss", "train/z_loss", "train/router_z_loss")


def agent_command(port: int, script: Path = TORCHRUN_SCRIPT, store: str = "") -> list[str]:
    """What every machine starts; the first one keeps the agents' store unless `store` says otherwise."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"),
        *("--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        *("--rdzv-id", "elastic", "--rdzv-conf", f"last_call_timeout=5,keep_alive_interval=1{store}"),
        str(script),
    ]


@contextmanager
def agents(command: list[str], folder: Path, options: list[str]) -> Iterator[Callable[[], Launch]]:
    """A function that starts an agent; whatever is left of them at the end is killed."""
    started: list[Launch] = []

    def start() -> Launch:
        started.append(begin(command, folder, options, **OWN_STORE))
        return started[-1]

    try:
        yield start
    finally:
        for process in (each.process for each in started):
            if process.poll() is None:
                kill_outright(process)
            process.communicate()


def is_told_to_stop(worker: psutil.Process) -> bool:
    """Whether SIGTERM waits for a stopped process."""
    text = Path(f"/proc/{worker.pid}/status").read_text()
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)", text, re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("script", "strategy"),
    [(TORCHRUN_SCRIPT, "fsdp"), (ACCELERATE_SCRIPT, "ddp")],
    ids=["torchrun", "accelerate"],
)
def test_a_run_goes_on_without_a_lost_machine_and_takes_in_another(
    script: Path, strategy: str, options: list[str], undisturbed: Finished, tmp_path: Path
):
    folder, port = tmp_path / "run", free_port()

    def attempts() -> int:
        file = folder / "attempts.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    options = [*options, "--distributed.strategy", strategy]
    with agents(agent_command(port, script), folder, options) as start:
        first = start()
        wait_until(first, lambda: can_connect(port), "its store answers")
        lost = start()
        wait_for_step(first.process, folder, LOST_AT)
        kill_outright(lost.process)
        saved = newest_checkpoint(folder)
        wait_until(first, lambda: attempts() == 2, "it goes on alone")
        wait_for_step(first.process, folder, STOPPED_AT)
        (worker,) = ranks_of(first.process).values()
        worker.suspend()  # or it would be done before another agent has come
        wait_until(first, lambda: worker.status() == psutil.STATUS_STOPPED, "it has stopped")
        second = start()
        wait_until(first, lambda: is_told_to_stop(worker), "it is told of another machine")
        worker.resume()
        runs = [each.finish() for each in (first, second)]
    for run in runs:
        assert run.exit_code == 0, run.output[-6000:]
    check_equal_to(undisturbed, runs[0])
    assert [attempt["world_size"] for attempt in runs[0].attempts] == [2, 1, 2]
    _, alone, together = runs[0].attempts
    assert alone["step"] == saved, "the steps since the checkpoint were lost"
    assert together["step"] >= STOPPED_AT
    assert "stopped by SIGTERM after step" in runs[0].output, "for the other machine, nothing was lost"
    appended = runs[0].raw_steps()
    assert appended.count(together["step"]) == appended.count(together["step"] + 1) == 1


@pytest.mark.slow
def test_a_run_whose_store_is_lost_ends_and_the_same_command_continues_it(
    options: list[str], undisturbed: Finished, tmp_path: Path
):
    folder, ports = tmp_path / "run", [free_port(), free_port()]
    with agents(agent_command(ports[0]), folder, options) as start:
        first = start()
        wait_until(first, lambda: can_connect(ports[0]), "its store answers")
        second = start()
        wait_for_step(second.process, folder, LOST_AT)
        kill_outright(first.process)
        left = second.finish()
    saved = newest_checkpoint(folder)
    assert left.exit_code == 1, "torchrun's"
    assert len(left.attempts) == 1
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 71
    with agents(agent_command(ports[1]), folder, options) as start:
        first = start()
        wait_until(first, lambda: can_connect(ports[1]), "its store answers")
        runs = [each.finish() for each in (start(), first)]
    assert [run.exit_code for run in runs] == [0, 0], runs[0].output[-6000:]
    assert [(each["world_size"], each["step"]) for each in runs[0].attempts] == [(2, 0), (2, saved)]
    assert_exact(runs[0], undisturbed)


@pytest.mark.slow
def test_any_machine_may_be_lost_if_the_store_is_elsewhere(
    options: list[str], undisturbed: Finished, tmp_path: Path
):
    folder, port = tmp_path / "run", free_port()
    with kept_store(port), agents(agent_command(port, store=",is_host=0"), folder, options) as start:
        lost, left = start(), start()
        wait_for_step(left.process, folder, LOST_AT)
        kill_outright(lost.process)
        saved = newest_checkpoint(folder)
        run = left.finish()
    assert run.exit_code == 0, run.output[-6000:]
    assert [(each["world_size"], each["step"]) for each in run.attempts] == [(2, 0), (1, saved)]
    check_equal_to(undisturbed, run)


@contextmanager
def kept_store(port: int) -> Iterator[None]:
    """The command of docs/reliability.md that keeps the store of torchrun's agents."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    (code,) = re.findall(r'^python -c "(.*TCPStore.*)" 29500$', text, re.MULTILINE)
    process = subprocess.Popen([sys.executable, "-c", code, str(port)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def check_equal_to(expected: Finished, run: Finished) -> None:
    """The same samples at every step, and losses as close as another world size gets them."""
    assert set(run.rows) == set(expected.rows)
    for step, row in run.rows.items():
        for key in AGREEING:
            assert row.get(key) == expected.rows[step].get(key), (step, key)
        for key in CLOSE:
            assert math.isclose(row.get(key, 0), expected.rows[step].get(key, 0), rel_tol=1e-5), (step, key)
