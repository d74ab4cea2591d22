"""Two machines with a network that is slow, loses frames, or is cut: two namespaces on this one.

The run's folder is on one file system, as a cluster's is. Needs root; skipped where that is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.hanging import HANG_SECONDS, LAUNCHER_WAITS_SECONDS, SLACK_SECONDS, WATCHED
from support.interrupting import assert_exact, check_continued, newest_checkpoint, wait_for_step
from support.launching import ACCELERATE_SCRIPT, TORCHRUN_SCRIPT, Finished, finish, kill_outright, launch
from support.stopping import begin

from benchmarks.two_machines import ADDRESSES, Network, Quality, two_machines, why_not

PORT = "29512"
GOOD = Quality(delay=0.0005)
BAD = Quality(delay=0.005, jitter=0.003, loss=0.01)
"""A round trip of 10 ms with frames out of order, of which every hundredth is lost."""

CUT_STEP = 9


@pytest.fixture(autouse=True, scope="module")
def needs_a_network() -> None:
    if reason := why_not():
        pytest.skip(reason)


def command(launcher: str, machine: int) -> list[str]:
    """One machine's part of a launch of two with one process each."""
    if launcher == "torchrun":
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(machine)),
            *("--nproc_per_node", "1", "--master_addr", ADDRESSES[0], "--master_port", PORT),
            str(TORCHRUN_SCRIPT),
        ]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2"),
        *("--num_processes", "2", "--machine_rank", str(machine), "--main_process_ip", ADDRESSES[0]),
        *("--main_process_port", PORT, str(ACCELERATE_SCRIPT)),
    ]


@contextmanager
def started(
    network: Network, launcher: str, folder: Path, options: list[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Both machines' launchers; whatever is left of them at the end is killed."""
    processes = [
        begin(
            network.command(machine, command(launcher, machine)),
            folder,
            options,
            GLOO_SOCKET_IFNAME=network.interfaces[machine],
        ).process
        for machine in (0, 1)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                kill_outright(process)
                process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_bad_link_changes_no_bit(launcher: str, options: list[str], undisturbed: Finished, tmp_path: Path):
    folder = tmp_path / "run"
    with two_machines(BAD, seed=1) as network, started(network, launcher, folder, options) as machines:
        runs = [finish(machine, folder) for machine in machines]
        carried = network.go_dead()
    for run in runs:
        assert run.exit_code == 0, run.output[-4000:]
    assert carried > 1000, "gradients came over the link"
    assert_exact(runs[0], undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "how"), [("torchrun", "silent"), ("accelerate", "down")])
def test_a_cut_link_ends_both_machines(
    launcher: str, how: str, options: list[str], undisturbed: Finished, tmp_path: Path
):
    folder, options = tmp_path / "run", [*options, *WATCHED]
    with two_machines(GOOD) as network, started(network, launcher, folder, options) as machines:
        wait_for_step(machines[0], folder, CUT_STEP)
        members = [
            member for each in machines for member in psutil.Process(each.pid).children(recursive=True)
        ]
        if how == "down":
            network.set_down()
        else:
            assert network.go_dead() > 100, "the run's frames came over the link"
        began = time.monotonic()
        runs = [finish(machine, folder) for machine in machines]
        took = time.monotonic() - began
    limit = HANG_SECONDS + LAUNCHER_WAITS_SECONDS + SLACK_SECONDS
    assert took < limit, (
        f"{took:.0f} s until the end of both:\n{runs[0].output[-3000:]}\n{runs[1].output[-3000:]}"
    )
    for rank, run in enumerate(runs):
        assert run.exit_code not in (0, None), run.output[-3000:]
        assert re.search(rf"error: rank {rank}: (no progress for 1\d s|lost the connection)", run.output), (
            run.output
        )
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive
    status = runs[0].status
    assert (status["state"], status["exit_code"]) == ("failed", 71)
    assert newest_checkpoint(folder) >= CUT_STEP // 4 * 4
    check_continued(folder, lambda: launch(launcher, 2, folder, options))
    assert_exact(Finished(0, "", folder), undisturbed)
