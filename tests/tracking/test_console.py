"""The console: the text of its lines, which process prints them, and that errors never stop a run."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import time

import pytest

from llm_pretrain.config.tree import Config
from llm_pretrain.tracking.trackers import Console

ROW = {
    **{"step": 120, "train/loss": 4.23141, "train/learning_rate": 9.8e-4, "train/grad_norm": 0.8312},
    **{"perf/tokens_per_second": 12345.6, "perf/memory_bytes": 512 * 2**20, "perf/mfu": 0.4123},
    **{"perf/step_seconds": 0.148, "train/skipped": None, "data/batch_sha256": "00"},
}
EXPERTS = {
    **{"step": 1, "moe/load": [[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]], "perf/mfu": None},
    **{"moe/layer_0/load_max": 2.0, "moe/layer_0/router_entropy": 1.0, "moe/layer_0/dead_experts": 1},
    **{"moe/layer_1/load_max": 1.0, "moe/layer_1/router_entropy": 1.4, "moe/layer_1/dead_experts": 2},
    "train/loss": 1.0,
}
SUMMARY = "step 1/1000  loss 1.0000  load 2.00x  dead 3  entropy 1.20"
LINES: list[tuple[dict, list[str]]] = [
    (
        ROW,
        [
            "step 120/1000  loss 4.2314  lr 9.80e-04  grad 0.831  12.3k tok/s  "
            "mem 512.0 MiB  mfu 41%  eta 2m10s"
        ],
    ),
    (
        {"step": 3, "train/loss": None, "train/grad_norm": float("nan"), "train/skipped": "fp16 overflow"},
        ["step 3/1000  skipped (fp16 overflow)  loss -  grad -"],
    ),
    (
        {"step": 0, "eval/loss": 2.0, "eval/perplexity": 7.389, "eval/bits_per_byte": 1.5},
        ["step 0/1000  eval loss 2.0000  perplexity 7.39  bits/byte 1.5000"],
    ),
    (
        {"step": 5, "train/loss": 1.0, "eval/loss": 2.0, "eval/predicted_loss": 1.9},
        ["step 5/1000  loss 1.0000", "step 5/1000  eval loss 2.0000  predicted 1.9000"],
    ),
    (EXPERTS, [SUMMARY]),
]


def console(enabled: bool = True, **positions: int) -> Console:
    return Console(Config(), enabled=enabled, **({"start_step": 0, "max_steps": 1000} | positions))


@pytest.mark.parametrize(("row", "lines"), LINES)
def test_a_row_is_readable_lines(capsys, row, lines):
    console().row(row)
    assert capsys.readouterr().out.splitlines() == lines


def test_the_time_left_follows_the_rate_since_the_first_row(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    shown = console(start_step=500)
    shown.row({"step": 510, "train/loss": 1.0, "perf/step_seconds": 20.0})
    now = 120.0
    shown.row({"step": 520, "train/loss": 1.0, "perf/step_seconds": 20.0})
    shown.row({"step": 1000, "train/loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("eta ")[2] for line in lines] == ["2h43m", "16m00s", "0s"]


def test_only_the_enabled_console_prints(capsys):
    quiet = console(enabled=False)
    quiet.info("a")
    quiet.warning("b")
    quiet.row(ROW)
    quiet.close()
    assert capsys.readouterr() == ("", "")
    loud = console()
    loud.info("a")
    loud.warning("b")
    loud.info("a\x1b[31m\nb")  # a run's folder may have any name
    loud.warning("a\u202eb")
    loud.close()
    loud.info("after the end")
    assert capsys.readouterr() == ("a\na\\x1b[31m\\nb\n", "warning: b\nwarning: a\\u202eb\n")


@pytest.mark.parametrize("failure", [BrokenPipeError, ValueError])
def test_a_console_that_fails_shows_nothing_more(monkeypatch, failure):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise failure

    shown = console()
    monkeypatch.setattr(sys, "stdout", Broken())
    shown.row(ROW)
    shown.info("x")


def test_a_terminal_gets_a_bar_with_rate_and_time_left(monkeypatch):
    terminal, inside = pty.openpty()  # which reports no columns and no rows
    with open(inside, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        shown = console(start_step=10, max_steps=40)
        for step in range(11, 31):
            time.sleep(0.02)
            shown.row({"step": step, "train/loss": 2.5})
        shown.info("a line")
        shown.row({"step": 30, "eval/loss": 2.0})
        shown.close()
        stream.flush()
        output = b""
        while select.select([terminal], [], [], 0)[0]:
            output += os.read(terminal, 4096)
    os.close(terminal)
    text = output.decode()
    assert "a line" in text
    assert "eval loss 2.0000" in text
    last = [state for state in text.split("\r") if "step/s" in state][-1]
    for part in ("pretrain", "30/40", "step/s", "loss 2.5000", "75%"):
        assert part in last
