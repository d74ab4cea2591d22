"""`report.html` of a ladder: its losses, the law fitted to them, and what more compute would give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm_pretrain.errors import ConfigError
from llm_pretrain.ladder.family import member
from llm_pretrain.ladder.measurements import (
    rate_loss,
    read_ladder,
    shortcomings,
    tried_factors,
    used_by,
)
from llm_pretrain.ladder.planning import MAX_COMPUTE_RATIO, MAX_LOSS_RATIO, Forecast, RunBudget
from llm_pretrain.ladder.points import Ladder, Point, Training
from llm_pretrain.ladder.scaling_law import INTERVAL_LEVEL, LEAST_NOISE, Counting, Fit, Prediction
from llm_pretrain.tracking import Table, quantity, render_page, write_page

BEYOND = (1.0, 3.0, 10.0, MAX_COMPUTE_RATIO)
"""Multiples of the largest point's compute with their best size; the frontier ends at the last."""
ISO_LEVELS = (4.0, MAX_COMPUTE_RATIO)
"""Multiples of the largest point's compute with an IsoFLOP curve, besides that of each size's longest run."""
_NEAR = 1.2
"""Points within this factor of a level's compute are drawn at its curve."""
_FRONTIER_POINTS = 40
_COUNTINGS: dict[Counting, str] = {
    "parameters": "active parameters without embedding and head",
    "parameters_with_embedding": "active parameters with embedding and head",
}


class Best(NamedTuple):
    """The size that the law predicts to end best with some compute."""

    training: Training
    prediction: Prediction


class Frontier:
    """The law's losses over the sizes of the ladder's family.

    Args:
        forecast: Of the ladder.

    Raises:
        ConfigError: too few points for a law.
    """

    def __init__(self, forecast: Forecast):
        self.forecast, self.fit = forecast, forecast.decayed
        most = RunBudget(self.fit.largest_flops * max(BEYOND))
        own = {point.hidden_size for point in self.fit.points}
        widths = own | {choice.size.hidden_size for choice in forecast.choices(most)}
        self._sizes = [forecast.sizes.of(width) for width in sorted(widths)]

    def at(self, flops: float) -> dict[Training, float]:
        """Every size, trained with this compute -> the law's loss; ascending."""
        text, found = self.forecast.ladder.unique_tokens, list[Training]()
        for size in self._sizes:
            tokens = max(1, round(flops / size.flops_per_token))
            found.append(dataclasses.replace(Training.of(size, 1, text), tokens=tokens, flops=flops))
        return {training: self.fit.law.of(training) for training in found}

    def best(self, flops: float) -> Best:
        """The size with the least loss at this compute."""
        losses = self.at(flops)
        best = min(losses, key=losses.__getitem__)
        return Best(best, self.fit.predict(best))


def write_ladder_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page about a ladder, which may be unfinished.

    Args:
        folder: Of the ladder.
        output: The page's file, which is returned; `report.html` of the folder if None.

    Raises:
        ConfigError: the folder has no ladder.
        CheckpointError: a run's metrics.jsonl is damaged.
        DataError: one of the ladder's files is damaged.
        OutputError: the page cannot be written, or there is another file, which would be lost.
    """
    folder = Path(folder)
    return write_page(output or folder / "report.html", lambda: _render(read_ladder(folder)))


def _render(ladder: Ladder) -> str:
    decayed = [point for point in ladder.points if point.decayed]
    notes, frontier = [f"{line[0].upper()}{line[1:]}." for line in shortcomings(ladder)], None
    try:
        frontier = Frontier(Forecast(ladder))
    except ConfigError as error:
        notes.append(f"No law is fitted: {error.problems[0].removeprefix(f'{ladder.folder}: ')}.")
    else:
        notes += [f"Warning: {line}." for line in _warnings(frontier)]
    fit = frontier.fit if frontier else None
    charts = [_losses_chart(decayed, frontier)] if decayed else []
    if frontier:
        charts += [_iso_chart(frontier), _residuals_chart(frontier.fit)]
    return render_page(
        "ladder_report.html",
        title=ladder.folder.absolute().name,
        folder=str(ladder.folder),
        summary=_summary(ladder, decayed),
        notes=notes,
        charts=charts,
        interval=f"{INTERVAL_LEVEL:.0%}",
        law=_law_lines(fit) if fit else [],
        laws=_laws_table(fit) if fit else None,
        best=_best_table(ladder, frontier) if frontier else None,
        points=_points_table(ladder, decayed, fit),
        stable=_points_table(ladder, [point for point in ladder.points if not point.decayed], None),
        script="ladder_report.js",
        data={"charts": charts},
    )


def _warnings(frontier: Frontier) -> list[str]:
    """Why the law may mislead, at the compute of the largest point and far beyond; each once."""
    bests = (frontier.best(frontier.fit.largest_flops * multiple) for multiple in (BEYOND[0], BEYOND[-1]))
    return list(dict.fromkeys(line for best in bests for line in frontier.forecast.warnings(*best)))


def _summary(ladder: Ladder, decayed: Sequence[Point]) -> dict[str, str]:
    """What the ladder is and how far it is, by label."""
    factors, chosen = tried_factors(ladder), ladder.rate_factor
    used = used_by(ladder).flops
    checked = {factor: rate_loss(ladder, factor) for factor in factors}
    losses = [f"{loss:.4f} at {factor:g}" for factor, loss in checked.items() if loss < math.inf]
    best = min(decayed, key=lambda point: point.loss, default=None)
    sizes = ", ".join(str(rung.hidden_size) for rung in ladder.rungs)
    wanted = sum(len(rung.steps) for rung in ladder.rungs)
    flops = f"{_flops(ladder.budget.flops)} FLOPs"
    source = ladder.base.data.sources[0].store if ladder.base.data.sources else None
    entries = {
        "Family": f"{ladder.base.run.name}, hidden sizes {sizes}",
        "Store": f"{source or ''} {ladder.store_hash[:12]}, {quantity(ladder.unique_tokens)} tokens".strip(),
        "Budget": f"{ladder.budget.text}, about {flops}" if ladder.budget.seconds else flops,
        "FLOPs used": _flops(used) if used else None,
        "Decayed points": f"{len(decayed)} of {wanted}",
        "Learning rates": f"{chosen:g} × the base's" if chosen else "not chosen yet",
        "Losses of the rate check": ", ".join(losses),
        "Lowest loss": f"{best.loss:.4f}, hidden size {best.hidden_size}" if best else None,
        "Bits per byte": f"{best.bits_per_byte:.4f}" if best and best.bits_per_byte else None,
    }
    return {label: text for label, text in entries.items() if text}


def _losses_chart(decayed: Sequence[Point], frontier: Frontier | None) -> dict[str, Any]:
    """Loss against FLOPs: a line for each size, and the frontier beyond them with its interval."""
    traces = []
    for color, size in enumerate(sorted({point.hidden_size for point in decayed})):
        own = sorted((point for point in decayed if point.hidden_size == size), key=lambda each: each.tokens)
        x, y = [each.flops for each in own], [each.loss for each in own]
        traces.append(_trace(f"h{size}", "line+points", color, own, x, y))
    if frontier:
        first, last = min(point.flops for point in decayed), frontier.fit.largest_flops * BEYOND[-1]
        steps = range(_FRONTIER_POINTS)
        bests = [frontier.best(first * (last / first) ** (k / (_FRONTIER_POINTS - 1))) for k in steps]
        trained, flops = [each.training for each in bests], [each.training.flops for each in bests]
        band = {
            "low": [each.prediction.low for each in bests],
            "high": [each.prediction.high for each in bests],
        }
        losses = [each.prediction.loss for each in bests]
        line = _trace("frontier", "dashed", None, trained, flops, losses)
        interval = {"name": "interval", "kind": "band", "color": None, "x": flops, **band}
        traces = [interval | {"legend": False}, *traces, line | {"legend": False}]
    return _chart("losses", "Loss against compute, by hidden size", "FLOPs of a training", traces)


def _iso_chart(frontier: Frontier) -> dict[str, Any]:
    """Loss against parameters at some values of compute, with the points that have about as much."""
    fit, traces = frontier.fit, []
    counting, most = fit.best.counting, fit.largest_flops
    trained = [getattr(point, counting) for point in fit.points]
    longest = {point.hidden_size: point.flops for point in sorted(fit.points, key=lambda each: each.flops)}
    levels = [*sorted(longest.values()), *(most * multiple for multiple in ISO_LEVELS)]
    for color, level in enumerate(levels):
        losses = frontier.at(level)
        best = min(losses, key=losses.__getitem__)
        shown = {
            each: loss
            for each, loss in losses.items()
            if loss <= losses[best] * MAX_LOSS_RATIO
            or (level <= most and min(trained) <= getattr(each, counting) <= max(trained))
        }
        near = {each: each.loss for each in fit.points if 1 / _NEAR <= each.flops / level <= _NEAR}
        name = _flops(level)
        curve = "line" if level <= most else "dashed"
        for kind, entries in ((curve, shown), ("points", near), ("best", {best: losses[best]})):
            if entries:
                x = [getattr(each, counting) for each in entries]
                trace = _trace(name, kind, color, list(entries), x, list(entries.values()))
                traces.append(trace | {"legend": entries is shown})
    title = f"IsoFLOP curves of the law: loss against {_COUNTINGS[counting]}, by FLOPs"
    return _chart("iso", title, "active parameters", traces)


def _residuals_chart(fit: Fit) -> dict[str, Any]:
    """Log-loss less the law's, in percent, by tokens."""
    traces = []
    for color, size in enumerate(sorted({point.hidden_size for point in fit.points})):
        own = {
            point: 100 * each
            for point, each in zip(fit.points, fit.residuals, strict=True)
            if point.hidden_size == size
        }
        tokens = [point.tokens for point in own]
        traces.append(_trace(f"h{size}", "points", color, list(own), tokens, list(own.values())))
    return _chart("residuals", "Measured less fitted loss, by hidden size", "tokens", traces, "% of the loss")


def _chart(
    id: str, title: str, horizontal: str, traces: list[dict[str, Any]], unit: str = "nats per token"
) -> dict[str, Any]:
    exponents = "e" if "FLOPs" in horizontal else "B"  # plotly's names: 1e+12, or 1k, 1M, 1B
    return {"id": id, "title": title, "unit": unit, "horizontal": horizontal, "exponents": exponents} | {
        "traces": traces
    }


def _trace(
    name: str,
    kind: str,
    color: int | None,
    trainings: Sequence[Training],
    x: Sequence[float],
    y: Sequence[float],
) -> dict[str, Any]:
    """A curve as the page's script draws it; the text of a training is shown when it is pointed at."""
    texts = [
        f"hidden size {each.hidden_size}, {quantity(each.tokens)} tokens, {_flops(each.flops)} FLOPs"
        for each in trainings
    ]
    return {"name": name, "kind": kind, "color": color, "x": x, "y": y, "text": texts}


def _law_lines(fit: Fit) -> list[str]:
    """The law in words, one sentence each."""
    law, total = fit.best, fit.best.alpha + fit.best.beta
    lines = [
        f"loss = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}, in nats per "
        f"token, where N are {_COUNTINGS[law.counting]}, and D are tokens; repeated ones count less "
        "(arXiv:2305.16264). It is the better of the two below; predictions are their mean.",
        f"{law.E:.4g} nats per token is the loss that neither more parameters nor more tokens would remove.",
        f"With new text, the best N grows with compute to the power of {law.beta / total:.2f}, the best D to "
        f"the power of {law.alpha / total:.2f}.",
        f"Noise of a loss: {100 * fit.noise:.2g} % (one standard deviation), at least the "
        f"{100 * LEAST_NOISE:.1g} % that seeds are taken to differ by.",
    ]
    if fit.extrapolation_error is not None:
        lines.append(
            f"A fit without the points of most compute missed them by {100 * fit.extrapolation_error:.2g} % "
            "for every factor e of compute beyond its own; beyond the points the interval is at least as "
            "wide."
        )
    return lines


def _laws_table(fit: Fit) -> Table:
    """The law in each counting, the better first."""
    rows = list[list[str]]()
    for law, weight in zip(fit.law.laws, fit.law.weights, strict=True):
        error = sum(abs(math.log(point.loss / law.of(point))) for point in fit.points) / len(fit.points)
        numbers = (f"{each:.4g}" for each in (law.E, law.A, law.alpha, law.B, law.beta))
        rows.append([_COUNTINGS[law.counting], *numbers, f"{100 * error:.2g} %", f"{weight:.2f}"])
    return Table(["N counts", "E", "A", "alpha", "B", "beta", "Mean error", "Weight"], rows)


def _best_table(ladder: Ladder, frontier: Frontier) -> Table:
    """The best size for multiples of the largest point's compute."""
    rows = list[list[str]]()
    for multiple in BEYOND:
        training, prediction = frontier.best(frontier.fit.largest_flops * multiple)
        bits = frontier.forecast.bits_per_byte(prediction.loss)
        rows.append(
            [
                f"{multiple:g} ×",
                *_trained(ladder, training),
                f"{prediction.loss:.4f}",
                f"{prediction.low:.4f} to {prediction.high:.4f}",
                f"{bits:.4f}" if bits else "–",
            ]
        )
    heads = ["Compute", *_TRAINED, "Predicted loss", f"{INTERVAL_LEVEL:.0%} interval", "Bits per byte"]
    return Table(heads, rows)


_TRAINED = ["Hidden size", "Layers", "Parameters", "With embedding", "Tokens", "Epochs", "FLOPs"]


def _trained(ladder: Ladder, of: Training) -> list[str]:
    """Cells of a training: what `_TRAINED` names."""
    layers = member(ladder.base, of.hidden_size).model.num_hidden_layers
    counts = map(quantity, (of.parameters, of.parameters_with_embedding, of.tokens))
    epochs = f"{of.tokens / of.unique_tokens:.2f}"
    return [str(of.hidden_size), str(layers), *counts, epochs, _flops(of.flops)]


def _points_table(ladder: Ladder, points: Iterable[Point], fit: Fit | None) -> Table | None:
    """The points by size and tokens, beside the fit if there is one."""
    heads, rows = [*_TRAINED, "Loss", "Bits per byte"], list[list[str]]()
    residuals = dict(zip(fit.points, fit.residuals, strict=True)) if fit else {}
    for point in sorted(points, key=lambda each: (each.hidden_size, each.tokens)):
        bits = "–" if point.bits_per_byte is None else f"{point.bits_per_byte:.4f}"
        row = [*_trained(ladder, point), f"{point.loss:.4f}", bits]
        if fit:
            row += [f"{fit.law.of(point):.4f}", f"{100 * residuals[point]:+.2f} %"]
        rows.append(row)
    if fit:
        heads += ["Fitted", "Residual"]
    return Table(heads, rows) if rows else None


def _flops(value: float) -> str:
    """`1.2e13`."""
    return f"{value:.3g}".replace("e+", "e")
