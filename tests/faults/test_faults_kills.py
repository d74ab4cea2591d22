"""A run killed in a step, at its start-up or in a save ends as one that nobody killed, and dies whole.

| death | promised |
|---|---|
| SIGKILL of launcher and workers | the next attempt goes on from the newest checkpoint, bit for bit |
| SIGKILL of one worker, in a step or in a save | the launcher ends within 60 s, nothing partial counts |
| SIGKILL of the launcher, at start-up too | no worker lives on for 30 s, the folder is not locked |
| SIGKILL of a worker under `torchrun --max-restarts` | the launcher goes on by itself |
| of `chaos` itself | nothing that it started lives on |

The oracle is `chaos`'s own; that it can fail is tested here with resumes that are broken on purpose.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.broken_scripts import write_scripts
from support.interrupting import assert_exact
from support.launching import (
    ACCELERATE_SCRIPT,
    ROOT,
    TIMEOUT_SECONDS,
    TORCHRUN_SCRIPT,
    Finished,
    environment,
    finish,
    start,
)

from llm_pretrain.__main__ import main
from llm_pretrain.audit.chaos import WORKER_SECONDS
from llm_pretrain.launch.jobs import processes_of
from llm_pretrain.runs.monitor import RunMonitor

SAVES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
SLOW_MACHINE = 3
"""Room in limits that the product promises: these machines have other work."""


def chaos(
    folder: Path, options: list[str], *more: str, asynchronous: bool = False
) -> tuple[int, dict[str, Any]]:
    """Exit code and chaos.json of a call."""
    words = [*options, "--output", str(folder), "--checkpoint.async_save", str(asynchronous).lower()]
    code = main(["chaos", *words, *more])
    return code, json.loads((folder / "chaos.json").read_text())


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize(("kill", "world_size"), [("all", 2), ("rank", 2), ("launcher", 2), ("launcher", 1)])
def test_each_launcher_is_killed_at_each_place(
    kill: str,
    world_size: int,
    asynchronous: bool,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """With an evaluation now and then, so that the best weights are compared too."""
    more = ("--kill", kill, "--world-size", str(world_size))
    evaluated = ("--evaluation.eval_steps", "5", "--evaluation.max_batches", "2")
    code, result = chaos(tmp_path / "chaos", options, *more, *evaluated, asynchronous=asynchronous)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "the killed run ended as the uninterrupted run, bit for bit" in printed
    places = [(each["path"], each["place"].split()[0]) for each in result["attempts"]]
    launchers = ("torchrun", "accelerate")
    assert sorted(places[:-1]) == sorted(product(launchers, ("after", "start-up", "save")))
    assert (tmp_path / "chaos" / "killed" / "weights" / "best").is_dir()


FROM_ZERO = "find_no_checkpoint"
MISTAKES = {
    "without the optimizer": ("restore_no_optimizer", "train/"),
    "without the position in the data": ("restore_no_position", "data/batch_sha256"),
    "from an older checkpoint": ("find_an_older_checkpoint", "step"),
}
"""name: the function of `support.process_faults`, and the key by which it is seen."""


def check_mistake(mistake: str, key: str, options: list[str], folder: Path) -> dict[str, Any]:
    """`chaos` fails on scripts with this mistake, by this key; returns the attempt that shows it."""
    scripts = write_scripts(folder / "scripts", (f"support.process_faults:{mistake}", []))
    with chdir(scripts):
        code, result = chaos(folder / "chaos", options, "--world-size", "1", "--paths", "torchrun")
    assert (code, result["verdict"]) == (1, "violated")
    *sound, last = result["attempts"]
    assert sound
    assert not any(each["violation"] for each in sound)
    assert last["violation"]["key"].startswith(key), last
    return last | {"before": sound[-1]["checkpoint"]}


@pytest.mark.slow
def test_a_start_from_zero_fails_though_it_repeats_the_rows(options: list[str], tmp_path: Path):
    last = check_mistake(FROM_ZERO, "step", options, tmp_path)
    assert last["violation"]["text"].startswith("began at step 1, expected 9")


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_resume_fails_and_is_named(name: str, options: list[str], tmp_path: Path):
    last = check_mistake(*MISTAKES[name], options, tmp_path)
    violation, before = last["violation"], last["before"]
    if name == "without the optimizer":  # the loss of the first step is still the right one
        assert before < violation["step"] <= before + 3
    elif name == "without the position in the data":
        assert violation["step"] == before + 1
    else:
        assert violation["text"].startswith(f"began at step {before - 3}, expected {before + 1}")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "world_size"), [("torchrun", 2), ("accelerate", 2), ("accelerate", 1)])
def test_workers_that_are_still_starting_end_with_their_launcher(
    launcher: str, world_size: int, options: list[str], tmp_path: Path
):
    """They import for seconds before they can ask Linux to be told."""
    folder = tmp_path / "run"
    script = TORCHRUN_SCRIPT if launcher == "torchrun" else ACCELERATE_SCRIPT
    process = start(launcher, world_size, folder, [*options, "--training.max_steps", "5000"])
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(workers_of(process, script)) < world_size:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    killed = time.monotonic()
    left = processes_of(folder)
    try:
        while left and time.monotonic() - killed < WORKER_SECONDS * SLOW_MACHINE:
            time.sleep(0.1)
            left = processes_of(folder)
        assert not left, "they wait for a launcher that is gone"
    finally:
        for each in left:
            each.kill()


def workers_of(process: subprocess.Popen[str], script: Path) -> dict[int, psutil.Process]:
    """Rank to worker of a running launcher."""
    found = {}
    for child in psutil.Process(process.pid).children():
        try:
            if str(script) in child.cmdline():
                found[int(child.environ().get("RANK", "0"))] = child
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, ACCELERATE_SCRIPT], ids=["by hand", "accelerate"])
def test_torchrun_starts_killed_ranks_again_in_place(
    script: Path, asynchronous: bool, undisturbed: Finished, options: list[str], tmp_path: Path
):
    """Either rank, in a step and in a save: four restarts of one launch, and nothing shows in the numbers."""
    folder, strikes = tmp_path / "run", [(1, "step", 6), (0, "step", 10), (1, "save", 12), (0, "save", 16)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "4"]
    process = subprocess.Popen(
        [
            *(*torchrun, "--nproc_per_node", "2", str(script), "--logging.report", "false"),
            *("--run.output_dir", str(folder), *options),
            *(["--checkpoint.async_save", "true"] if asynchronous else []),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for rank, where, step in strikes:
        monitor = RunMonitor(folder)
        wait_until(process, monitor, where, step)
        worker = workers_of(process, script)[rank]
        worker.kill()
        worker.wait(TIMEOUT_SECONDS)
        wait_for_restart(process, script, folder, worker.pid)
    continued = finish(process, folder)
    assert continued.exit_code == 0, continued.output[-6000:]
    assert len(continued.attempts) == len(strikes) + 1
    for before, after in zip(continued.attempts, continued.attempts[1:], strict=False):
        assert after["step"] >= before["step"]
    assert_exact(continued, undisturbed)


def wait_until(process: subprocess.Popen[str], monitor: RunMonitor, where: str, step: int) -> None:
    """The row of `step` is there, or the save of `step` or a later one is under way."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        monitor.update()
        reached = (monitor.step_being_saved() or 0) if where == "save" else (monitor.last_step or 0)
        if reached >= step:
            return
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"{where} of step {step} not reached"
        time.sleep(0.001)


def wait_for_restart(process: subprocess.Popen[str], script: Path, folder: Path, before: int) -> None:
    """torchrun has ended the other worker and started both again."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        pids = [worker.pid for worker in workers_of(process, script).values()]
        if len(pids) == 2 and before not in pids:
            return
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"nothing was started again in {folder}"
        time.sleep(0.05)


@pytest.fixture
def command(options: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A call of `chaos` that runs, in a session of its own."""
    words = ["-m", "llm_pretrain", "chaos", *options, "--output", str(tmp_path / "chaos")]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # tests in a shell's background have SIGINT ignored, and would hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # one thread
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_chaos_itself_leaves_nothing_when_it_is_ended(
    number: int, command: subprocess.Popen[str], tmp_path: Path
):
    folder, deadline = tmp_path / "chaos" / "reference", time.monotonic() + TIMEOUT_SECONDS
    while not (folder / "metrics.jsonl").exists():
        assert command.poll() is None, command.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert processes_of(folder)
    os.kill(command.pid, number)
    output, _ = command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == 128 + number, output
    assert "Traceback" not in output
    assert processes_of(folder) == []
    assert json.loads((tmp_path / "chaos" / "chaos.json").read_text())["verdict"] == "interrupted"
