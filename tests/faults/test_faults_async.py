"""Saves in the background: the same numbers, the same files, and nothing lost when the run ends meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import launching
from support.interrupting import assert_exact, check_continued, newest_checkpoint
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, finish, launch, start

ASYNC = ["--checkpoint.async_save", "true"]
pytestmark = pytest.mark.slow
LAUNCHERS = pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
HELD_SECONDS = 6
"""A save is held this long before its manifest: many steps of this run."""

SLOW_SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import {module} as script
from llm_pretrain.checkpoints import store

write_manifest = store.write_manifest

def held(folder, content):
    if content.run.step == {step}:
        Path({marker!r}).touch()
        time.sleep({seconds})
    write_manifest(folder, content)

store.write_manifest = held
if __name__ == "__main__":
    script.exit_process(script.main())
"""


@contextmanager
def held_save(launcher: str, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Launches within write step `step` slowly; gives the file that appears when they do."""
    name = {"torchrun": "TORCHRUN_SCRIPT", "accelerate": "ACCELERATE_SCRIPT"}[launcher]
    script, marker = folder / f"held-{step}.py", folder / f"writing-{step}"
    module = getattr(launching, name).stem
    script.write_text(
        SLOW_SCRIPT.format(root=str(ROOT), module=module, step=step, marker=str(marker), seconds=HELD_SECONDS)
    )
    with monkeypatch.context() as patch:
        patch.setattr(launching, name, script)
        yield marker


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + launching.TIMEOUT_SECONDS
    while not file.exists():
        assert process.poll() is None, f"ended before {file.name}:\n{process.communicate()[0][-4000:]}"
        assert time.monotonic() < deadline, f"{file.name} not reached"
        time.sleep(0.01)


def weights(folder: Path, step: int) -> bytes:
    return (folder / "weights" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def assert_same_saves(run: Finished, other: Finished, steps: tuple[int, ...]) -> None:
    """Rows, tensors of checkpoints, and the bytes of the weights."""
    assert_exact(run, other)
    for step in steps:
        assert_same_tensors(checkpoint_tensors(run.folder, step), checkpoint_tensors(other.folder, step))
        assert weights(run.folder, step) == weights(other.folder, step)
    assert run.status["state"] == "finished"
    assert run.status["checkpoint"].endswith(f"step-{steps[-1]:08d}")


@LAUNCHERS
def test_background_saves_change_no_bit(launcher, options, undisturbed: Finished, tmp_path):
    run = launch(launcher, 2, tmp_path / "run", [*options, *ASYNC])
    assert_same_saves(run, undisturbed, (20, 24))


@LAUNCHERS
def test_killed_then_stopped_during_a_background_save(
    launcher, options, undisturbed: Finished, tmp_path, monkeypatch
):
    """kill -9 tears a temporary folder only; SIGTERM waits, commits, and saves what is newer."""
    folder, command = tmp_path / "run", [*options, *ASYNC]
    with held_save(launcher, tmp_path, 8, monkeypatch) as marker:
        process = start(launcher, 2, folder, command)
        wait_for(marker, process)
        launching.kill_outright(process)
        finish(process, folder)
    assert newest_checkpoint(folder) == 4
    assert list((folder / "checkpoints").glob(".step-00000008.tmp-*"))

    def stop_during_the_save_of_step_12() -> None:
        with held_save(launcher, tmp_path, 12, monkeypatch) as marker:
            process = start(launcher, 2, folder, command)
            wait_for(marker, process)
            os.killpg(process.pid, signal.SIGTERM)
            finish(process, folder)

    assert check_continued(folder, stop_during_the_save_of_step_12) == 4
    stopped = Finished(0, "", folder)
    assert stopped.status["state"] == "preempted", stopped.status
    last = max(stopped.rows)
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in sorted({12, last} if last > 12 else {8, 12})]
    assert check_continued(folder, lambda: launch(launcher, 2, folder, command)) == last
    assert_same_saves(Finished(0, "", folder), undisturbed, (20, 24))


@LAUNCHERS
def test_sharded_background_saves_change_no_bit(launcher, options, tmp_path):
    """FSDP: each rank writes its parts; the weights are written from the committed checkpoint."""
    file = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    sharded = [*options, "--distributed.strategy", "fsdp", "--training.max_steps", "12"]
    runs = [
        launch(launcher, 2, tmp_path / name, [*sharded, *more], accelerate_file=file)
        for name, more in (("sync", []), ("async", ASYNC))
    ]
    assert_same_saves(runs[1], runs[0], (8, 12))


def test_background_saves_of_zero_change_no_bit(options, tmp_path):
    pytest.importorskip("deepspeed")
    file = ROOT / "configs" / "accelerate" / "zero2.yaml"
    zero = [*options, "--distributed.strategy", "deepspeed", "--distributed.zero_stage", "2"]
    zero += ["--training.max_steps", "12", "--model.router_bias_update_rate", "0"]
    runs = [
        launch("accelerate", 2, tmp_path / name, [*zero, *more], accelerate_file=file)
        for name, more in (("sync", []), ("async", ASYNC))
    ]
    assert_same_saves(runs[1], runs[0], (8, 12))
