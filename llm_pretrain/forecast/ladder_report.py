"""`report.html` of a ladder: its losses, the law fitted to them, and what more compute would give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.measurements import read_ladder, shortcomings, used_flops
from llm_pretrain.forecast.planning import MAX_COMPUTE_RATIO, Choice, Forecast, best_of
from llm_pretrain.forecast.points import Ladder, Point, Training
from llm_pretrain.forecast.scaling_law import INTERVAL_LEVEL, Fit
from llm_pretrain.text import quantity
from llm_pretrain.tracking.report import Table, render_page, write_page

BEYOND = (1.0, 3.0, 10.0, MAX_COMPUTE_RATIO)
"""Multiples of the largest point's compute for which losses are predicted."""


def write_ladder_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page about a ladder, which may be unfinished, and return the page's path.

    Args:
        folder: The ladder's folder.
        output: The page's file; None for `report.html` in the folder.

    Raises:
        ConfigError: the folder has no ladder.
        CheckpointError: a run's metrics.jsonl is damaged.
        DataError: one of the ladder's files is damaged.
        OutputError: the page cannot be written, or would replace a file that is no such page.
    """
    folder = Path(folder)
    return write_page(output or folder / "report.html", lambda: _render(read_ladder(folder)))


def _render(ladder: Ladder) -> str:
    forecast, decayed = Forecast(ladder), [point for point in ladder.points if point.decayed]
    notes = [f"{line[0].upper()}{line[1:]}." for line in shortcomings(ladder)]
    fit, predicted = None, list[list[Choice]]()
    try:
        fit = forecast.decayed
    except ConfigError as error:
        notes.append(f"No law is fitted: {error.problems[0].removeprefix(f'{ladder.folder}: ')}.")
    else:
        predicted = [forecast.choices(fit.largest_flops * multiple) for multiple in BEYOND]
        bests = [best_of(choices) for choices in (predicted[0], predicted[-1])]
        warnings = [line for best in bests for line in forecast.warnings(best)]
        notes += [f"Warning: {line}." for line in dict.fromkeys(warnings)]
    charts = [_compute_chart(decayed, predicted)] if decayed else []
    charts += [_sizes_chart(predicted)] if predicted else []
    return render_page(
        "ladder_report.html",
        title=ladder.folder.absolute().name,
        folder=str(ladder.folder),
        summary=_summary(ladder, decayed, fit),
        notes=notes,
        charts=charts,
        interval=f"{INTERVAL_LEVEL:.0%}" if predicted else None,
        points=_points_table(decayed, fit),
        script="ladder_report.js",
        data={"charts": charts},
    )


def _summary(ladder: Ladder, decayed: Sequence[Point], fit: Fit | None) -> dict[str, str]:
    """Label -> text about the ladder: its sizes and data, its progress, and its law."""
    used = used_flops(ladder)
    best = min(decayed, key=lambda point: point.loss, default=None)
    sizes = ", ".join(str(rung.hidden_size) for rung in ladder.rungs)
    wanted = sum(len(rung.steps) for rung in ladder.rungs)
    source = ladder.base.data.sources[0].store if ladder.base.data.sources else None
    entries = {
        "Family": f"{ladder.base.run.name}, hidden sizes {sizes}",
        "Store": f"{source or ''} {ladder.store_hash[:12]}, {quantity(ladder.unique_tokens)} tokens".strip(),
        "Budget": ladder.budget,
        "FLOPs used": _flops(used) if used else None,
        "Decayed points": f"{len(decayed)} of {wanted}",
        "Lowest loss": f"{best.loss:.4f}, hidden size {best.hidden_size}" if best else None,
        "Bits per byte": f"{best.bits_per_byte:.4f}" if best and best.bits_per_byte else None,
    }
    if fit:
        law = fit.law
        entries["Law"] = (
            f"loss = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}, in nats "
            "per token, where N are active parameters with embedding and head, and D are tokens; repeated "
            "ones count less (arXiv:2305.16264)"
        )
        entries["Noise of a loss"] = f"{100 * fit.noise:.2g} % (one standard deviation)"
    return {label: text for label, text in entries.items() if text}


def _compute_chart(decayed: Sequence[Point], predicted: list[list[Choice]]) -> dict[str, Any]:
    """Loss against FLOPs: a line for each size, and beyond these the predicted loss of the best size."""
    traces = []
    for color, size in enumerate(sorted({point.hidden_size for point in decayed})):
        own = sorted((point for point in decayed if point.hidden_size == size), key=lambda each: each.tokens)
        traces.append(_trace(f"h{size}", "line+points", color, own, [each.loss for each in own]))
    if predicted:
        bests = [best_of(choices) for choices in predicted]
        trained = [each.training for each in bests]
        line = _trace("predicted", "dashed", None, trained, [each.prediction.loss for each in bests])
        low, high = ([each.prediction[edge] for each in bests] for edge in (1, 2))
        interval = line | {"name": "interval", "kind": "band", "low": low, "high": high, "legend": False}
        traces = [interval, *traces, line]
    return _chart("losses", "Loss against compute, by hidden size", "FLOPs of a training", traces)


def _sizes_chart(predicted: list[list[Choice]]) -> dict[str, Any]:
    """Predicted loss against parameters, for each value of compute, the best size marked."""
    traces = []
    for color, choices in enumerate(predicted):
        best = best_of(choices)
        name = f"{_flops(best.training.flops)} FLOPs"
        for kind, shown in (("line", choices), ("best", [best])):
            trained, losses = [each.training for each in shown], [each.prediction.loss for each in shown]
            trace = _trace(name, kind, color, trained, losses) | {"legend": kind == "line"}
            traces.append(trace | {"x": [each.parameters for each in trained]})
    title = "Predicted loss against active parameters, by compute"
    return _chart("sizes", title, "active parameters", traces)


def _chart(id: str, title: str, horizontal: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    exponents = "e" if "FLOPs" in horizontal else "B"  # plotly: "e" is 1e+12, "B" is 1k, 1M, 1B
    chart = {"id": id, "title": title, "unit": "nats per token", "horizontal": horizontal}
    return chart | {"exponents": exponents, "traces": traces}


def _trace(
    name: str, kind: str, color: int | None, trainings: Sequence[Training], losses: Sequence[float]
) -> dict[str, Any]:
    """A curve over FLOPs as the page's script draws it, with the text of each training."""
    texts = [
        f"hidden size {each.hidden_size}, {quantity(each.tokens)} tokens, {_flops(each.flops)} FLOPs"
        for each in trainings
    ]
    x = [each.flops for each in trainings]
    return {"name": name, "kind": kind, "color": color, "x": x, "y": losses, "text": texts}


def _points_table(points: Sequence[Point], fit: Fit | None) -> Table | None:
    """The points by size and tokens, beside the fit if there is one."""
    heads = ["Hidden size", "Parameters", "Tokens", "Epochs", "FLOPs", "Loss", "Bits per byte"]
    residuals, rows = dict(zip(fit.points, fit.residuals, strict=True)) if fit else {}, list[list[str]]()
    for point in sorted(points, key=lambda each: each.key):
        row = [str(point.hidden_size), quantity(point.parameters), quantity(point.tokens)]
        row += [f"{point.tokens / point.unique_tokens:.2f}", _flops(point.flops), f"{point.loss:.4f}"]
        row.append("–" if point.bits_per_byte is None else f"{point.bits_per_byte:.4f}")
        if fit:
            row += [f"{fit.law.of(point):.4f}", f"{100 * residuals[point]:+.2f} %"]
        rows.append(row)
    return Table(heads + (["Fitted", "Residual"] if fit else []), rows) if rows else None


def _flops(value: float) -> str:
    """`1.2e13`."""
    return f"{value:.3g}".replace("e+", "e")
