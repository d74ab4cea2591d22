"""A rank that hangs or is gone: the run ends in time, says where it stood, and continues exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.broken_scripts import write_scripts
from support.fork_server import free_port, python_path
from support.hanging import HANG_SECONDS, WATCHED, disturb, disturb_save, unfinished
from support.interrupting import assert_exact, check_continued, wait_for_step
from support.launching import Finished, environment, finish, kill_outright, launch, start
from support.stopping import begin

STOP_STEP = 9


def options_at(place: str, options: list[str]) -> list[str]:
    """With a short time-out, and with background saves where one is to be met."""
    return [*options, *WATCHED, *(["--checkpoint.async_save", "true"] if place == "background save" else [])]


def doing_at(place: str) -> str:
    """What the ranks that are left may be at, as a pattern."""
    step = r"(step|checking for stop signals after step|waiting for the data of step) \d+"
    save = r"saving step \d+"
    background = rf"({step}|{save}|waiting for the save in the background)"
    return {"step": rf"({step}|{save})", "save": save, "background save": background}[place]


def disturbed(
    launcher: str, rank: int, place: str, folder: Path, options: list[str], action: str
) -> Finished:
    """A run on two processes of which one is stopped or killed."""

    def act(worker: psutil.Process) -> None:
        worker.suspend() if action == "stop" else worker.kill()

    if place != "step":
        return disturb_save(launcher, folder, options, act, rank)
    return disturb(start(launcher, 2, folder, options), folder, STOP_STEP, act, rank)


def check_failed(run: Finished, reason: str) -> str:
    """One line says it, on the terminal and in status.json, which has 71; returns it."""
    status = run.status
    assert (status["state"], status["exit_code"]) == ("failed", 71), (status, run.output[-3000:])
    assert re.match(reason, status["reason"]), status["reason"]
    assert f"error: {status['reason']}\n" in run.output
    return status["reason"]


def check_stacks(run: Finished, rank: int, where: str) -> None:
    """The stacks are in the output and in the file, and lead to where the rank stood."""
    stacks = (run.folder / f"stacks-rank{rank}.txt").read_text()
    assert stacks.startswith(f"rank {rank}: no progress for ")
    assert f"rank {rank}: stacks of all threads:\n" in run.output
    for text in (stacks, run.output):
        assert re.search(rf'File ".*", line \d+ in {where}', text), text[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "rank", "place", "action"),
    [
        ("torchrun", 0, "step", "stop"),
        ("torchrun", 1, "save", "kill"),
        ("torchrun", 0, "background save", "kill"),
        ("accelerate", 1, "step", "kill"),
        ("accelerate", 0, "save", "stop"),
        ("accelerate", 1, "background save", "stop"),
    ],
)
def test_a_rank_that_is_stopped_or_killed_ends_the_run(
    launcher: str,
    rank: int,
    place: str,
    action: str,
    options: list[str],
    undisturbed: Finished,
    tmp_path: Path,
):
    """The other one says so; the same command goes on exactly, and clears away what was not finished."""
    options = options_at(place, options)
    run = disturbed(launcher, rank, place, tmp_path / "run", options, action)
    other, doing = 1 - rank, doing_at(place)
    if action == "stop":
        check_failed(
            run, rf"rank {other}: no progress for 1\d s in {doing} \(distributed.timeout_seconds: 15\)"
        )
        check_stacks(run, other, "pretrain")
        assert not (run.folder / f"stacks-rank{rank}.txt").exists(), "the stopped rank has no say"
    else:
        check_failed(
            run, rf"rank {other}: lost the connection to another rank in {doing} \(.*\): that rank's"
        )
        assert "RuntimeError" not in run.output
        assert not list(run.folder.glob("stacks-*"))
    check_continued(run.folder, lambda: launch(launcher, 2, run.folder, options))
    assert_exact(run, undisturbed)
    assert not unfinished(run.folder)
    assert run.status["state"] == "finished"


BLOCKED = ("support.process_faults:slow_evaluation", [3600.0])
SLOW_SAMPLES = ("support.process_faults:slow_evaluation", [1.0])


@pytest.mark.slow
def test_an_evaluation_that_hangs_ends_a_run_on_one_process(options: list[str], tmp_path: Path):
    script = write_scripts(tmp_path / "scripts", BLOCKED) / "train_pretrain.py"
    wishes = [*options, *WATCHED, "--evaluation.eval_steps", "6"]
    path = python_path(script.parent)
    run = begin((sys.executable, str(script)), tmp_path / "run", wishes, PYTHONPATH=path).finish()
    assert run.exit_code == 71
    check_failed(run, r"rank 0: no progress for 1\d s in the evaluation after step 0 ")
    check_stacks(run, 0, "__call__")


@pytest.mark.slow
def test_a_data_worker_that_is_stopped_ends_a_run_on_one_process(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path
):
    folder = tmp_path / "run"
    # starting a worker is silence too, and takes longest where it is slow anyway
    options = [*options, "--distributed.timeout_seconds", "40", "--data.num_workers", "1"]
    process = start("torchrun", 1, folder, options)
    try:
        wait_for_step(process, folder, STOP_STEP)
        members = psutil.Process(process.pid).children(recursive=True)
        servers = {member.pid for member in members if "forkserver" in " ".join(member.cmdline())}
        workers = [member for member in members if member.ppid() in servers]  # forks of their server
        assert len(workers) == 1
        workers[0].suspend()
        run = finish(process, folder)
    finally:
        if process.poll() is None:
            kill_outright(process)
    assert run.exit_code == 71
    check_failed(run, r"rank 0: no progress for 4\d s in waiting for the data of step \d+ ")
    check_stacks(run, 0, "windows")
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive
    check_continued(folder, lambda: launch("torchrun", 1, folder, options))
    assert_exact(run, undisturbed_alone)


@pytest.mark.slow
def test_a_rank_that_hangs_while_ranks_meet_ends_the_others(options: list[str], tmp_path: Path):
    """It comes to the meeting point and says no more; nothing is written, for no folder is anyone's yet."""
    folder, port = tmp_path / "run", free_port()
    join = f"from torch.distributed import TCPStore; store = TCPStore('127.0.0.1', {port}, 2, False)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"import time; {join}; time.sleep(600)"], env=environment()
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(port)
    try:
        run = begin("python", folder, [*options, *WATCHED], **place).finish()
    finally:
        other.kill()
        other.wait()
    assert run.exit_code == 71
    said = (
        r"\nerror: rank 0: no progress for 3\d s in the rendezvous with the other ranks .* are above; start"
    )
    assert re.search(said, run.output), run.output[-3000:]
    assert not folder.exists()


@pytest.mark.slow
def test_samples_that_take_longer_than_the_time_out_are_no_hang(options: list[str], tmp_path: Path):
    """Every token is a sign of life, on all ranks: none waits in silence for the first one's."""
    sampled = ["--evaluation.sample_prompts", "[a]", "--evaluation.sample_tokens", str(HANG_SECONDS + 5)]
    options = [*options, *WATCHED, "--evaluation.eval_steps", "6", *sampled, "--training.max_steps", "1"]
    options = [*options, "--schedule.warmup_steps", "0"]
    run = launch("torchrun", 2, tmp_path / "run", options, before=[SLOW_SAMPLES])
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]


@pytest.mark.slow
def test_a_process_stopped_for_longer_than_the_time_out_goes_on(
    options: list[str], undisturbed_alone: Finished, tmp_path: Path
):
    """Ctrl-Z and `fg`: nobody hangs where nobody runs."""
    folder = tmp_path / "run"
    process = start("torchrun", 1, folder, [*options, *WATCHED])
    try:
        wait_for_step(process, folder, STOP_STEP)
        worker = psutil.Process(process.pid)
        worker.suspend()
        time.sleep(2 * HANG_SECONDS)
        worker.resume()
        run = finish(process, folder)
    finally:
        if process.poll() is None:
            kill_outright(process)
    assert run.exit_code == 0, run.output[-3000:]
    assert_exact(run, undisturbed_alone)
