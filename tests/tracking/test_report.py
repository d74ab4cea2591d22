"""The report's content: the page shows what a run's files hold, and broken files do not break it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pages import Page
from support.run_folders import START, attempt_row, make_run, training_row

from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.runs.record import expert_loads, read_run
from llm_pretrain.tracking import report_charts
from llm_pretrain.tracking.report import write_report
from llm_pretrain.tracking.report_charts import expert_maps, run_series, training_seconds

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</title></script x><!--<script "


@pytest.fixture(autouse=True)
def short_plotly(monkeypatch) -> None:
    """A page without the 5 MB of plotly's script, which take a second to parse."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def report(*runs: Path) -> Page:
    return Page(write_report(list(runs), runs[0].parent / "report.html"))


def test_an_abandoned_attempts_samples_are_not_the_runs(tmp_path):
    lost = [{"step": step, "prompt": "once", "text": f" lost {step}"} for step in (5, 10, 15, 20)]
    size = sum(len(json.dumps(row)) + 1 for row in lost)
    kept = [{"step": 12, "prompt": "once", "text": " kept 12"}]
    for name, sizes in (("run", {"samples_bytes": size}), ("older", {})):
        attempts = [attempt_row(0, 0), attempt_row(10, 9, **sizes)]
        folder = make_run(tmp_path / name, [training_row(1)], attempts=attempts, samples=[*lost, *kept])
        steps = [row["step"] for row in read_run(folder).samples]
        assert steps == ([5, 10, 12] if sizes else [5, 10, 15, 20, 12])


def test_tokens_after_the_last_logged_row_continue_its_slope(tmp_path):
    rows = [training_row(10), {"step": 10, "eval/loss": 3.0}, {"step": 15, "eval/loss": 2.5}]
    steps = {"training": {"max_steps": 15}}
    page = report(make_run(tmp_path / "run", rows, config=steps, step=15, loss=2.25))
    assert "Training loss 2.2500" in page.text, "of step 15"
    assert page.data["runs"][0]["evaluation"]["tokens"] == [10_000, 15_000]
    assert "Tokens 15k " in page.text
    exact = report(make_run(tmp_path / "exact", [training_row(10), training_row(15)], step=15))
    assert "Tokens 15k " in exact.text
    assert "Tokens 15k " in report(make_run(tmp_path / "odd", [training_row(15)], step=10**400)).text


def test_curves_are_the_rows_of_metrics(tmp_path):
    rows = [training_row(step, layers=4, experts=8) for step in range(1, 101)]
    rows[49] |= {"eval/loss": 3.25, "eval/bits_per_byte": 1.5}
    page = report(make_run(tmp_path / "run", rows))
    run = page.data["runs"][0]
    assert run["train"]["step"] == list(range(1, 101))
    assert run["train"]["tokens"] == [1000 * step for step in range(1, 101)]
    assert run["train"]["hours"] == pytest.approx([step / 3600 for step in range(1, 101)], rel=1e-5)
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "perf/tokens_per_second"):
        assert run["train"][key] == pytest.approx([row[key] for row in rows], rel=1e-5)
    assert run["train"]["experts/dead"] == [0 + 1 + 2 + 3] * 100
    assert run["evaluation"] == {
        "step": [50], "tokens": [50_000], "hours": [pytest.approx(50 / 3600, rel=1e-5)],
        "eval/loss": [3.25], "eval/bits_per_byte": [1.5],
    }  # fmt: skip
    lines = {chart["id"]: chart["lines"] for chart in page.data["charts"]}
    assert [line["value"] for line in lines["bits-per-byte"]] == [2.5], "zlib's"
    assert "3.2500 at step 50" in page.text
    assert "5M (2M active)" in page.text


@pytest.mark.parametrize(("layers", "experts", "rows"), [(4, 8, 30), (48, 128, 60), (1, 2, 1)])
def test_expert_maps_hold_the_loads_and_stay_small(layers, experts, rows):
    table = [training_row(step, layers=layers, experts=experts) for step in range(1, rows + 1)]
    for row in table:
        row["moe/load"] = expert_loads(row["moe/load"])
    maps = expert_maps(table)
    assert maps is not None
    columns = len(maps["steps"])
    assert layers * experts * columns <= 400_000
    assert (len(maps["load"]), len(maps["load"][0]), len(maps["load"][0][0])) == (layers, experts, columns)
    for layer in range(layers):
        for column in range(columns):
            loads = [maps["load"][layer][expert][column] for expert in range(experts)]
            assert sum(loads) / experts == pytest.approx(100, abs=1), "the mean load is 1"
            assert maps["peak"][layer][column] == max(loads)
    mean = (experts + 1) / 2
    assert maps["last"][0] == [round(100 * (expert + 1) / mean) for expert in range(experts)]
    assert maps["layers"] == list(range(layers))


def test_text_of_the_run_is_never_markup(tmp_path):
    rows = [
        training_row(step, layers=2, experts=4, **{f"train/source/{NASTY}/loss": 1.0}) for step in (1, 2, 3)
    ]
    rows[2] |= {"train/skipped": NASTY, "train/loss": None}
    run = make_run(
        tmp_path / "run",
        rows,
        attempts=[attempt_row(0, 0), attempt_row(1, 1.5, NASTY, device=NASTY, versions={"torch": NASTY})],
        samples=[{"step": 1, "prompt": NASTY, "text": NASTY}],
        config={"run": {"name": NASTY}, "data": {"sources": [{"store": NASTY}], NASTY: NASTY}},
        state=NASTY,
        reason=NASTY,
    )  # fmt: skip
    clean = report(make_run(tmp_path / "clean", [training_row(1, layers=2, experts=4)], reason="x"))
    page = report(run)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == [tag for tag, _ in clean.tags].count("script") == 3
    assert "img" not in tags
    assert tags.count("title") == 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") >= 6, "shown as it is"
    assert NASTY in page.data["runs"][0]["name"]
    assert not {"<", ">", "&"} & set(page.raw_data), "nothing that could end the script's element"
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none';"), "the page loads nothing"


def test_a_skipped_step_and_a_restart_are_marked(tmp_path):
    rows = [training_row(step) for step in range(1, 11)]
    rows[5] |= {"train/skipped": "overflow", "train/loss": None, "train/grad_norm": None}
    attempts = [attempt_row(0, 0), attempt_row(7, 1000, "accelerate", world_size=4), attempt_row(10, 2000)]
    for row in rows[7:]:
        row["time"] += 1000
    run = make_run(tmp_path / "run", rows, attempts=attempts)
    page = report(run)
    series = page.data["runs"][0]
    assert [(mark["step"], mark["label"]) for mark in series["skipped"]] == [(6, "overflow")]
    assert series["skipped"][0]["value"] == pytest.approx(rows[4]["train/loss"], rel=1e-5)
    assert [(mark["step"], mark["label"]) for mark in series["restarts"]] == [(7, "accelerate × 4")]
    assert series["train"]["train/loss"][5] is None
    assert "overflow" in page.text
    assert "accelerate" in page.text


def test_time_leaves_out_pauses_and_lost_work(tmp_path):
    """Ten steps of a second each in 4 attempts' time: 5 s of work, a pause, steps 4 and 5 done again."""
    first = [training_row(step) for step in range(1, 6)]
    second = [training_row(step, time=START + 1000 + step - 3) for step in range(4, 11)]
    run = read_run(
        make_run(tmp_path / "run", [*first, *second], attempts=[attempt_row(0, 0), attempt_row(3, 1000)])
    )
    assert [row["step"] for row in run.rows] == list(range(1, 11))
    assert training_seconds(run) == pytest.approx(10.0)
    assert run_series(run, "run").train["hours"] == pytest.approx(
        [step / 3600 for step in range(1, 11)], rel=1e-5
    )
    rows = [training_row(step, time=START + time) for step, time in ((1, 1), (2, 2), (3, 1e9), (4, 5))]
    clock_was_set = read_run(make_run(tmp_path / "set", rows))
    assert training_seconds(clock_was_set) == pytest.approx(4.0)


def test_many_rows_become_few_points_that_keep_spikes(tmp_path, monkeypatch):
    monkeypatch.setattr(report_charts, "POINTS", 50)
    rows = [training_row(step) for step in range(1, 1001)]
    rows[500]["train/grad_norm"] = 99.0
    rows[999]["eval/loss"] = 2.5
    page = report(make_run(tmp_path / "run", rows))
    train = page.data["runs"][0]["train"]
    assert len(train["step"]) == 50
    assert all(len(column) == 50 for column in train.values())
    assert max(train["train/grad_norm"]) == 99.0
    assert train["train/loss"][0] == pytest.approx(sum(row["train/loss"] for row in rows[:20]) / 20, rel=1e-5)
    assert "up to 20 rows" in page.text
    assert page.data["runs"][0]["evaluation"]["step"] == [1000]


def test_several_runs_show_the_settings_that_differ(tmp_path):
    rows = [training_row(step) for step in (1, 2)]
    left = make_run(
        tmp_path / "left", rows, config={"optimizer": {"learning_rate": 0.001, "weight_decay": 0.1}}
    )
    right = make_run(
        tmp_path / "right", rows, config={"optimizer": {"learning_rate": 0.005, "weight_decay": 0.1}}
    )
    page = report(left, right)
    assert [run["name"] for run in page.data["runs"]] == ["left", "right"]
    assert "optimizer.learning_rate 0.001 0.005" in page.text
    assert "weight_decay" not in page.text
    charts = {chart["id"]: {curve["run"] for curve in chart["curves"]} for chart in page.data["charts"]}
    assert charts["loss-chart"] == {0, 1}
    same = report(left, left)
    assert len({run["name"] for run in same.data["runs"]}) == 1
    assert "The runs have the same settings." in same.text


def test_one_run_shows_the_settings_that_differ_from_the_defaults(tmp_path):
    tree = to_dict(Config())
    tree["training"]["max_steps"] = 77
    page = report(make_run(tmp_path / "run", [training_row(1)], config=tree))
    assert "training.max_steps 77 1000" in page.text
    assert "optimizer.learning_rate" not in page.text


def test_sources_have_curves_of_their_own(tmp_path):
    rows = [
        training_row(step, train__source__code__loss=2.0, train__source__prose__loss=3.0) for step in (1, 2)
    ]
    rows[1] |= {"eval/loss": 2.0, "eval/source/code/loss": 1.0, "eval/source/code/bits_per_byte": 0.5}
    charts = {chart["id"]: chart for chart in report(make_run(tmp_path / "run", rows)).data["charts"]}
    assert [curve["label"] for curve in charts["source-loss"]["curves"]] == ["code", "prose"]
    assert [curve["label"] for curve in charts["source-eval"]["curves"]] == ["code"]
    assert [curve["key"] for curve in charts["source-bits"]["curves"]] == ["eval/source/code/bits_per_byte"]
    assert "source-tokens" not in charts


def test_every_file_may_be_missing_or_torn(tmp_path):
    """A page can be written about any state that a killed or running process has left."""
    whole = make_run(tmp_path / "whole", [training_row(step, layers=2, experts=4) for step in (1, 2, 3)])
    for name in ("config.yaml", "status.json", "attempts.jsonl", "metrics.jsonl"):
        text = (whole / name).read_text()
        for content in (None, text[: len(text) * 2 // 3], "\0\0"):
            (whole / name).unlink()
            if content is not None:
                (whole / name).write_text(content)
            assert report(whole).sections[0] == "summary", (name, content)
            (whole / name).write_text(text)
    (whole / "config.yaml").unlink()
    (whole / "attempts.jsonl").unlink()
    (whole / "metrics.jsonl").unlink()
    assert "no metrics yet" in report(whole).text


def test_what_is_no_number_for_a_chart_is_left_out(tmp_path):
    """JSON has integers of any length, and Python reads its Infinity."""
    rows = [
        dict.fromkeys(training_row(1, layers=2, experts=4)) | {"step": 1},
        {"step": 2, "train/loss": "high", "moe/load": [[1], [1, 2]], "time": "noon", "train/tokens": True},
        {"step": 3, "train/loss": 10**400, "train/grad_norm": 2.0, "moe/load": [[1e308, 0.5]]},
        {"step": 4, "train/loss": 1.0, "moe/load": [[None, 1.0]], "moe/layer_x/load_max": 1},
    ]
    page = report(make_run(tmp_path / "run", rows, attempts=[{"step": None}, {"step": 1, "versions": 3}]))
    assert page.data["runs"][0]["train"]["train/loss"] == [None, None, None, 1.0]
    assert page.data["experts"][0]["last"] == [[0, 200]]
