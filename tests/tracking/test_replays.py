"""What replays have said of a run is kept by the run, and shown wherever it is shown as finished."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.run_folders import make_run, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.runs.record import difference_lines, replay_summary
from llm_pretrain.runs.status import Status, record_replay
from llm_pretrain.tracking.report import write_report

LAUNCH: dict[str, Any] = {"rank": 0, "world_size": 1, "launcher": "torchrun"}
LINE = "steps 5-8 differ, first at step 6: train/loss"


def segment(start: int, end: int, verdict: str = "identical", tensors: int | None = 9) -> dict[str, Any]:
    first = {"step": start + 2, "name": "train/loss"} if verdict == "differs" else None
    return {"start": start, "end": end, "verdict": verdict, "first": first, "tensors": tensors}


def replay(*segments: dict[str, Any]) -> dict[str, Any]:
    is_violated = any(each["verdict"] == "differs" for each in segments)
    return {"time": 1e9, "verdict": "violated" if is_violated else "holds", "segments": list(segments)}


SOUND, WRONG = replay(segment(0, 4)), replay(segment(4, 8, "differs"), segment(8, 12, "within bound"))


def status_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run", [training_row(step) for step in range(1, 101)])


def test_steps_are_counted_once_with_their_newest_verdict():
    assert replay_summary([SOUND], 100) == "4 of 100 steps replayed: identical"
    assert replay_summary([SOUND, replay(segment(2, 6))], None) == "6 steps replayed: identical"
    middle = replay(segment(1, 3, "within bound"), segment(4, 8, "failed"), segment(8, 9, "not replayed"))
    assert replay_summary([SOUND, middle], 12) == "4 of 12 steps replayed: 2 identical, 2 within bound"
    assert replay_summary([SOUND, WRONG], 12) == (
        "12 of 12 steps replayed: 4 identical, 4 within bound, 4 differ"
    )
    assert replay_summary([replay(segment(0, 4, "failed"))], 12) == "0 of 12 steps replayed"


def test_only_the_same_steps_found_identical_take_a_difference_back():
    assert difference_lines([WRONG, SOUND]) == [LINE]
    for again in (segment(4, 7), segment(5, 8), segment(4, 8, "within bound"), segment(4, 8, tensors=None)):
        assert difference_lines([WRONG, replay(again)]) == [LINE], again
        assert "4 differ" in replay_summary([WRONG, replay(again)], 12)
    assert difference_lines([WRONG, replay(segment(0, 12))]) == []
    assert difference_lines([replay(segment(4, 8)), WRONG]) == [LINE], "the hardware may be wrong since"


def test_a_run_that_has_ended_says_so_everywhere(run, capsys):
    before = status_of(run)
    record_replay(run, SOUND)
    assert status_of(run)["replays"]["differences"] == []
    assert "a replay gave" not in write_report([run], run / "r.html").read_text()
    record_replay(run, WRONG)
    assert [json.loads(line) for line in (run / "replays.jsonl").read_text().splitlines()] == [SOUND, WRONG]
    last = {"time": 1e9, "verdict": "violated"}
    assert status_of(run) == before | {"replays": {"count": 2, "last": last, "differences": [LINE]}}
    page = write_report([run], run / "r.html").read_text()
    assert f"Not what a replay gave: {LINE}" in page
    assert "12 of 100 steps replayed: 4 identical, 4 within bound, 4 differ" in page
    capsys.readouterr()
    assert main(["top", str(run), "--once"]) == 0
    assert f"! run: not what a replay gave: {LINE}\n" in capsys.readouterr().out
    assert main(["verify", str(run), "--json"]) == 74
    (check,) = [each for each in json.loads(capsys.readouterr().out)["checks"] if each["name"] == "replays"]
    assert (check["result"], check["problems"]) == ("failed", [f"not what a replay gave: {LINE}"])
    assert check["looked_at"].endswith("4 differ; the last on 2001-09-09 01:46 UTC: violated")


@pytest.mark.parametrize("state", ["running", "locked"])
def test_a_run_that_trains_takes_it_in_itself(state, run):
    status = Status(run / "status.json", **LAUNCH)
    status.started() if state == "running" else None
    before = (run / "status.json").read_bytes()
    with FileLock(run / ".lock") if state == "locked" else nullcontext():  # or a lock that is not seen here
        record_replay(run, WRONG)
    assert (run / "status.json").read_bytes() == before
    (finding,) = status.findings()
    assert finding.endswith(LINE)
    status.ended(100, 0, finding)
    assert status_of(run)["replays"]["differences"] == [LINE]
    assert status_of(run)["reason"] == finding
