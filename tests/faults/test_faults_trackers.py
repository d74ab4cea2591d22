"""Whatever becomes of wandb, a run trains the same bits, ends as it would have, and waits moments only."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.interrupting import assert_exact
from support.launching import TIMEOUT_SECONDS, Finished
from support.stopping import (
    begin,
    no_traceback_of_ours,
    nothing_left,
    row_of,
    stopped_cleanly,
    to_launcher,
    wait_until,
)

KEY = "0123456789abcdef" * 2 + "01234567"
HELD_UP_SECONDS = 30.0
"""What the last row's time and the end of the run may lie apart by, for wandb alone."""
SLACK_SECONDS = 20.0
"""For the last save and a slow machine."""


def warnings_of(finished: Finished) -> list[str]:
    return [line for line in finished.output.splitlines() if "wandb" in line and line.startswith("warning")]


def check_held_up(finished: Finished, ended: float) -> None:
    last = max(row["time"] for row in finished.rows.values())
    assert ended - last < HELD_UP_SECONDS + SLACK_SECONDS


def rows_offline(folder: Path) -> int:
    """Rows of metrics in the files that wandb wrote."""
    files = folder.glob("wandb/offline-run-*/*.wandb")
    return sum(path.read_bytes().count(b"train/loss_tokens") for path in files)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "offline"), [("python", False), ("accelerate 1", True)])
def test_wandb_that_is_no_help_costs_a_warning(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path, command: str, offline: bool
):
    """A server that never answers; offline, a file where its folder would be, which stops root as well."""
    folder, home = tmp_path / "run", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    if offline:
        (folder / "wandb").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        wishes = [*options, "--logging.wandb_mode", "offline" if offline else "online"]
        variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "HOME": str(home)}
        launch = begin(command, folder, [*wishes, "--logging.tensorboard", str(offline).lower()], **variables)
        finished = launch.finish()
        ended = time.time()
    assert finished.exit_code == 0, finished.output[-4000:]
    assert "Traceback" not in finished.output, finished.output[-4000:]
    nothing_left(launch)
    assert_exact(finished, undisturbed_alone)
    check_held_up(finished, ended)
    assert KEY not in finished.output
    if offline:
        assert len(warnings_of(finished)) <= 1
    else:
        (warning,) = warnings_of(finished)
        assert "recorded offline" in warning
        assert rows_offline(folder) >= len(undisturbed_alone.rows)


@pytest.mark.slow
def test_a_service_that_is_killed_costs_a_warning(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path
):
    wishes = [*options, "--logging.wandb_mode", "offline"]
    launch = begin("python", tmp_path / "run", wishes, WANDB_API_KEY=KEY)
    wait_until(launch, lambda: any(launch.folder.glob("wandb/offline-run-*/*.wandb")), "wandb's file")
    (service,) = [each for each in launch.members() if "wandb-core" in each.name()]
    service.kill()
    finished = launch.finish()
    assert finished.exit_code == 0
    (warning,) = warnings_of(finished)
    assert "left out from here on" in warning
    assert "Traceback" not in finished.output
    assert_exact(finished, undisturbed_alone)
    nothing_left(launch)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["torchrun", "accelerate"])
def test_a_stop_signal_while_the_service_stands_still(
    options: list[str], undisturbed: Finished, tmp_path: Path, command: str
):
    """The run is saved, and over before a launcher loses its patience."""
    wishes = [*options, "--logging.wandb_mode", "offline"]
    launch = begin(command, tmp_path / "run", wishes, WANDB_API_KEY=KEY)
    row_of(5)(launch)
    for worker in launch.workers().values():
        worker.suspend()
    services = [each for each in launch.members() if "wandb-core" in each.name()]
    for service in services:
        service.suspend()
    to_launcher(signal.SIGTERM)(launch)
    launch.process.wait(TIMEOUT_SECONDS)
    ended = time.time()
    for service in services:  # it would keep the run's output open
        with suppress(psutil.NoSuchProcess):
            service.kill()
    finished = launch.finish()
    stopped_cleanly(launch, finished, 0, 0)
    check_held_up(finished, ended)
    assert len(warnings_of(finished)) <= 2
    last = begin(command, launch.folder, options).finish()
    no_traceback_of_ours(last.output)
    assert_exact(last, undisturbed)
