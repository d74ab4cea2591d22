"""Whatever becomes of wandb, a run trains the same bits, ends as it would have, and waits moments only."""

from __future__ import annotations

import http.server
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.interrupting import assert_exact
from support.launching import TIMEOUT_SECONDS, Finished
from support.once import once
from support.stopping import (
    Launch,
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
LONG = ("--training.max_steps", "240", "--checkpoint.save_steps", "80")
"""Options of a run that lasts until wandb's service is there."""


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that knows nobody."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    yield "http://127.0.0.1:9"


SERVERS: dict[str, tuple[Callable, str]] = {
    "unreachable": (nobody, KEY),
    "never answers": (silent, KEY),
    "wrong key": (refusing, KEY),
    "malformed key": (nobody, "abc"),
    "no key": (nobody, ""),
}


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
@pytest.mark.parametrize("command", ["python", "accelerate 1"])
@pytest.mark.parametrize("name", [*SERVERS, "folder in the way"])
def test_wandb_that_is_no_help_costs_a_warning(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path, name: str, command: str
):
    """A file stands where its folder would be, which stops root as well; or a server is of no use."""
    folder, home = tmp_path / "run", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    offline = name not in SERVERS
    server, key = SERVERS.get(name, (nobody, KEY))
    if offline:
        (folder / "wandb").write_text("in the way")
    with server() as url:
        wishes = [*options, "--logging.wandb_mode", "offline" if offline else "online"]
        variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": key, "HOME": str(home)}
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


@pytest.fixture(scope="session")
def long_run(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The long run without wandb."""
    return once(
        tmp_path_factory,
        "long-alone",
        lambda folder: begin("python", folder / "run", [*options, *LONG]).finish(),
    )


def service_of(launch: Launch) -> psutil.Process:
    """wandb's service, once it records."""
    wait_until(launch, lambda: any(launch.folder.glob("wandb/offline-run-*/*.wandb")), "wandb's file")
    (core,) = [each for each in launch.members() if "wandb-core" in each.name()]
    return core


def finish_beside(launch: Launch, services: list[psutil.Process]) -> tuple[Finished, float]:
    """Wait for the run itself, and when it ended; a service that stands still would keep its output open."""
    launch.process.wait(TIMEOUT_SECONDS)
    ended = time.time()
    for service in services:
        with suppress(psutil.NoSuchProcess):
            service.kill()
    return launch.finish(), ended


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_service_that_goes_away_in_the_middle(
    options: list[str], long_run: Finished, tmp_path: Path, what: str
):
    wishes = [*options, *LONG, "--logging.wandb_mode", "offline"]
    launch = begin("python", tmp_path / "run", wishes, WANDB_API_KEY=KEY)
    core = service_of(launch)
    at = len((launch.folder / "metrics.jsonl").read_text().splitlines())
    (core.kill if what == "killed" else core.suspend)()
    finished, ended = finish_beside(launch, [core])
    assert at < 200, "the service was there too late"
    assert finished.exit_code == 0
    assert_exact(finished, long_run)
    check_held_up(finished, ended)
    (warning,) = warnings_of(finished)
    assert "left out from here on" in warning
    assert "Traceback" not in finished.output
    nothing_left(launch)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["python", "torchrun", "accelerate"])
@pytest.mark.parametrize("mode", ["unreachable", "service stopped"])
def test_a_stop_signal_meanwhile(
    options: list[str],
    undisturbed: Finished,
    undisturbed_alone: Finished,
    tmp_path: Path,
    command: str,
    mode: str,
):
    """Both at once: the run is saved, and over before a launcher loses its patience."""
    online = mode == "unreachable"
    wishes = [*options, "--logging.wandb_mode", "online" if online else "offline"]
    variables = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
    launch = begin(command, tmp_path / "run", wishes, **variables)
    row_of(5)(launch)
    for worker in launch.workers().values():
        worker.suspend()
    cores = [each for each in launch.members() if "wandb-core" in each.name()]
    if not online:
        for core in cores:
            core.suspend()
    to_launcher(signal.SIGTERM)(launch)
    finished, ended = finish_beside(launch, cores)
    stopped_cleanly(launch, finished, 0, 0)
    check_held_up(finished, ended)
    assert len(warnings_of(finished)) <= 2
    last = begin(command, launch.folder, options).finish()
    no_traceback_of_ours(last.output)
    assert_exact(last, undisturbed_alone if command == "python" else undisturbed)
