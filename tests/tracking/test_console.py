"""The console: the text of its lines, which process prints them, and that errors never stop a run."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from contextlib import suppress

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
            "step 120/1000  loss 4.2314  12.3k tok/s  eta 2m10s  lr 9.80e-04  grad 0.831  "
            "mem 512.0 MiB  mfu 41%"
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


@pytest.mark.parametrize("columns", [0, 80, 100, 200])
def test_a_terminal_keeps_the_rows_above_a_bar_that_moves_with_every_step(monkeypatch, columns: int):
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24 if columns else 0, columns, 0, 0))
    output = bytearray()

    def read() -> None:  # at once, or the terminal's buffer would be full on a slow machine
        with suppress(OSError):  # the other end is closed
            while piece := os.read(terminal, 1 << 16):
                output.extend(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(inside, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        shown = console(start_step=10, max_steps=40)
        for step in range(11, 31):
            time.sleep(0.03)
            shown.step(step)
            if step % 10 == 0:
                shown.row(ROW | {"step": step, "train/loss": step / 8})
        shown.evaluating(3, 20)
        shown.info("a line")
        shown.row({"step": 30, "eval/loss": 2.0})
        shown.step(31)
        shown.close()
    reader.join()
    os.close(terminal)
    pieces = [piece.rstrip() for piece in re.split(r"[\r\n]+", re.sub(r"\x1b\[\w", "", output.decode()))]
    assert all(len(piece) <= columns for piece in pieces if columns)
    rows = [piece for piece in pieces if piece.startswith("step ")]
    figures = rows[0].split("  ")
    assert figures.pop(3).startswith("eta ")
    expected = ["step 20/40", "loss 2.5000", "12.3k tok/s", "lr 9.80e-04", "grad 0.831"]
    assert figures == expected + ["mem 512.0 MiB", "mfu 41%"] * (columns != 80)
    assert [row.split("  ")[:2] for row in rows[1:]] == [
        ["step 30/40", "loss 3.7500"],
        ["step 30/40", "eval loss 2.0000"],
    ]
    assert "a line" in pieces
    bars = [piece for piece in pieces if piece.startswith("pretrain:")]
    assert any(re.search(r" 1[1-9]/40", bar) for bar in bars)
    assert any("30/40, evaluation 3/20" in bar for bar in bars)
    for part in ("78%", "31/40, loss 3.7500  12.3k tok/s  eta "):
        assert part in bars[-1]
