"""Scripts are started as a user would start them, run concurrently where they fit, and killed completely."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llm_pretrain.errors import OutputError
from llm_pretrain.launch import jobs as _launching
from llm_pretrain.launch.jobs import (
    Job,
    LaunchContext,
    Machine,
    RunningJob,
    exit_on_signals,
    run_until,
)
from llm_pretrain.launch.launcher import exit_code
from llm_pretrain.launch.options import choose_output, create_output


def test_a_folder_with_files_is_rejected_and_default_names_are_numbered(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(OutputError, match="expected a new or empty folder"):
        choose_output(str(tmp_path / "mine"), "name")
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        folder = choose_output(None, "parity-name")
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert names == ["parity-name", "parity-name-2", "parity-name-3"]
    plan: Any = SimpleNamespace(output=tmp_path / "mine" / "file" / "parity")
    with pytest.raises(OutputError, match="file/parity: expected a folder that can be made"):
        create_output(plan, plan, Machine(cores=2, gpus=0))


FAMILY = """
import os, pathlib, subprocess, sys, time
if "--child" not in sys.argv:
    subprocess.Popen([sys.executable, __file__, "--child"], start_new_session=True)
    time.sleep(60)
folder = pathlib.Path(__file__).parent
(folder / "child").write_text(str(os.getpid()))
time.sleep(60)
"""
"""A launcher whose worker has a session of its own, as torchrun's do."""


def job(folder: Path, number: int = 0, world_size: int = 1) -> Job:
    return Job("torchrun", world_size, folder / f"run{number}", folder / f"{number}.log", (), 1)


def context(scripts: Path, *, cores: int = 2, timeout: float = 60.0) -> LaunchContext:
    return LaunchContext(scripts, Machine(0, cores), timeout)


def test_a_kill_reaches_workers_in_other_sessions(tmp_path):
    (tmp_path / "train_pretrain.py").write_text(FAMILY)
    launched = RunningJob(job(tmp_path), context(tmp_path))
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert launched.poll() is None
        time.sleep(0.02)
    child = int((tmp_path / "child").read_text())
    assert os.getsid(child) != os.getsid(launched.process.pid)
    launched.kill()
    assert launched.process.returncode == -9
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_command_ends_its_jobs(number, tmp_path):
    """A closing terminal sends SIGHUP, which does not reach jobs in other sessions."""
    signals_before = signal.signal(number, signal.SIG_DFL)  # nohup has it ignored
    (tmp_path / "train_pretrain.py").write_text(
        "import os, pathlib, signal, time\n"
        f"while not pathlib.Path({str(tmp_path / 'entered')!r}).exists():\n    time.sleep(0.02)\n"
        f"os.kill(os.getppid(), signal.Signals({int(number)}))\ntime.sleep(60)"
    )
    started: list[RunningJob] = []

    def run_for_ever() -> None:
        with exit_on_signals(), RunningJob(job(tmp_path), context(tmp_path)) as launched:
            started.append(launched)
            (tmp_path / "entered").touch()
            time.sleep(30)

    try:
        with pytest.raises(SystemExit) as left:
            run_for_ever()
    finally:
        signal.signal(number, signals_before)
    assert left.value.code == 128 + number
    assert started[0].process.returncode == -9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_no_job(number, monkeypatch, tmp_path):
    """`timeout` sends its signal to a command and at once again to its group; Ctrl-C is pressed twice."""
    (tmp_path / "train_pretrain.py").write_text("import time\ntime.sleep(60)")
    kill_tree, signals = _launching.kill_tree, [number]

    def interrupted(*arguments: Any) -> None:
        while signals:
            os.kill(os.getpid(), signals.pop())
        kill_tree(*arguments)

    monkeypatch.setattr(_launching, "kill_tree", interrupted)
    launched = RunningJob(job(tmp_path), context(tmp_path))
    with pytest.raises((SystemExit, KeyboardInterrupt)), exit_on_signals(), launched:
        sys.exit(143)
    assert launched.process.returncode == -9


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_beyond_its_time_limit_is_killed(tmp_path):
    (tmp_path / "train_pretrain.py").write_text("import time; time.sleep(60)")
    ended = []
    run_until(
        [job(tmp_path)],
        context(tmp_path, timeout=0.3),
        on_end=lambda launched, code: ended.append((launched.timed_out, launched.done, code)),
    )
    assert ended == [(True, False, -9)]


def test_a_job_that_is_done_is_killed_and_the_next_one_starts(tmp_path):
    """`after`: the second waits for the first, though both would fit."""
    (tmp_path / "train_pretrain.py").write_text(
        "import pathlib, sys, time\npathlib.Path(sys.argv[-1]).touch()\ntime.sleep(60)"
    )
    first, second = job(tmp_path, 0), job(tmp_path, 1)

    def done(launched: RunningJob) -> bool:
        return launched.job.folder.exists()

    def may_start(starting: Job) -> None:
        assert starting is first or first.folder.exists()

    ended = run_until([second, first], context(tmp_path), done, after={second: [first]}, on_start=may_start)
    assert [(launched.job, launched.done, code) for launched, code in ended] == [
        (first, True, -9),
        (second, True, -9),
    ]
    assert all(launched.process.returncode == -9 for launched, _ in ended)


def test_an_exception_ends_every_job_and_lets_it_save_where_asked(tmp_path):
    (tmp_path / "train_pretrain.py").write_text(
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[-1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(folder.with_suffix('.saved').touch()))\n"
        "folder.touch()\n"
        "time.sleep(60)"
    )
    jobs, launched = [job(tmp_path, number) for number in range(2)], list[RunningJob]()

    def fails(running: RunningJob) -> bool:
        launched.append(running)
        if all(each.folder.exists() for each in jobs):
            raise ZeroDivisionError
        return False

    for seconds in (0.0, 60.0):
        with pytest.raises(ZeroDivisionError):
            run_until(jobs, context(tmp_path), fails, stop_seconds=seconds)
        assert {each.process.returncode for each in launched} == {0 if seconds else -9}
        assert all(each.folder.with_suffix(".saved").exists() == bool(seconds) for each in jobs)
        launched.clear()
        for each in jobs:
            each.folder.unlink()


def test_jobs_run_concurrently_where_their_processes_fit(tmp_path, monkeypatch):
    started: list[Job] = []
    most = 0

    class Fake:
        running = 0

        def __init__(self, job: Job, *_: Any):
            nonlocal most
            self.job, self.codes = job, iter([None, 0])
            started.append(job)
            Fake.running += job.world_size
            most = max(most, Fake.running)

        def poll(self) -> int | None:
            code = next(self.codes)
            Fake.running -= self.job.world_size * (code == 0)
            return code

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(_launching, "RunningJob", Fake)
    jobs = [job(tmp_path, number, size) for number, size in enumerate((1, 1, 1, 2, 2))]
    run_until(jobs, context(tmp_path), every=0)
    assert len(started) == len(jobs)
    assert most == 2
    assert Fake.running == 0


def test_a_job_inherits_no_variables_of_another_launcher(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "2")
    (tmp_path / "train_pretrain.py").write_text(
        "import os, sys\n"
        "foreign = ('RANK', 'WORLD_SIZE', 'ACCELERATE_MIXED_PRECISION', 'TORCHELASTIC_RUN_ID')\n"
        "assert not set(foreign) & set(os.environ)\n"
        "import llm_pretrain; print(llm_pretrain.__file__, sys.argv[1:])\n"
    )
    (tmp_path / "llm_pretrain").mkdir()
    (tmp_path / "llm_pretrain" / "__init__.py").touch()
    launched = RunningJob(job(tmp_path), context(tmp_path))
    assert launched.process.wait(30) == 0
    log = (tmp_path / "0.log").read_text()
    assert str(tmp_path / "llm_pretrain") in log, "a copy of the package beside the scripts counts"
    assert f"'--run.output_dir', '{tmp_path / 'run0'}'" in log
    assert sys.executable in log


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([(0, 70, 100), (1, -9, 130)], 70),
        ([(1, -9, 130), (0, 71, 100)], 71),
        ([(0, -15, 101), (1, 2, 100)], 2),
        ([(0, 71, 100), (1, -9, 100)], 137),
        ([(0, 71, 101), (1, 76, 101)], 76),
        ([(0, 75, 100), (1, 75, 101)], 75),
    ],
)
def test_the_rank_that_failed_gives_the_exit_code(failures, code, capsys):
    """Not one that lost it, nor one that the launcher ended."""
    assert exit_code(failures) == code
    assert ("error: rank 1 was ended by SIGKILL" in capsys.readouterr().err) == (code == 137)
