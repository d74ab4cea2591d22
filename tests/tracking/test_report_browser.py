"""The report in Chromium: every chart is drawn, nothing is loaded, nothing overflows or overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import DRAWN, OVERLAPS, PLOTS, chromium, opened
from support.run_folders import START, attempt_row, make_run, training_row

from llm_pretrain.tracking.report import write_report

NASTY = "<img src=http://127.0.0.1:9/x onerror=console.log(1)><script>console.log(2)</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A run with everything that a report can show, with long and hostile names."""
    chromium()
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
        tmp_path_factory.mktemp("browser") / ("a-long-name-" * 8),
        rows,
        attempts=[attempt_row(0, 0), attempt_row(60, 1059, NASTY)],
        samples=[{"step": 50, "prompt": NASTY, "text": "x" * 500 + "\n\ttext"}],
        config={"model": {"num_experts": 8}, "data": {"sources": "s" * 300}},
    )
    assert rows[60]["time"] > START
    return write_report([run], run / "report.html")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_report_is_drawn_without_errors_requests_or_overflow(page, tmp_path, width, dark):
    with opened(page, tmp_path / "profile", width=width, dark=dark) as (window, seen):
        plots = window.evaluate(PLOTS)
        assert len(plots) == 19
        assert [entry for entry in plots if entry[1] == 0 or entry[2] != 0] == []
        assert window.evaluate(OVERLAPS) == []
        assert window.evaluate("document.documentElement.scrollWidth") == width
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
        window.emulate_media(color_scheme="light" if dark else "dark")
        window.set_viewport_size({"width": 400 if width == 1280 else 1280, "height": 900})
        window.wait_for_function(f"{DRAWN} && ({PLOTS})().every(entry => !entry[2])")
        assert seen.messages == []
        assert seen.requests == [page.as_uri()]
