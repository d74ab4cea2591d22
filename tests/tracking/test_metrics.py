"""metrics.jsonl: no row is lost, no number is rounded, only a torn end is cut."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_pretrain.errors import CheckpointError, OutputError
from llm_pretrain.runs.rows import MetricsWriter, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, *rows, resume_step=None):
    with MetricsWriter(path, resume_step=resume_step) as writer:
        for row in rows:
            writer.append(row)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
@settings(
    max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_numbers_keep_every_bit(path, value):
    write(path, {"step": 1, "train/loss": value})
    found = read_metrics(path)[-1]["train/loss"]
    assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))


def test_numbers_that_json_lacks_become_null(path):
    nan = float("nan")
    row = {"step": 1, "a": nan, "b": float("inf"), "c": [1.0, [-float("inf")]], "d": np.float32("nan")}
    write(path, row | {"e": torch.tensor([1.5, nan]), "f": np.int64(3), "g": None, "h": "text", "i": True})
    assert json.loads(path.read_text()) == {
        **{"step": 1, "a": None, "b": None, "c": [1.0, [None]], "d": None},
        **{"e": [1.5, None], "f": 3, "g": None, "h": "text", "i": True},
    }


def test_each_row_is_in_the_file_as_soon_as_it_is_appended(path):
    writer = MetricsWriter(path, resume_step=None)
    for step in range(3):
        writer.append({"step": step})
        assert [row["step"] for row in read_metrics(path)] == list(range(step + 1))
    writer.close()
    writer.close()


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 3, "tra',
        '{"step": 3, "train/loss": 1.0}',
        '{"step": 3, "tra\n',
        "\0" * 100,
        '{"step": 3, "tra\n\0\0\n{"step"',
        "\n",
        '{"no step": 1}\n',
    ],
)
def test_a_torn_end_is_cut_and_the_rows_before_it_stay(path, torn):
    write(path, {"step": 1, "train/loss": 0.1}, {"step": 2, "train/loss": 0.2})
    sound = path.read_bytes()
    path.write_bytes(sound + torn.encode())
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write(path, resume_step=2)
    assert path.read_bytes() == sound
    path.write_bytes(sound + torn.encode())
    write(path, {"step": 3, "train/loss": 0.3}, resume_step=2)
    assert path.read_bytes().startswith(sound)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_rows_that_a_later_attempt_went_back_behind_are_lost_work(path):
    write(path, *({"step": step, "train/loss": 1.0} for step in range(1, 7)))
    second = path.stat().st_size
    write(path, {"step": 3, "train/loss": 2.0}, {"step": 5, "train/loss": 2.0}, resume_step=2)
    third = path.stat().st_size
    starts = [(0, 0), (second, 2)]
    found = read_metrics(path, starts=starts)
    assert [(row["step"], row["train/loss"]) for row in found] == [(1, 1.0), (2, 1.0), (3, 2.0), (5, 2.0)]
    found = read_metrics(path, starts=[(third, 1), *starts])  # has no row yet
    assert [row["step"] for row in found] == [1]


def test_cutting_at_every_byte_never_loses_a_whole_row(path):
    write(path, *({"step": step, "moe/load": [[0.5] * 2]} for step in range(1, 4)))
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        write(path, {"step": 9}, resume_step=0)
        whole = data[:length].count(b"\n")
        assert [row["step"] for row in read_metrics(path)] == [*range(1, whole + 1), 9]


def test_rows_longer_than_a_read_are_found_whole(path):
    long = {"step": 1, "moe/load": [[0.123456789] * 64] * 300}
    write(path, long)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "x": "' + b"y" * 300_000)
    write(path, {"step": 2}, resume_step=1)
    assert read_metrics(path) == [long, {"step": 2}]


def test_evaluation_is_merged_into_the_row_of_its_step(path):
    write(path, {"step": 0, "eval/loss": 8.0}, {"step": 0, "train/loss": 7.0})
    write(path, {"step": 1, "train/loss": 2.0}, {"step": 1, "eval/loss": 3.0})
    write(path, {"step": 2, "time": 11.0, "train/loss": 1.0})
    write(path, {"step": 1, "eval/loss": 3.5}, resume_step=1)
    write(path, {"step": 2, "time": 99.0, "eval/loss": 3.0}, resume_step=2)
    assert read_metrics(path) == [
        {"step": 0, "eval/loss": 8.0, "train/loss": 7.0},
        {"step": 1, "train/loss": 2.0, "eval/loss": 3.5},
        {"step": 2, "time": 99.0, "train/loss": 1.0, "eval/loss": 3.0},
    ]


def test_files_that_cannot_be_used_are_named(path, tmp_path):
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: cannot be read"):
        read_metrics(path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"metrics.jsonl: cannot be written"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl", resume_step=None)
    write(path, {"step": 1}, {"step": 2})
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics.jsonl:2: expected a JSON object"):
        read_metrics(path)


def test_syncing_a_file_that_was_moved_is_an_error(path):
    """Later readers would not find rows that are appended to a deleted file or a moved folder."""
    with MetricsWriter(path) as writer:
        writer.append({"step": 1})
        writer.sync()
        path.rename(path.with_suffix(".moved"))
        writer.append({"step": 2})
        with pytest.raises(OutputError, match=r"metrics.jsonl: expected the rows of this run, found no file"):
            writer.sync()
        path.with_suffix(".moved").rename(path)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
