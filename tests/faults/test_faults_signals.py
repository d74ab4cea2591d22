"""A run that is asked to stop, by any signal at any moment, saves and continues as if nobody had asked."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

import pytest
from faults.conftest import STEPS
from support.corpora import make_store
from support.interrupting import assert_exact, newest_checkpoint
from support.launching import Finished, assert_same_tensors, checkpoint_tensors
from support.stopping import (
    COMMANDS,
    Launch,
    begin,
    during_imports,
    during_save,
    no_traceback_of_ours,
    nothing_left,
    row_of,
    start_of_run,
    stopped_cleanly,
    to_everything,
    to_group,
    to_launcher,
    to_rank,
    wait_until,
)

WORKERS = ("--data.num_workers", "2")
ASYNC = ("--checkpoint.async_save", "true")


@dataclass(frozen=True)
class Stop:
    """One attempt of a chain: how it is launched, when and how it is stopped, what must be said about it."""

    command: str
    moment: Callable[[Launch], None]
    send: Callable[[Launch], None]
    options: Sequence[str] = ()
    says: Sequence[str] = field(default=())


def run_chain(folder: Path, options: Sequence[str], stops: Sequence[Stop], last: str) -> Finished:
    """Stop one run again and again, each time another way, then let it finish; checks every attempt."""
    rows, step = 0, 0
    for stop in stops:
        launch = begin(stop.command, folder, [*options, *stop.options])
        stop.moment(launch)
        stop.send(launch)
        finished = launch.finish()
        step = stopped_cleanly(launch, finished, rows, step)
        for text in stop.says:
            assert text in finished.output, finished.output[-3000:]
        rows = len(finished.raw_steps())
    launch = begin(last, folder, options)
    finished = launch.finish()
    assert finished.exit_code == 0, finished.output[-4000:]
    assert finished.raw_steps()[rows] == step + 1
    no_traceback_of_ours(finished.output)
    nothing_left(launch)
    return finished


@pytest.mark.slow
def test_a_ctrl_c_ends_a_process_that_waits_for_the_others(options: list[str], tmp_path: Path):
    """In the rendezvous no line of Python runs for minutes: what ends it must not be one."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launch = begin("python", tmp_path / "run", options, **place, MASTER_PORT="29677")
    wait_until(launch, lambda: _listens(launch), "the rendezvous")
    time.sleep(0.5)
    to_launcher(SIGINT)(launch)
    finished = launch.finish()
    assert finished.exit_code == -SIGINT
    assert "Traceback" not in finished.output
    assert not launch.folder.exists()


def _listens(launch: Launch) -> bool:
    return any(
        connection.status == "LISTEN"
        for member in launch.members()
        for connection in member.net_connections()
    )


CHAINS = {
    "torchrun": [
        Stop("torchrun", row_of(3), to_launcher(SIGTERM)),
        Stop("torchrun", row_of(6), to_launcher(SIGINT, SIGINT, gap=0.3)),
        Stop("torchrun usr1", row_of(9), to_launcher(SIGUSR1), WORKERS),
        Stop("torchrun", row_of(12), to_launcher(SIGUSR1)),
        Stop("torchrun", row_of(14), to_rank(1, SIGTERM), says=["stopped by a signal to another rank"]),
        Stop("torchrun", row_of(16), to_rank(0, SIGUSR1), WORKERS),
        Stop("torchrun", row_of(18), to_everything(SIGINT), WORKERS),
        Stop("torchrun", during_save(), to_launcher(SIGTERM, SIGTERM, gap=0.2)),
        Stop("torchrun", start_of_run, to_group(SIGINT)),
        Stop("torchrun", row_of(22), to_launcher(SIGHUP)),
    ],
    "accelerate": [
        Stop("accelerate", row_of(3), to_launcher(SIGTERM)),
        Stop("accelerate", row_of(6), to_group(SIGINT, SIGINT, gap=0.3), WORKERS),
        Stop("accelerate", row_of(9), to_launcher(SIGUSR1)),
        Stop("accelerate", row_of(12), to_rank(1, SIGUSR1)),
        Stop("accelerate", row_of(14), to_everything(SIGTERM), WORKERS),
        Stop("accelerate", during_save(), to_launcher(SIGINT, SIGTERM, gap=0.2)),
        Stop("accelerate", start_of_run, to_group(SIGTERM)),
        Stop("accelerate", row_of(22), to_launcher(SIGHUP)),
    ],
    "alone": [
        Stop("python", row_of(2), to_launcher(SIGUSR1), WORKERS, ["SIGUSR1: the run saves and stops"]),
        Stop("python", row_of(4), to_group(SIGINT), WORKERS, ["stopped by SIGINT after"]),
        Stop("python", row_of(6), to_launcher(SIGINT, SIGINT, gap=1.2)),
        Stop("python", row_of(8), to_group(SIGHUP), WORKERS),
        Stop("torchrun 1", row_of(10), to_launcher(SIGINT)),
        Stop("python", during_save(), to_group(SIGUSR1, SIGTERM, SIGINT, gap=0.05)),
        Stop("accelerate 1", row_of(14), to_launcher(SIGTERM), WORKERS),
        Stop("accelerate 1", row_of(16), to_group(SIGINT), WORKERS),
        Stop("accelerate 1", row_of(18), to_launcher(SIGUSR1)),
        Stop("accelerate 1", row_of(20), to_group(SIGINT, SIGINT, gap=0.1)),
        Stop("python accelerate", row_of(22), to_launcher(SIGUSR1)),
        Stop("python accelerate", start_of_run, to_everything(SIGTERM)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "saves"), [("torchrun", ASYNC), ("accelerate", ()), ("alone", ASYNC)])
def test_stopped_in_every_way_is_the_run_that_nobody_stopped(
    options: list[str],
    undisturbed: Finished,
    undisturbed_alone: Finished,
    tmp_path: Path,
    name: str,
    saves: tuple[str, ...],
):
    last = {"torchrun": "accelerate", "accelerate": "torchrun", "alone": "accelerate 1"}[name]
    run = run_chain(tmp_path / "run", [*options, *saves], CHAINS[name], last)
    assert_exact(run, undisturbed_alone if name == "alone" else undisturbed)


@pytest.mark.slow
def test_the_train_command_ends_as_its_ranks_do(
    options: list[str], undisturbed: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where a step takes longer than torchrun waits for a rank that it has sent a signal."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    stops = (
        ("train", SIGINT),
        ("train accelerate", SIGTERM),
        ("train", SIGHUP),
        ("train accelerate", SIGUSR1),
    )
    folder, rows, step = tmp_path / "run", 0, 0
    for number, (command, sent) in enumerate(stops):
        launch = begin(command, folder, options)
        row_of(4 * number + 3)(launch)
        to_group(sent)(launch)
        finished = launch.finish()
        step = stopped_cleanly(launch, finished, rows, step)
        rows = len(finished.raw_steps())
        assert (finished.exit_code, "Traceback" in finished.output) == (75, False), finished.output[-3000:]
        assert finished.output.splitlines()[-1].startswith(f"stopped by {sent.name} after step {step}; ")
    launch = begin("train", folder, options)
    row_of(19)(launch)
    to_rank(1, signal.SIGKILL)(launch)
    finished = launch.finish()
    assert finished.exit_code == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL\n" in finished.output
    assert "Traceback" not in finished.output
    nothing_left(launch)
    launch = begin("train accelerate", folder, options)
    assert launch.finish().exit_code == 0
    assert_exact(Finished(0, "", folder), undisturbed)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("python", SIGINT),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("torchrun", SIGINT), ("torchrun usr1", SIGUSR1), ("accelerate", SIGTERM))
        ),
    ],
)
def test_a_signal_while_libraries_are_loaded_leaves_no_trace(
    options: list[str], tmp_path: Path, command: str, number: signal.Signals
):
    launch = begin(command, tmp_path / "run", options)
    during_imports(launch)
    (to_group if number == SIGINT else to_launcher)(number)(launch)
    finished = launch.finish()
    assert finished.exit_code == -number if command == "python" else finished.exit_code != 0
    assert finished.output == "" or command != "python"
    no_traceback_of_ours(finished.output)
    assert not launch.folder.exists()
    nothing_left(launch)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "saves"), [("python", ASYNC), ("torchrun", ()), ("accelerate", ASYNC)])
def test_a_signal_during_the_last_save_lets_the_run_finish(
    options: list[str],
    undisturbed: Finished,
    undisturbed_alone: Finished,
    tmp_path: Path,
    command: str,
    saves: tuple[str, ...],
):
    launch = begin(command, tmp_path / "run", [*options, *saves])
    during_save(STEPS)(launch)
    to_everything(SIGTERM)(launch)
    finished = launch.finish()
    assert (finished.status["state"], finished.status["exit_code"]) == ("finished", 0), finished.output[
        -4000:
    ]
    no_traceback_of_ours(finished.output)
    nothing_left(launch)
    assert_exact(finished, undisturbed_alone if command == "python" else undisturbed)
    if command == "python":
        assert finished.exit_code == 0


@pytest.mark.slow
def test_one_ctrl_c_too_many_costs_the_steps_since_the_last_checkpoint(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path
):
    """The third ends the process at once; it is a `kill -9` then, and the run survives that."""
    launch = begin("python", tmp_path / "run", options)
    during_save(8)(launch)
    for _ in range(3):
        launch.process.send_signal(SIGINT)
        launch.process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
        launch.process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
    launch.process.send_signal(signal.SIGCONT)
    finished = launch.finish()
    assert finished.exit_code in (-SIGINT, 75)
    assert newest_checkpoint(launch.folder) >= 4
    last = begin("python", launch.folder, options)
    assert_exact(last.finish(), undisturbed_alone)
    nothing_left(last)


@pytest.mark.slow
def test_nohup_keeps_its_word(options: list[str], undisturbed_alone: Finished, tmp_path: Path):
    launch = begin(("nohup", *COMMANDS["python"]), tmp_path / "run", options)
    row_of(5)(launch)
    to_group(SIGHUP)(launch)
    finished = launch.finish()
    assert finished.exit_code == 0
    assert_exact(finished, undisturbed_alone)


@pytest.mark.slow
def test_a_signal_during_an_evaluation_owes_it_to_the_next_attempt(options: list[str], tmp_path: Path):
    """The evaluations are long here, so that the signal falls into one."""
    store = make_store(tmp_path / "store", documents=6000, masked=True, validation_fraction=0.9).path
    options = [*options, "--data.sources", f"[{{store: {store}}}]", "--evaluation.eval_steps", "6"]
    options += ["--evaluation.max_batches", "200", "--training.max_steps", "8"]
    straight = begin("torchrun", tmp_path / "straight", options).finish()
    assert straight.exit_code == 0, straight.output[-4000:]
    launch = begin("torchrun", tmp_path / "run", options)
    row_of(5)(launch)
    time.sleep(0.6)
    to_launcher(SIGTERM)(launch)
    finished = launch.finish()
    assert stopped_cleanly(launch, finished, 0, 0) == 6
    assert "eval/loss" not in finished.rows[6], "the signal fell into no evaluation"
    again = begin("torchrun", launch.folder, options).finish()
    assert again.exit_code == 0
    merged: dict[int, dict] = {}
    for row in map(json.loads, (launch.folder / "metrics.jsonl").read_text().splitlines()):
        merged.setdefault(row["step"], {}).update(row)
    for step, row in straight.exact_rows().items():
        assert {key: merged[step][key] for key in row} == row
    assert_same_tensors(checkpoint_tensors(again.folder, 8), checkpoint_tensors(straight.folder, 8))
