"""Stops a launched run where a test wants it, and looks at where it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.launching import (
    TIMEOUT_SECONDS,
    Finished,
    ForkedLaunch,
    assert_same_tensors,
    checkpoint_tensors,
    finish,
    kill_outright,
    start,
)


def kill_at(
    launcher: str, folder: Path, options: list[str], step: int, number: signal.Signals, *, real: bool = False
) -> Finished:
    """Start on two processes and send a signal when the row of `step` is written.

    A `real` launcher gets it, and hands it on; SIGKILL goes to the launcher and all ranks. Forked ranks get
    it themselves.
    """
    if not real:
        run = ForkedLaunch(launcher, 2, folder, options)
        wait_for_step(run, folder, step)
        run.ranks.send(number)
        return run.finish()
    process = start(launcher, 2, folder, options)
    wait_for_step(process, folder, step)
    if number == signal.SIGKILL:
        kill_outright(process)
    else:
        os.killpg(process.pid, number)
    return finish(process, folder)


def wait_for_step(run: subprocess.Popen[str] | ForkedLaunch, folder: Path, step: int) -> None:
    """Return as soon as the row of `step` is written."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if run.poll() is not None:
            output = run.output if isinstance(run, ForkedLaunch) else run.communicate()[0]
            raise AssertionError(f"ended before step {step}:\n{output[-4000:]}")
        assert time.monotonic() < deadline, f"step {step} not reached"
        time.sleep(0.01)


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest committed checkpoint of a run."""
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def check_continued(folder: Path, continue_run: Callable[[], object]) -> int:
    """Continue a killed run; its first row must follow the newest committed checkpoint. Returns that step."""
    before, rows_before = newest_checkpoint(folder), len(Finished(0, "", folder).raw_steps())
    continue_run()
    new_rows = Finished(0, "", folder).raw_steps()[rows_before:]
    assert before > 0
    assert new_rows[0] == before + 1, f"expected to begin at step {before + 1}, began at {new_rows[0]}"
    return before


def assert_exact(run: Finished, undisturbed: Finished) -> None:
    """Rows, merged by step, and the last checkpoint's tensors are the undisturbed run's, bit for bit."""
    assert run.exact_rows() == undisturbed.exact_rows()
    last = max(undisturbed.rows)
    assert newest_checkpoint(run.folder) == last
    assert_same_tensors(checkpoint_tensors(run.folder, last), checkpoint_tensors(undisturbed.folder, last))
