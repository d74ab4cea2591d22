"""`verify` and `replay` read the same history from a run's folder, whatever has happened to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llm_pretrain.audit.checks import Check
from llm_pretrain.audit.history_checks import RunFiles, read_history
from llm_pretrain.audit.segments import Segment, last_step, make_segments, rows_of_segment
from llm_pretrain.config.loading import from_dict, to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.runs.attempts import read_attempts, row_starts

STEPS = 40


class Part(NamedTuple):
    """An attempt that resumed from `resume` after `start` steps, and the steps of the rows it wrote."""

    start: int
    steps: Sequence[int]
    resume: str = "auto"


def settings(name: str, resume: str) -> Config:
    return from_dict(
        {
            "run": {"name": name},
            "checkpoint": {"resume": resume},
            "training": {"max_steps": STEPS},
            "logging": {"logging_steps": 1},
        }
    )


def write_run(folder: Path, parts: Sequence[Part], *, name: str, torn: bool = False) -> Config:
    """A folder as these attempts leave it; `torn` as a kill leaves it while a row is written."""
    folder.mkdir(parents=True)
    rows, attempts = b"", b""
    for number, part in enumerate(parts):
        config = settings(name, part.resume)
        attempt: dict[str, Any] = {"step": part.start, "launcher": "torchrun", "world_size": 1}
        attempt |= {"metrics_bytes": len(rows), "versions": {}, "device": "cpu", "config": to_dict(config)}
        attempts += json.dumps(attempt).encode() + b"\n"
        for step in part.steps:
            row = {"step": step, "train/loss_tokens": 8, "train/loss": float(number)}
            rows += json.dumps(row).encode() + b"\n"
    (folder / "metrics.jsonl").write_bytes(rows + b'{"step": 39, "train/l' * torn)
    (folder / "attempts.jsonl").write_bytes(attempts + b'{"step": 7' * torn)
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": parts[-1].start}))
    return settings(name, parts[-1].resume)


CASES = {
    "one attempt": ([Part(0, range(1, 9))], range(1, 9)),
    "killed and resumed": ([Part(0, range(1, 9)), Part(4, range(5, 13))], range(1, 13)),
    "rolled back twice": ([Part(0, range(1, 13)), Part(8, range(9, 12)), Part(4, range(5, 7))], range(1, 7)),
    "continued from elsewhere": ([Part(10, range(11, 15), "/old/checkpoints/step-00000010")], range(11, 15)),
    "continued from elsewhere, and resumed": (
        [Part(10, range(11, 15), "/old/checkpoints/step-00000010"), Part(12, range(13, 17))],
        range(11, 17),
    ),
    "begun elsewhere, and again from its initial values": (
        [Part(10, range(11, 15), "/old/checkpoints/step-00000010"), Part(0, range(1, 7))],
        range(1, 7),
    ),
    "resumed where another run's checkpoint was named, but not used": (
        [Part(0, range(1, 9)), Part(4, range(5, 11), "/old/checkpoints/step-00000010")],
        range(1, 11),
    ),
    "copied under another name, and continued from its own checkpoint": (
        [Part(0, range(1, 9)), Part(4, range(5, 11), "runs/here/checkpoints/step-00000004")],
        range(1, 11),
    ),
}


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
@pytest.mark.parametrize("case", CASES)
def test_verify_and_replay_read_the_same_history(tmp_path, case, torn):
    parts, expected = CASES[case]
    folder = tmp_path / "here"
    config = write_run(folder, parts, name="first", torn=torn)
    run, check = RunFiles(folder, known_config=config), Check("rows")
    read_history(check, run)
    assert check.problems == []
    assert list(run.rows) == list(expected)
    attempts = read_attempts(folder)
    assert run.attempts == attempts
    assert last_step(folder, attempts) == expected[-1]
    origin = expected[0] - 1
    [segment] = make_segments(folder, attempts, origin, expected[-1])
    assert (segment.start, segment.end) == (origin, expected[-1])
    whole = Segment(origin, expected[-1], None, None)
    replayed = rows_of_segment(folder / "metrics.jsonl", whole, row_starts(attempts))
    assert {step: row["train/loss"] for step, row in replayed.items() if step > origin} == {
        step: row["train/loss"] for step, row in run.rows.items()
    }
