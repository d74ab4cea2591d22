"""`top`: what it shows of a run at any time, in any terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.run_folders import START, attempt_row, make_run, training_row

from llm_pretrain.errors import ConfigError
from llm_pretrain.tracking import top
from llm_pretrain.tracking.top import WatchedRun, sparkline, watch_runs


def terminal(width: int = 80, *, live: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=live, legacy_windows=False)


def frame_of(*paths: Path, width: int = 80) -> str:
    """One frame of the runs."""
    console = terminal(width)
    watch_runs(list(paths), once=True, console=console)
    return output(console)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def append(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_load_too_large_for_its_type_is_missing(tmp_path: Path):
    """JSON has numbers of any size, and Python reads its Infinity."""
    row = training_row(1, layers=1, experts=4) | {"moe/load": [[1e308, -1e308, float("inf"), 0.5]]}
    assert "load of 4 experts" in frame_of(make_run(tmp_path / "run", [row]))


@pytest.mark.parametrize("width", [1, 5, 12, 17, 20])
def test_a_frame_fits_the_narrowest_terminal(width: int, tmp_path: Path):
    rows = [training_row(step, layers=2, experts=4) for step in (1, 2)]
    assert "loss" in frame_of(make_run(tmp_path / "run", rows), width=width)


def test_a_frame_shows_state_progress_and_metrics(tmp_path: Path):
    rows = [training_row(step, layers=4, experts=8) for step in range(1, 41)]
    rows[19] |= {"eval/loss": 3.125, "eval/bits_per_byte": 1.25}
    rows[29] |= {"train/skipped": "overflow", "train/loss": None}
    attempts = [attempt_row(0, 0), attempt_row(20, 20.5, "accelerate")]
    run = make_run(
        tmp_path / "run", rows, attempts=attempts, state="running", step=40, checkpoint="ckpt/step-00000020"
    )
    text = frame_of(run)
    for expected in (
        *(
            "run  running",
            "40/100  40%",
            "1 min 00 s left",
            f"{rows[-1]['train/loss']:.4f}",
            "3.1250",
            "1.2500",
        ),
        *("lr 0.001", "tok/s 1k", "memory 1.00 GiB", "max 1.78x", "checkpoint ckpt/step-00000020"),
        *("run by accelerate × 2 on a processor, attempt 2 from step 20", "step 30 was skipped: overflow"),
        "no row of metrics for",  # their times are in the past
    ):
        assert expected in text, expected
    assert len(re.findall("^│ +[0-3]  [▁-█ ]+  max", text, flags=re.MULTILINE)) == 4


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize(("layers", "experts"), [(0, 0), (4, 8), (48, 128)])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, layers: int, experts: int):
    rows = [training_row(step, layers=layers, experts=experts) for step in (1, 2)]
    run = make_run(tmp_path / ("long" * 30), rows, checkpoint="c" * 200, state="failed", reason="r" * 300)
    for frame in (frame_of(run, width=width), frame_of(run, run, width=width)):
        assert max(map(len, frame.splitlines())) <= width
        assert ("load of" in frame) == (layers > 0 and frame.startswith("╭"))
        assert len(frame.splitlines()) < 40


def test_text_of_the_run_moves_no_cursor_and_is_no_markup(tmp_path: Path):
    nasty = "\x1b[2J[bold red]name[/nothing]\r\n\x07"
    rows = [training_row(1, **{"train/skipped": nasty})]
    run = make_run(
        tmp_path / "run",
        rows,
        config={"run": {"name": nasty}},
        state="failed",
        reason=nasty,
        checkpoint=nasty,
    )
    for frame in (frame_of(run, width=200), frame_of(run, run, width=200)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", frame)
        assert "\\x1b[2J[bold red]name[/nothing]\\r\\n\\x07" in frame
    other = make_run(tmp_path / "other", rows, state=nasty)
    for frame in (frame_of(other, width=200), frame_of(run, other, width=200)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", frame)


def test_runs_of_a_folder_have_a_line_each(tmp_path: Path):
    for name in ("first", "second"):
        make_run(tmp_path / name, [training_row(step) for step in (1, 2)], step=2)
    (tmp_path / "notes").mkdir()
    lines = frame_of(tmp_path, width=120).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["first", "finished", "2/100"],
        ["second", "finished", "2/100"],
    ]


def test_it_follows_a_run_from_before_its_start_to_its_end(tmp_path: Path):
    run, seen, console = tmp_path / "run", [], terminal(live=True)

    def change_run(_: float) -> None:
        """What happens to the run between two frames."""
        seen.append(len(seen))
        if len(seen) == 1:
            run.mkdir()
            (run / ".lock").touch()
        elif len(seen) == 2:
            (run / ".lock").unlink()
            run.rmdir()
            make_run(run, [], state="running", step=0)
        elif len(seen) == 3:
            append(run, training_row(1))
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 2, "train/lo')
        elif len(seen) == 4:
            console.size = (50, 20)  # type: ignore[assignment]  # rich takes a pair
            (run / "metrics.jsonl").write_text(json.dumps(training_row(1)) + "\n")
        elif len(seen) == 5:
            append(run, training_row(2), {"step": 2, "eval/loss": 7.25})
        else:
            status = {"state": "finished", "exit_code": 0, "step": 2}
            (run / "status.json").write_text(json.dumps(status))

    watch_runs([run], console=console, sleep=change_run)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output(console))
    for expected in ("waiting for", "no metrics yet", "1/100", "2/100", "7.2500", "finished"):
        assert expected in text, expected
    assert len(seen) == 6
    assert text.rindex("finished") > text.rindex("running")


def test_an_interrupt_leaves_the_last_frame(tmp_path: Path):
    run = make_run(tmp_path / "run", [training_row(1)], state="running")
    console = terminal(live=True)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    watch_runs([run], console=console, sleep=interrupt)
    assert "running" in output(console)


def test_without_a_terminal_one_frame_is_shown(tmp_path: Path):
    run = make_run(tmp_path / "run", [training_row(1)], state="running")

    def never(_: float) -> None:
        raise AssertionError

    console = terminal()
    watch_runs([run], console=console, sleep=never)
    assert "running" in output(console)


def test_a_path_that_is_no_run_is_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    (tmp_path / "file").touch()
    for name in ("folder", "file", "missing", "missing/run"):
        with pytest.raises(ConfigError, match=f"{name}: expected a run's folder"):
            frame_of(tmp_path / name)
    for name in ("folder", "file", "missing/run"):
        with pytest.raises(ConfigError, match="expected a run's folder"):
            watch_runs([tmp_path / name], console=terminal(live=True))


def test_only_new_rows_are_read_and_repeated_steps_replace_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path / "run", [training_row(step) for step in range(1, 11)], state="running", step=10)
    watched = WatchedRun(run)
    watched.refresh()
    read: list[int] = []
    add = WatchedRun._add
    monkeypatch.setattr(WatchedRun, "_add", lambda self, line: read.append(len(line)) or add(self, line))
    append(
        run, *(training_row(step) | {"train/loss": 50.0} for step in (8, 9)), {"step": 9, "eval/loss": 4.0}
    )
    watched.refresh()
    assert len(read) == 3
    assert [row["step"] for row in watched.rows] == [*range(1, 8), 8, 9]
    assert watched.last("train/loss") == 50.0
    assert watched.last("eval/loss") == 4.0
    assert watched.warnings(START + 11) == []
    assert "no row" in watched.warnings(START + 100)[0]


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(top, "TAIL_BYTES", 3000)
    run = make_run(tmp_path / "run", [training_row(step) for step in range(1, 501)])
    watched = WatchedRun(run)
    watched.refresh()
    assert 3 < len(watched.rows) < 20
    assert watched.rows[-1]["step"] == 500
    assert watched.warnings() == []


def test_damaged_files_are_reported_and_left_out(tmp_path: Path):
    run = make_run(tmp_path / "run", [training_row(1)])
    for name in ("config.yaml", "status.json", "attempts.jsonl"):
        (run / name).write_text("\0{[\n")
    (run / "metrics.jsonl").write_text('nonsense\n{"step": 3, "train/loss": null, "moe/load": [[1], []]}\n')
    text = frame_of(run, width=120)
    assert "step 3" in text
    assert "config.yaml cannot be read" in text
    assert "1 damaged lines" in text


def test_a_sparkline_keeps_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([5.0], 10) == "▁"
    assert sparkline([1e308, 1.7e308, -1.7e308, -1.7e308], 4) == "▇█▁▁"
    assert sparkline([1.7e308] * 4, 2) == "▁▁"
    assert sparkline([], 10) == ""
