"""`parity` refuses what cannot work before anything is started, and starts and kills what it starts whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.commands._launching import launching, machine, options
from llm_pretrain.commands._launching.accelerate_files import settings_for
from llm_pretrain.commands._launching.launching import (
    Job,
    Launched,
    Place,
    ending_on_sigterm,
    killed_at_the_end,
    run_side_by_side,
)
from llm_pretrain.commands._launching.machine import Machine
from llm_pretrain.commands._launching.records import row_steps
from llm_pretrain.commands._parity.interruption import choose_save_steps, parse_interruptions
from llm_pretrain.errors import ConfigError, OutputError

TINY = str(ROOT / "configs" / "tiny-dense.yaml")


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(launching.subprocess, "Popen", started)
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(gpus=0, cores=2))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--paths", "torchrun,slurm"], 2, "--paths: expected some of torchrun, accelerate, t"),
        (["--paths", "trainer"], 2, "--paths: expected torchrun or accelerate among them"),
        (["--steps", "0"], 2, "--steps: expected 1 or more, found 0"),
        (["--world-size", "0"], 2, "--world-size: expected whole numbers from 1 on"),
        (["--world_size", "1,x"], 2, "found 'x'"),
        (["--world-size", "64"], 2, "--world-size: expected at most 2, the cores of this machine, found 64"),
        (["--accumulation", "5"], 2, "training.global_batch_size 24, found 1 * 5 = 5"),
        (["--precision", "fp8"], 2, "--precision: expected some of fp32, bf16, fp16, found 'fp8'"),
        (["--training.micro_batch_size", "5"], 2, "training.global_batch_size"),
        (["--training.micro_batch_size", "24"], 2, "found 2 * 24 = 48; 2, 3, 4, 6 or 12 would"),
        (["--training.max_steps", "0"], 2, "training.max_steps: expected more than 0"),
        (["--scripts", "/nowhere"], 2, "--scripts /nowhere: expected train_pretrain.py, train_pretr"),
        (["--paths", "torchrun", "--world-size", "1"], 2, "expected two runs of one precision or more"),
        (["--paths", "torchrun", "--world-size", "1", "--precision", "fp32,bf16"], 2, "to compare, found"),
        (["--world-size", "1", "--precision", "fp16"], 2, "silently train in fp32"),
        (["--timeout", "0"], 2, "--timeout: expected more than 0 seconds"),
        (["--data.sources", "[{store: /nowhere}]"], 65, "/nowhere"),
        (["--interrupt", "torchrun@2"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "trainer@1:5"], 2, "--interrupt: expected PATH@PROCESSES:STEP"),
        (["--interrupt", "torchrun@1:9,torchrun@1:5"], 2, "expected ascending steps from 2 on"),
        (["--interrupt", "torchrun@9:5"], 2, "found 9 * 4 = 36"),
        (["--interrupt", "torchrun@6:5"], 2, "expected at most 2, the cores"),
        (["--interrupt", "torchrun@1:17", "--steps", "17"], 2, "--steps: expected more than 17"),
        (["--interrupt", "accelerate@1:5", "--precision", "fp16"], 2, "silently train in fp32"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_before_anything_is_launched(
    words: list[str],
    code: int,
    expected: str,
    plain_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    output = tmp_path / "output"
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, "--output", str(output), *sources, *words]) == code
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == (2 if "--accumulation" in words else 1)
    assert "Traceback" not in printed.err
    assert not output.exists()


@pytest.mark.usefixtures("nothing_starts")
def test_the_trainer_path_s_script_may_be_missing(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("train_pretrain.py", "train_pretrain_accelerate.py"):
        (tmp_path / name).touch()
    words = ["--paths", "torchrun,trainer", "--scripts", str(tmp_path), "--output", str(tmp_path / "out")]
    sources = ["--data.sources", f"[{{store: {plain_store}}}]"]
    assert main(["parity", "--config", TINY, *sources, *words]) == 2
    assert "expected examples/train_pretrain_trainer.py there, found none" in capsys.readouterr().err


def test_a_folder_with_files_is_never_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(OutputError, match="expected a new or empty folder"):
        options.choose_output(str(tmp_path / "mine"), "name")
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        folder = options.choose_output(None, "parity-name")
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert names == ["parity-name", "parity-name-2", "parity-name-3"]


def test_interruptions_are_read_and_come_after_a_checkpoint():
    first, second = parse_interruptions("torchrun@2:17, accelerate@1:31")
    assert (first.path, first.world_size, first.step) == ("torchrun", 2, 17)
    assert (second.path, second.world_size, second.step) == ("accelerate", 1, 31)
    assert [choose_save_steps(configured, 17) for configured in (10, 500, 0, 17)] == [10, 5, 5, 5]
    assert choose_save_steps(500, 2) == 1
    with pytest.raises(ConfigError, match="from 2 on"):
        parse_interruptions("torchrun@1:1")


def test_a_torn_row_is_not_counted(tmp_path: Path):
    assert row_steps(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert row_steps(tmp_path) == [1, 2]


def test_accelerate_is_told_what_really_starts_as_many_processes(tmp_path: Path):
    kinds = {
        (size, gpu): settings_for("ddp", None, size, on_gpu=gpu, scripts=tmp_path)
        for size in (1, 2)
        for gpu in (False, True)
    }
    for (size, gpu), settings in kinds.items():
        assert settings["num_processes"] == size
        assert settings["use_cpu"] is not gpu
        assert settings["distributed_type"] == ("MULTI_GPU" if size > 1 else "NO")
    with pytest.raises(ConfigError, match=r"fsdp2\.yaml"):
        settings_for("fsdp", None, 2, on_gpu=False, scripts=tmp_path)
    (tmp_path / "configs" / "accelerate").mkdir(parents=True)
    own = {"distributed_type": "FSDP", "num_processes": 2}
    (tmp_path / "configs" / "accelerate" / "fsdp2.yaml").write_text(yaml.safe_dump(own))
    assert settings_for("fsdp", None, 4, on_gpu=False, scripts=tmp_path) == own | {"num_processes": 4}


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


def place(scripts: Path, *, cores: int = 2, timeout: float = 60.0) -> Place:
    return Place(scripts, Machine(0, cores), {}, timeout)


def test_a_kill_ends_the_launcher_and_workers_in_sessions_of_their_own(tmp_path: Path):
    (tmp_path / "train_pretrain.py").write_text(FAMILY)
    launched = Launched(job(tmp_path), place(tmp_path))
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert launched.exit_code is None
        time.sleep(0.02)
    child = int((tmp_path / "child").read_text())
    assert os.getsid(child) != os.getsid(launched.process.pid)
    launched.kill()
    assert launched.process.returncode == -9
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_parity_ends_what_it_started(number: int, tmp_path: Path):
    """A terminal that closes sends SIGHUP, and the launches are in sessions of their own."""
    signals_before = signal.signal(number, signal.SIG_DFL)  # nohup has it ignored
    (tmp_path / "train_pretrain.py").write_text(
        f"import os, signal, time\nos.kill(os.getppid(), signal.Signals({int(number)}))\ntime.sleep(60)"
    )
    started: list[Launched] = []

    def run_for_ever() -> None:
        with ending_on_sigterm(), killed_at_the_end(Launched(job(tmp_path), place(tmp_path))) as launched:
            started.append(launched)
            time.sleep(30)

    try:
        with pytest.raises(SystemExit) as left:
            run_for_ever()
    finally:
        signal.signal(number, signals_before)
    assert left.value.code == 128 + number
    assert started[0].process.returncode == -9


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_on_sigterm():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_launch_that_takes_too_long_is_killed(tmp_path: Path):
    (tmp_path / "train_pretrain.py").write_text("import time; time.sleep(60)")
    ended = []
    run_side_by_side(
        [job(tmp_path)], place(tmp_path, timeout=0.3), on_start=lambda _: None,
        on_end=lambda launched, code: ended.append((launched.timed_out, code)),
    )  # fmt: skip
    assert ended == [(True, -9)]


def test_launches_lie_side_by_side_only_where_their_processes_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Never more processes than cores, and every job runs."""
    started: list[Job] = []
    most = 0

    class Fake:
        running = 0

        def __init__(self, job: Job, *_: Any):
            nonlocal most
            self.job, self.polls = job, 0
            started.append(job)
            Fake.running += job.world_size
            most = max(most, Fake.running)

        @property
        def exit_code(self) -> int | None:
            self.polls += 1
            if self.polls < 2:
                return None
            Fake.running -= self.job.world_size
            return 0

    monkeypatch.setattr(launching, "Launched", Fake)
    monkeypatch.setattr(launching, "POLL_SECONDS", 0)
    jobs = [job(tmp_path, number, size) for number, size in enumerate((1, 1, 1, 2, 2))]
    run_side_by_side(jobs, place(tmp_path), on_start=lambda _: None, on_end=lambda *_: None)
    assert len(started) == len(jobs)
    assert most == 2
    assert Fake.running == 0


def test_the_scripts_see_no_variables_of_another_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    launched = Launched(job(tmp_path), place(tmp_path))
    assert launched.process.wait(30) == 0
    log = (tmp_path / "0.log").read_text()
    assert str(tmp_path / "llm_pretrain") in log, "a copy of the package beside the scripts counts"
    assert f"'--run.output_dir', '{tmp_path / 'run0'}'" in log
    assert sys.executable in log
