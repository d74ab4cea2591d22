"""Reports in Chromium: every chart is drawn, nothing is loaded, nothing overflows or overlaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.browser import DRAWN, OVERLAPS, PLOTS, chromium, opened
from support.ladders import make_ladder
from support.run_folders import START, attempt_row, make_run, training_row

from llm_pretrain.forecast.ladder_report import write_ladder_report
from llm_pretrain.tracking.report import write_report

NASTY = "<img src=http://127.0.0.1:9/x onerror=console.log(1)><script>console.log(2)</script>"


def run_report(folder: Path) -> Path:
    """A run with everything that a report can show, with long and hostile names."""
    rows = []
    for step in range(1, 101):
        sources = {f"train/source/{name}/loss": 2.0 + 1 / step for name in ("code", NASTY)}
        row = training_row(step, layers=4, experts=8, **sources)
        if step % 25 == 0:
            row |= {"eval/loss": 3.0, "eval/bits_per_byte": 1.5, "eval/source/code/loss": 2.5}
            row |= {"eval/predicted_loss": 3.2, "eval/predicted_low": 3.1, "eval/predicted_high": 3.3}
        if step > 60:
            row["time"] += 1000
        row |= {"train/loss_scale": 1024.0, "perf/mfu": 0.4}
        rows.append(row)
    rows[9] |= {"train/skipped": NASTY, "train/loss": None, "train/grad_norm": None}
    run = make_run(
        folder,
        rows,
        attempts=[attempt_row(0, 0), attempt_row(60, 1059, NASTY)],
        samples=[{"step": 50, "prompt": NASTY, "text": "x" * 500 + "\n\ttext"}],
        config={"model": {"num_experts": 8}, "data": {"sources": "s" * 300}},
    )
    assert rows[60]["time"] > START
    return write_report([run], run / "report.html")


def ladder_report(folder: Path) -> Path:
    sizes = (32, 48, 64, 80, 96, 128, 160, 192)
    return write_ladder_report(make_ladder(folder, sizes=sizes, noise=0.01).folder)


def read_run_page(window: Any) -> None:
    """Its curves, and what its controls do."""
    assert len(window.evaluate(PLOTS)) == 19
    interval = "document.querySelectorAll('#eval-loss .fills path').length"
    assert window.evaluate(interval) == 1, "the predicted interval is filled"
    for axis in ("tokens", "hours"):
        window.check(f"input[name=axis][value={axis}]")
    window.check("input[name=log]")
    window.fill("input[name=smoothing]", "0.9")
    window.select_option("select[name=layer]", "3")
    window.wait_for_function(DRAWN)
    assert window.text_content("#expert-load-title .layer") == "3"
    titles = "[...document.querySelectorAll('#loss-chart .xtitle')].map(title => title.textContent)"
    assert window.evaluate(titles) == ["hours of training"]


LABELS = """() => {
    const found = [];
    for (const plot of document.querySelectorAll('.plot')) {
        const [title] = plot.querySelectorAll('.xtitle'), [legend] = plot.querySelectorAll('.legend');
        const [a, b, room] = [title, legend, plot].map(each => each.getBoundingClientRect());
        if (a.bottom > b.top + 1 || a.left < room.left || a.right > room.right) found.push(plot.id);
        if (b.bottom > room.bottom + 1 || b.right > room.right + 1) found.push(plot.id + ' legend');
    }
    return found;
}"""
"""Charts whose horizontal title or legend is cut off, or that overlap."""


def read_ladder_page(window: Any) -> None:
    assert len(window.evaluate(PLOTS)) == 2
    assert window.evaluate("document.querySelectorAll('#sizes .points path').length") == 4
    assert window.evaluate(LABELS) == []


PAGES = {"run": (run_report, read_run_page), "ladder": (ladder_report, read_ladder_page)}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
@pytest.mark.parametrize("kind", PAGES)
def test_a_report_is_drawn_without_errors_requests_or_overflow(tmp_path, kind, width, dark):
    chromium()
    write, read = PAGES[kind]
    page = write(tmp_path / ("a-long-name-" * 8))
    with opened(page, tmp_path / "profile", width=width, dark=dark) as (window, seen):
        assert [entry for entry in window.evaluate(PLOTS) if entry[1] == 0 or entry[2] != 0] == []
        assert window.evaluate(OVERLAPS) == []
        bars = "[...document.querySelectorAll('.modebar')].map(bar => getComputedStyle(bar).opacity)"
        assert set(window.evaluate(bars)) == {"0"}, "tool bars cover curves only under the pointer"
        assert window.evaluate("document.documentElement.scrollWidth") == width
        read(window)
        window.emulate_media(color_scheme="light" if dark else "dark")
        window.set_viewport_size({"width": 400 if width == 1280 else 1280, "height": 900})
        window.wait_for_function(f"{DRAWN} && ({PLOTS})().every(entry => !entry[2])")
        assert seen.messages == []
        assert seen.requests == [page.as_uri()]
