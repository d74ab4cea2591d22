"""`llm-pretrain ladder`: whole ladders of tiny models, killed and continued; what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fork_server import python_path
from support.ladders import SMALL_BASE, make_ladder
from support.launching import ROOT
from support.presets import preset
from support.run_folders import make_run

from llm_pretrain.__main__ import main
from llm_pretrain.commands import ladder as ladder_command
from llm_pretrain.config.loading import dump_yaml, to_dict
from llm_pretrain.config.tree import CheckpointConfig, Config, LoggingConfig
from llm_pretrain.errors import EXIT_PREEMPTED, ConfigError, DivergedError
from llm_pretrain.forecast import ladder_training as _ladder_runs
from llm_pretrain.forecast.budget import Speed
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.ladder_runs import ladder_runs, run_config, run_folder, rung_runs, with_store
from llm_pretrain.forecast.ladder_training import (
    Runner,
    failure,
    job_of,
    measure_steps,
    measured_rungs,
    slots_of,
    threads_of,
    train,
)
from llm_pretrain.forecast.measurements import flops_per_second, read_ladder, used_flops
from llm_pretrain.forecast.points import RUNS_FOLDER, Ladder, read_points
from llm_pretrain.launch import jobs
from llm_pretrain.launch.jobs import Job, LaunchContext, Machine, processes_of
from llm_pretrain.runs.rows import read_metrics

BUDGET = ("--budget", "4e9")


def command(store: Path, folder: Path, *options: str) -> list[str]:
    base = folder.parent / "base.yaml"
    base.write_text(SMALL_BASE)
    script = str(ROOT / "tests" / "support" / "small_ladder.py")
    arguments = ["ladder", "--input", str(store), "--config", str(base), "--output", str(folder)]
    return [sys.executable, script, *arguments, *options]


def environment(**more: str) -> dict[str, str]:
    path = python_path(ROOT, ROOT / "tests")
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="module")
def finished(plain_store, tmp_path_factory) -> tuple[Ladder, str]:
    """A ladder that nothing interrupted, and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "ladder"
    done = subprocess.run(
        command(plain_store, folder, *BUDGET), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_ladder(folder), done.stdout


@pytest.mark.slow
def test_a_ladder_has_a_point_for_each_size_and_number_of_tokens(finished):
    ladder, output = finished
    assert len(ladder.rungs) == 3
    assert [len(rung.steps) for rung in ladder.rungs] == [3, 2, 2]
    assert len(ladder.points) == 2 * (3 + 2 + 2)  # decayed, and before each decay
    assert len({(point.hidden_size, point.tokens, point.decayed) for point in ladder.points}) == 14
    for rung in ladder.rungs:
        assert f"  hidden size {rung.hidden_size}, " in output
        decayed = [each for each in ladder.points if each.hidden_size == rung.hidden_size and each.decayed]
        assert [point.loss for point in decayed] == sorted((point.loss for point in decayed), reverse=True)
    lines = output.splitlines()
    assert sum(" used " in line for line in lines) == 4 + 3 + 3
    assert "used 100% (" in output
    assert f"14 points in {ladder.folder / 'points.jsonl'}: " in lines[-1]
    assert 0.9 * 4e9 < float(lines[-1].split(": ")[1].split(" FLOPs")[0]) < 1.1 * 4e9
    assert flops_per_second(ladder)
    assert not list((ladder.folder / RUNS_FOLDER).glob("*/checkpoints"))


@pytest.mark.slow
def test_a_branch_has_the_bits_of_a_run_from_the_start(finished, tmp_path):
    ladder, _ = finished
    decay = ladder_runs(ladder.rungs)[-2]
    config = run_config(ladder, decay)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="auto"))
    file, folder = tmp_path / "whole.yaml", tmp_path / "whole"
    file.write_text(dump_yaml(config))
    options = ["--config", str(file), "--run.output_dir", str(folder)]
    subprocess.run([sys.executable, str(ROOT / "train_pretrain.py"), *options], env=environment(), check=True)
    branch = ladder.folder / RUNS_FOLDER / decay.name
    ends = [read_metrics(each / "metrics.jsonl")[-1] for each in (folder, branch)]
    assert len({(end["step"], end["eval/loss"], end["eval/bits_per_byte"]) for end in ends}) == 1
    (kept,) = branch.glob("weights/*/model.safetensors")
    assert kept.read_bytes() == (folder / kept.relative_to(branch)).read_bytes()


@pytest.mark.slow
def test_a_ladder_that_is_killed_and_stopped_ends_with_the_same_table(finished, plain_store, tmp_path):
    whole, _ = finished
    folder = tmp_path / "ladder"
    for number, (ended, how) in enumerate([(1, signal.SIGKILL), (3, signal.SIGTERM), (4, signal.SIGKILL)]):
        log = tmp_path / f"{number}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command(plain_store, folder, *BUDGET),
                env=environment(LAUNCH_RUNS="1") if number == 0 else environment(),  # which leaves orphans
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        while process.poll() is None and ended_runs(log) < ended:
            time.sleep(0.05)
        time.sleep(0.4 * number)
        process.send_signal(how)
        code = process.wait(120)
        if how == signal.SIGTERM:
            assert (code, log.read_text().splitlines()[-1]) == (
                EXIT_PREEMPTED,
                f"stopped; the same command continues {folder}",
            )
            assert not [run for run in (folder / RUNS_FOLDER).iterdir() if processes_of(run)]
    done = subprocess.run(
        command(plain_store, folder, *BUDGET), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "points.jsonl").read_bytes() == (whole.folder / "points.jsonl").read_bytes()
    used = [
        float(text.splitlines()[-1].split(": ")[1].split(" FLOPs")[0]) for text in (done.stdout, finished[1])
    ]
    assert used[0] == used[1]


def ended_runs(log: Path) -> int:
    """Runs that have ended in this call: each prints what is used."""
    return log.read_text().count(" FLOPs), ")


@pytest.mark.slow
def test_another_ladder_in_the_folder_is_refused(finished, plain_store, changed_store, capsys):
    folder = finished[0].folder
    for store, options, expected in (
        (plain_store, ("--budget", "3e10"), "--budget: expected 4e9, as the ladder in"),
        (
            plain_store,
            (*BUDGET, "--optimizer.learning_rate", "0.5"),
            "optimizer.learning_rate: expected 0.008",
        ),
        (changed_store, BUDGET, "--input: expected the store"),
    ):
        assert main(command(store, folder, *options)[2:]) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert "choose another --output" in error


def test_no_size_continues_the_run_that_the_base_continued(plain_store, tmp_path, monkeypatch):
    bases = list[Config]()

    def new_ladder(_: object, __: Path, base: Config, *___: object) -> None:
        bases.append(base)
        raise KeyboardInterrupt

    monkeypatch.setattr(_ladder_runs, "new_ladder", new_ladder)
    (tmp_path / "base.yaml").write_text(f"checkpoint: {{resume: {tmp_path}}}\n")
    options = (*BUDGET, "--config", str(tmp_path / "base.yaml"))
    assert main(command(plain_store, tmp_path / "ladder", *options)[2:]) == EXIT_PREEMPTED
    assert bases[0].checkpoint.resume == "auto"


def test_a_ladder_of_which_two_sizes_are_left_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "run_all", lambda *_: None)
    ladder = make_ladder(tmp_path / "ladder", sizes=(32, 64, 96))
    (stable, *_), _, _ = (rung_runs(rung) for rung in ladder.rungs)
    make_run(run_folder(ladder, stable), [{"step": 1, "time": 1.0, "eval/loss": None}])
    with pytest.raises(DivergedError, match="expected 3 sizes or more that do not diverge, found 2; lower"):
        train(ladder, LaunchContext(ROOT, Machine(0, 2), math.inf))


def test_every_setting_that_a_ladder_decides_is_refused_as_an_option(tmp_path):
    """All but sizes, which follow the base's, and the warm-up, which is at most the base's."""
    ladder = make_ladder(tmp_path / "ladder")
    base = dataclasses.replace(
        ladder.base,
        checkpoint=CheckpointConfig(save_steps=1, keep_last=2, keep_best=True, resume="never"),
        logging=LoggingConfig(wandb_mode="online", tensorboard=True, report=True, parameters_sha256=True),
    )
    rung, before = ladder.rungs[0], to_dict(base)
    for run in rung_runs(rung)[:2]:
        after = to_dict(run_config(dataclasses.replace(ladder, base=base), run))
        decided = {
            f"{section}.{name}"
            for section in ("training", "schedule", "checkpoint", "evaluation", "logging")
            for name in before[section]
            if before[section][name] != after[section][name]
        }
        assert decided - {"schedule.warmup_steps"} <= ladder_command._CHOSEN


@pytest.mark.parametrize("cores", [1, 2, 7, 16])
def test_runs_side_by_side_use_the_cores_and_no_more(cores):
    machine = Machine(0, cores)
    threads = threads_of(machine)
    slots = slots_of(machine, threads)
    assert slots >= min(cores, 5)
    assert cores - threads < slots * threads <= cores


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """Hidden sizes whose speed is measured: 1e11 FLOP/s in two slots."""
    found = list[int]()

    def measure_speed(_: Config, hidden_size: int, *__: object, slots: int, threads: int) -> Speed:
        found.append(hidden_size)
        return Speed(1e11, 2.0, slots, 30_000)

    monkeypatch.setattr(_ladder_runs, "measure_speed", measure_speed)
    return found


@pytest.mark.parametrize(("seconds", "is_enough"), [(600.0, False), (900.0, True)])
def test_a_time_is_refused_after_one_measurement(plain_store, tmp_path, measured, seconds, is_enough):
    sizes = Sizes(with_store(preset("ladder"), plain_store))
    context = LaunchContext(ROOT, Machine(0, 2), math.inf)
    if is_enough:
        rungs, expected = measured_rungs(seconds, sizes, 3_500_000, tmp_path, context, 1)
        assert expected < seconds
        assert measured[-1] in [rung.hidden_size for rung in rungs]
        return
    with pytest.raises(
        ConfigError, match=r"--budget: expected at least 1\dm.* on this machine, as busy as it is now, found"
    ):
        measured_rungs(seconds, sizes, 3_500_000, tmp_path, context, 1)
    assert measured == [64]


def test_a_speed_far_from_the_guess_is_measured_again_once(plain_store, tmp_path, measured, monkeypatch):
    monkeypatch.setitem(_ladder_runs.GUESSED_FLOPS, "core", 5e12)
    sizes = Sizes(with_store(preset("ladder"), plain_store))
    context = LaunchContext(ROOT, Machine(0, 2), math.inf)
    rungs, _ = measured_rungs(900, sizes, 3_500_000, tmp_path, context, 1)
    assert measured[0] > 100
    assert measured[1:] == [rungs[1].hidden_size]


class EndedJob:
    """A job that has trained as soon as it is started, or diverged."""

    def __init__(self, job: Job, end: int, loss: float | None):
        self.job, folder = job, job.folder
        rows = [{"step": end, "time": 2.0, "eval/loss": loss, "perf/step_seconds": 0.5}]
        make_run(folder, rows)
        (folder / "status.json").write_text(
            json.dumps({"state": "finished" if loss else "diverged", "step": end})
        )

    def poll(self) -> int:
        return 0

    def __enter__(self) -> EndedJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_decays_follow_their_stable_runs_and_none_a_diverged_one(tmp_path, monkeypatch):
    ladder = make_ladder(tmp_path / "ladder", sizes=(32, 64, 96))
    started, printed = list[str](), list[str]()
    runs = ladder_runs(ladder.rungs)

    def launch(job: Job, *_: object) -> EndedJob:
        started.append(job.folder.name)
        (run,) = [each for each in runs if each.name == job.folder.name]
        return EndedJob(job, run.end, None if run.hidden_size == 96 else 3.0)

    monkeypatch.setattr(jobs, "RunningJob", launch)
    monkeypatch.setattr(_ladder_runs, "say", printed.append)
    runner = Runner(ladder, LaunchContext(ROOT, Machine(0, 2), math.inf))
    runner.run_all()
    assert sorted(started) == sorted(run.name for run in runs if not (run.begin and run.hidden_size == 96))
    for run in runs:
        before = [each.name for each in runs if run.follows(each) and run.name in started]
        assert all(started.index(each) < started.index(run.name) for each in before)
    overview, *ended = printed
    assert overview.startswith(f"{len(runs)} of {len(runs)} runs to train")
    assert len(ended) == 9
    assert all(line.endswith(" left") for line in ended)
    assert sum("DIVERGED" in line for line in printed) == 1
    diverged = next(run for run in runs if run.hidden_size == 96)
    (runner._folder(diverged) / "checkpoints").mkdir()
    runner.run_all()
    assert len(started) == 9, "nothing runs twice"
    assert not (runner._folder(diverged) / "checkpoints").exists(), "no decay will follow it"
    trained = [run for run in runs if run.name in started]
    flops = sum(runner.sizes.of(run.hidden_size).step_flops * run.trained_steps for run in trained)
    assert used_flops(ladder) == pytest.approx(flops)
    assert len(read_points(ladder.folder)) == 2 * (3 + 1)


@pytest.mark.parametrize(("code", "exit_code"), [(75, 75), (1, 1), (-9, 71)])
def test_a_run_that_is_killed_is_a_lost_process(tmp_path, code, exit_code):
    job = EndedJob(job_of(tmp_path / "run", 1), 1, None)
    assert failure(job, "run", code).exit_code == exit_code  # type: ignore[arg-type]  # what is used of it


def test_a_measurement_ends_the_processes_of_its_own_folder_alone(tmp_path, monkeypatch):
    """Not of a ladder with the same name that was started elsewhere: its command has no relative folder."""
    folders = list[Path]()
    monkeypatch.setattr(_ladder_runs, "end_orphans", folders.extend)
    monkeypatch.setattr(jobs, "RunningJob", lambda job, *_: folders.append(job.folder) or 1 / 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        measure_steps([preset("ladder")], Path("measuring"), LaunchContext(ROOT, Machine(0, 2), math.inf))
    assert folders == [tmp_path / "measuring" / "0"] * 2
