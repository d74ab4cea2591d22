"""A run that is killed continues exactly, by either launcher, and never silently from the start."""

from __future__ import annotations

import math
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest
from support.interrupting import check_continued, kill_at, newest_checkpoint, wait_for_step
from support.launching import (
    ACCELERATE_SCRIPT,
    TORCHRUN_SCRIPT,
    Finished,
    assert_same_tensors,
    checkpoint_tensors,
    finish,
    launch,
    run_options,
    start_command,
)
from support.stepping import relative_error

STEPS, SAVE_STEPS, KILL_STEP = 8, 2, 3


@pytest.fixture(scope="module")
def options(masked_store: Path) -> list[str]:
    return run_options(
        "tiny-moe",
        masked_store,
        f"training.max_steps={STEPS} checkpoint.save_steps={SAVE_STEPS} "
        "model.hidden_dropout=0.1 model.router_bias_update_rate=1e-3 evaluation.eval_steps=4 "
        "logging.logging_steps=1",
    )


@pytest.fixture(scope="module")
def reference(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that nobody stopped."""
    return launch("torchrun", 2, tmp_path_factory.mktemp("reference") / "run", options)


@pytest.fixture(scope="module")
def killed(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that `kill -9` of both ranks of a launcher leaves behind."""

    @cache
    def left_by(launcher: str) -> Path:
        folder = tmp_path_factory.mktemp(f"killed-{launcher}") / "run"
        finished = kill_at(launcher, folder, options, KILL_STEP, signal.SIGKILL)
        assert finished.exit_code == 1
        assert newest_checkpoint(folder) % SAVE_STEPS == 0, "it had the time to save"
        return folder

    return left_by


@pytest.mark.parametrize(
    ("killed_by", "continued_by"),
    [("torchrun", "accelerate"), pytest.param("accelerate", "torchrun", marks=pytest.mark.slow)],
)
def test_continues_on_the_other_launcher_bit_for_bit(
    reference: Finished,
    killed: Callable[[str], Path],
    options: list[str],
    tmp_path: Path,
    killed_by: str,
    continued_by: str,
):
    folder = tmp_path / "run"
    shutil.copytree(killed(killed_by), folder, symlinks=True)
    check_continued(folder, lambda: launch(continued_by, 2, folder, options))
    continued = Finished(0, "", folder)
    assert continued.exact_rows() == reference.exact_rows()
    assert_same_tensors(checkpoint_tensors(folder, STEPS), checkpoint_tensors(reference.folder, STEPS))
    assert continued.status["launcher"] == continued_by


def test_continues_on_another_number_of_processes(
    reference: Finished, killed: Callable[[str], Path], options: list[str], tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.copytree(killed("torchrun"), folder, symlinks=True)
    start_step = check_continued(folder, lambda: launch("torchrun", 1, folder, options))
    rows, expected = Finished(0, "", folder).rows, reference.rows
    for step in range(start_step + 1, STEPS + 1):
        assert rows[step]["data/batch_sha256"] == expected[step]["data/batch_sha256"]
        assert math.isclose(rows[step]["train/loss"], expected[step]["train/loss"], rel_tol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"), [("torchrun", signal.SIGTERM), ("accelerate", signal.SIGINT)]
)
def test_a_signal_saves_and_leaves_with_75(
    reference: Finished, options: list[str], tmp_path: Path, launcher: str, number: signal.Signals
):
    folder = tmp_path / "run"
    stopped = kill_at(launcher, folder, options, KILL_STEP, number, real=True)
    assert stopped.exit_code != 0
    status = stopped.status
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert status["step"] >= KILL_STEP
    assert newest_checkpoint(folder) == status["step"]
    launch(launcher, 2, folder, options)
    assert Finished(0, "", folder).exact_rows() == reference.exact_rows()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "victim"), [(TORCHRUN_SCRIPT, 1), (ACCELERATE_SCRIPT, 0)])
def test_torchrun_starts_a_killed_rank_again_in_place(
    reference: Finished, options: list[str], tmp_path: Path, script: Path, victim: int
):
    """`kill -9` of one rank: the launcher goes on by itself, and nothing shows in the numbers."""
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    process = start_command([*torchrun, "--nproc_per_node", "2", str(script)], folder, options)
    wait_for_step(process, folder, KILL_STEP)
    workers = psutil.Process(process.pid).children()
    next(worker for worker in workers if worker.environ().get("RANK") == str(victim)).kill()
    continued = finish(process, folder)
    assert continued.exit_code == 0, continued.output[-6000:]
    assert len(continued.attempts) == 2
    assert continued.status["state"] == "finished"
    assert continued.exact_rows() == reference.exact_rows()
    assert_same_tensors(checkpoint_tensors(folder, STEPS), checkpoint_tensors(reference.folder, STEPS))


@pytest.mark.slow
def test_more_and_fewer_processes_end_with_nearly_the_same_parameters(masked_store: Path, tmp_path: Path):
    """From two to four and to one, 20 steps on: the same samples, parameters within rounding."""
    start, end, shared = 10, 30, tmp_path / "two"
    options = run_options(
        "tiny-dense",
        masked_store,
        f"training.micro_batch_size=2 training.global_batch_size=16 training.max_steps={end} "
        f"checkpoint.save_steps={start} checkpoint.keep_last=9 evaluation.eval_steps=0 "
        "model.hidden_dropout=0.1 logging.logging_steps=1",
    )
    straight = launch("torchrun", 2, shared, options)
    expected = checkpoint_tensors(shared, end)
    for world_size in (4, 1):
        folder = tmp_path / str(world_size)
        shutil.copytree(shared, folder, ignore=shutil.ignore_patterns("step-0000002*", "step-0000003*"))
        (folder / "metrics.jsonl").unlink()
        rows = launch("torchrun", world_size, folder, options).rows
        assert sorted(rows) == list(range(start + 1, end + 1))
        for step, row in rows.items():
            assert row["data/batch_sha256"] == straight.rows[step]["data/batch_sha256"]
        found = checkpoint_tensors(folder, end)
        names = [name for name in expected if not name.startswith("optimizer.")]
        left, right = ({name: each[name] for name in names} for each in (found, expected))
        assert 0 < relative_error(left, right) < 1e-6
