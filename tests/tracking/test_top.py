"""`top`: what its table shows of runs at any time, in any terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.run_folders import START, attempt_row, make_run, training_row

from llm_pretrain.runs.record import this_host
from llm_pretrain.tracking import top
from llm_pretrain.tracking.top import watch_runs


def terminal(width: int = 80, *, live: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=live, legacy_windows=False)


def frame_of(*paths: Path, width: int = 80) -> str:
    console = terminal(width)
    watch_runs(list(paths), once=True, console=console)
    return output(console)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def append(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_the_table_has_the_newest_figures_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(top.time, "time", lambda: START + 50)
    rows = [training_row(step) for step in range(1, 41)]
    rows += [training_row(step, perf__tokens_per_second=2500.0) for step in (38, 39, 40)]
    rows += [{"step": 40, "time": START + 45, "eval/loss": 3.125, "train/loss": None}]
    run = make_run(tmp_path / "run", rows, attempts=[attempt_row(0, 0)], state="running", step=38)
    header, line = frame_of(run).splitlines()
    assert header.split() == ["run", "state", "step", "loss", "eval", "left", "tok/s", "row"]
    expected = f"run running 40/100 {rows[39]['train/loss']:.4f} 3.1250 1m00s 2.5k 5s ago"
    assert line.split() == expected.split()


def test_an_ended_run_has_the_loss_of_its_last_step_which_may_have_no_row(tmp_path):
    run = make_run(tmp_path / "run", [training_row(10)], step=13, loss=2.25)
    assert frame_of(run).splitlines()[1].split()[2:4] == ["13/100", "2.2500"]


def test_a_mixture_s_newest_evaluation_is_shown_by_source(tmp_path):
    losses = {
        "eval/source/code/loss": 2.5,
        "eval/source/code/bits_per_byte": 1.0,
        "eval/source/prose/loss": None,
    }
    run = make_run(
        tmp_path / "run", [training_row(1), {"step": 1, "eval/loss": 2.75} | losses, training_row(2)]
    )
    assert frame_of(run).splitlines()[2].split() == ["run,", "eval:", "code", "2.5000", "prose", "-"]


def test_figures_make_room_for_names(tmp_path):
    name = "smol-135m-of-two-corpora-at-half-the-rate"
    run = make_run(tmp_path / name, [training_row(1)])
    for width, last in ((120, "row"), (80, "left"), (60, "loss")):
        header, line = frame_of(run, width=width).splitlines()
        assert header.split()[-1] == last
        assert (line.split()[0] == name) == (width > 60)


def test_a_run_without_its_process_was_killed(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, host, state in (
        (os.getpid(), this_host(), "running"),
        (gone.pid, "another", "running"),
        (gone.pid, this_host(), "killed"),
    ):
        run = make_run(tmp_path / f"{pid}-{state}", [training_row(1)], state="running", pid=pid, host=host)
        assert frame_of(run).splitlines()[1].split()[1] == state


@pytest.mark.parametrize("width", [1, 12, 30, 200])
def test_a_frame_fits_any_terminal(tmp_path, width):
    rows = [training_row(step, layers=48, experts=128) for step in (1, 2)]
    run = make_run(tmp_path / ("long" * 30), rows, checkpoint="c" * 200, state="failed", reason="r" * 300)
    frame = frame_of(run, run, width=width)
    assert "loss" in frame
    if width >= 30:
        lines = frame.splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) == 5, "a line for each run, and its reason"


def test_what_was_found_wrong_stands_below_the_table(tmp_path):
    fault = {"step": 7, "ranks": [1], "found": "another loss"}
    rows = [training_row(step) for step in (1, 2)]
    run = make_run(tmp_path / "run", rows, state="diverged", reason="20 steps were skipped", faults=[fault])
    assert frame_of(run, width=120).splitlines()[2:] == [
        "! run: 20 steps were skipped",
        "! run: silent data corruption at step 7, rank 1: another loss",
    ]


def test_text_of_the_run_moves_no_cursor_and_is_no_markup(tmp_path):
    nasty = "\x1b[2J[bold red]name[/nothing]\r\n\x07"
    rows = [training_row(1)]
    config = {"run": {"name": nasty}}
    run = make_run(tmp_path / "run", rows, config=config, state="failed", reason=nasty)
    for frame in (frame_of(run, width=200), frame_of(run, run, width=200)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", frame)
        assert "\\x1b[2J[bold red]name[/nothing]\\r\\n\\x07" in frame
    other = make_run(tmp_path / "other", rows, state=nasty)
    for frame in (frame_of(other, width=200), frame_of(run, other, width=200)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", frame)


def test_runs_of_a_folder_have_a_line_each(tmp_path):
    for name in ("first", "second"):
        make_run(tmp_path / name, [training_row(step) for step in (1, 2)], step=2)
    (tmp_path / "notes").mkdir()
    expected = [["first", "finished", "2/100"], ["second", "finished", "2/100"]]
    lines = frame_of(tmp_path, width=120).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == expected
    (tmp_path / "ladder").mkdir()
    shutil.copytree(tmp_path / "first", tmp_path / "ladder" / "runs" / "first")
    assert [line.split()[:3] for line in frame_of(tmp_path / "ladder").splitlines()[1:]] == expected[:1]


def test_it_follows_a_run_to_its_end(tmp_path: Path):
    run, seen, console = make_run(tmp_path / "run", [], state="running", step=0), [], terminal(live=True)

    def change_run(_: float) -> None:
        seen.append(len(seen))
        if len(seen) == 1:
            append(run, training_row(1))
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 2, "train/lo')
        elif len(seen) == 2:
            console.size = (50, 20)  # type: ignore[assignment]  # rich takes a pair
            (run / "metrics.jsonl").write_text(json.dumps(training_row(1)) + "\n")
        elif len(seen) == 3:
            append(run, training_row(2), {"step": 2, "eval/loss": 7.25})
        else:
            status = {"state": "finished", "exit_code": 0, "step": 2}
            (run / "status.json").write_text(json.dumps(status))

    watch_runs([run], console=console, sleep=change_run)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output(console))
    for expected in ("0/100", "1/100", "2/100", "finished"):
        assert expected in text, expected
    assert len(seen) == 4
    assert text.rindex("finished") > text.rindex("running")


@pytest.mark.parametrize(("live", "error"), [(True, KeyboardInterrupt), (False, AssertionError)])
def test_an_interrupt_leaves_the_last_frame_and_without_a_terminal_there_is_one(live, error, tmp_path):
    run = make_run(tmp_path / "run", [training_row(1)], state="running")

    def wait(_: float) -> None:
        raise error

    console = terminal(live=live)
    watch_runs([run], console=console, sleep=wait)
    assert "running" in output(console)


def test_damaged_files_are_reported_and_left_out(tmp_path):
    run = make_run(tmp_path / "run", [training_row(1)])
    for name in ("config.yaml", "status.json", "attempts.jsonl"):
        (run / name).write_text("\0{[\n")
    (run / "metrics.jsonl").write_text('nonsense\n{"step": 3, "train/loss": null, "time": 1e999}\n')
    _, line, *remarks = frame_of(run, width=120).splitlines()
    assert line.split() == ["run", "unknown", "3", "-", "-", "-", "-", "-"]
    found = (
        "config.yaml cannot be read",
        "status.json cannot be read",
        "attempts.jsonl: line",
        "1 damaged lines",
    )
    assert len(remarks) == len(found)
    assert all(text in remark for text, remark in zip(found, remarks, strict=True))
