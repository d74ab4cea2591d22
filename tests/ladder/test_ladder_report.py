"""A ladder's page: what it shows of the points, the law and what more compute would give."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ladders import LAW, make_ladder
from support.pages import Page

from llm_pretrain.__main__ import main
from llm_pretrain.forecast import ladder_report as report_module
from llm_pretrain.forecast.family import Sizes
from llm_pretrain.forecast.ladder_report import write_ladder_report
from llm_pretrain.forecast.ladder_runs import ladder_runs, run_folder
from llm_pretrain.forecast.planning import Forecast
from llm_pretrain.forecast.points import RUNS_FOLDER, Ladder, write_points
from llm_pretrain.forecast.scaling_law import fit_law

NASTY = "<script>alert(1)<"


@pytest.fixture(scope="module", autouse=True)
def few_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_module, "Forecast", functools.partial(Forecast, samples=8))
        yield


@pytest.fixture(autouse=True)
def short_plotly(monkeypatch) -> None:
    """A page without the 5 MB of plotly's script."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


@pytest.fixture(scope="module")
def ladder(tmp_path_factory) -> Ladder:
    return make_ladder(tmp_path_factory.mktemp("finished") / "ladder")


@pytest.fixture(scope="module")
def finished(ladder) -> Page:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
        return page_of(ladder)


def make_begun(folder: Path) -> Ladder:
    """A ladder with too few points for a fit."""
    ladder = make_ladder(folder)
    write_points(folder, ladder.points[:3])
    return ladder


def page_of(ladder: Ladder) -> Page:
    return Page(write_ladder_report(ladder.folder))


def traces(page: Page, chart: str) -> list[dict[str, Any]]:
    return next(each for each in page.data["charts"] if each["id"] == chart)["traces"]


def write_run(folder: Path, step: int, loss: float, state: str = "finished") -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "time": 1.0, "eval/loss": loss}) + "\n")
    (folder / "status.json").write_text(json.dumps({"state": state, "step": step}))


def test_the_page_shows_every_point_and_a_law_that_predicts_them(ladder, finished):
    assert finished.sections == ["summary", "charts", "points"]
    assert finished.plots == {"losses", "sizes"}
    decayed = [point for point in ladder.points if point.decayed]
    lines = [trace for trace in traces(finished, "losses") if trace["kind"] == "line+points"]
    shown = {pair for trace in lines for pair in zip(trace["x"], trace["y"], strict=True)}
    assert [trace["name"] for trace in lines] == ["h32", "h64", "h96", "h128"]
    assert shown == {(point.flops, point.loss) for point in decayed}
    fit = fit_law(decayed, samples=2)
    assert max(map(abs, fit.residuals)) < 1e-3, "the losses are a law's, without noise"
    for point in decayed:
        assert f" {point.loss:.4f} {point.loss * 0.45:.4f} {fit.law.of(point):.4f} " in finished.text
    assert "12 of 12" in finished.text
    assert "active parameters with embedding and head" in finished.text
    assert "missing" not in finished.text
    far = "Warning: at 30 times the compute of the ladder's largest point the"
    assert f"{far} text is passed over 5.3 times" in finished.text


def test_the_predicted_line_is_the_least_loss_over_the_whole_family(ladder, finished):
    (line,) = [trace for trace in traces(finished, "losses") if trace["kind"] == "dashed"]
    (band,) = [trace for trace in traces(finished, "losses") if trace["kind"] == "band"]
    largest = max(point.flops for point in ladder.points if point.decayed)
    assert line["x"] == pytest.approx([largest * multiple for multiple in (1, 3, 10, 30)], rel=0.01)
    sizes = Sizes(ladder.base)
    every = [sizes.size(number) for number in range(1, 60)]
    for compute, loss in zip(line["x"], line["y"], strict=True):
        losses = [LAW.loss(size.active_parameters, compute / size.flops_per_token, 5e7) for size in every]
        assert 0 < losses.index(min(losses)) < len(losses) - 1
        assert loss == pytest.approx(min(losses), rel=5e-3)
    assert all(
        low < loss < high for low, loss, high in zip(band["low"], line["y"], band["high"], strict=True)
    )


def test_an_unfinished_ladder_says_what_is_missing(tmp_path):
    ladder = make_ladder(tmp_path / "ladder")
    some = [point for point in ladder.points if point.hidden_size in (32, 64)]
    write_points(ladder.folder, some[:-3])
    stable = next(run for run in ladder_runs(ladder.rungs) if run.hidden_size == 96)
    write_run(run_folder(ladder, stable), 3, 9.0, state="diverged")
    page = page_of(ladder)
    assert page.sections == ["summary", "charts", "points"]
    assert page.plots == {"losses"}
    assert (
        "No law is fitted: expected at least 7 points of 3 sizes for a fit, found 6 of 2; the same"
        in page.text
    )
    assert "Hidden size 96: a run has diverged; its points are left out." in page.text
    assert "Hidden size 128: 3 of 3 decayed points are missing." in page.text
    assert "Hidden size 64" not in page.text


def test_text_of_a_ladder_is_never_markup(tmp_path):
    ladder = make_begun(tmp_path / NASTY)
    dataclasses.replace(ladder, budget=NASTY).write()
    path = write_ladder_report(ladder.folder)
    assert NASTY not in path.read_text()
    assert Page(path).text.count(NASTY) == 4  # title, heading, folder, budget


def test_the_command_report_recognises_a_ladder(tmp_path, capsys):
    ladder = make_begun(tmp_path / "ladder")
    folder = ladder.folder
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert "<title>ladder – ladder report</title>" in (folder / "report.html").read_text()
    (folder / "report.html").write_text("<html>mine</html>")
    assert main(["report", str(folder)]) == 73, "another file"
    (folder / "report.html").unlink()
    (folder / "points.jsonl").unlink()
    assert page_of(ladder).sections == ["summary"]
    assert not (folder / RUNS_FOLDER).exists()
    capsys.readouterr()
    assert main(["report", str(folder), str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected runs or one ladder alone, found a ladder beside others" in line
