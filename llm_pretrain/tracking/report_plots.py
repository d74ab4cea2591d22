"""Which charts a report has: titles, units, curves and reference lines, as plain data for `report.js`.

A chart without a single number in any run is left out, and so is a section without charts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llm_pretrain.tracking.report_data import RunSeries
from llm_pretrain.tracking.run_files import RunRecord, number

GIBIBYTE = 2**30


@dataclass
class Curve:
    """One curve: a column of a run's `train` or `evaluation`."""

    run: int
    table: Literal["train", "evaluation"]
    key: str
    label: str
    markers: bool = False


@dataclass
class Chart:
    """One chart.

    Args:
        id: Of its element.
        title: What is drawn.
        unit: Of the vertical axis.
        curves: What is drawn, at least one.
        scale: Multiplies the values.
        log: Vertical axis logarithmic from the start.
        smooth: Whether the page's smoothing applies.
        skipped: Whether skipped steps are marked.
        lines: Horizontal reference lines: `{value, label}`.
        wide: Whether it takes the page's whole width.
    """

    id: str
    title: str
    unit: str
    curves: list[Curve] = field(default_factory=list)
    scale: float = 1.0
    log: bool = False
    smooth: bool = False
    skipped: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    wide: bool = False

    def plain(self) -> dict[str, Any]:
        """As JSON's own types."""
        return asdict(self)


@dataclass
class Section:
    """Charts under one heading."""

    id: str
    title: str
    charts: list[Chart]
    note: str = ""


class Charts:
    """Builds the sections of some runs' charts."""

    def __init__(self, runs: Sequence[RunRecord], series: Sequence[RunSeries]):
        self.runs, self.series = runs, series

    def sections(self) -> list[Section]:
        """Every section that has a chart, in the page's order."""
        everything = [
            Section("loss", "Loss", list(self._loss())),
            Section("evaluation", "Evaluation", list(self._evaluation())),
            Section("sources", "Sources", list(self._sources()), "Loss of each source of the mixture."),
            Section("optimisation", "Optimisation", list(self._optimisation())),
            Section("speed", "Speed and memory", list(self._speed())),
            Section("experts", "Experts", list(self._experts()), _EXPERTS_NOTE),
        ]
        sections = []
        for section in everything:
            section.charts = [chart for chart in section.charts if chart.curves]
            narrow = [chart for chart in section.charts if not chart.wide]
            if len(narrow) % 2:
                narrow[-1].wide = True  # alone in its row
            if section.charts:
                sections.append(section)
        return sections

    def _curves(self, *wanted: tuple[str, str, str], nonzero: bool = False) -> list[Curve]:
        """Curves of every run that has the column; `wanted` holds table, key and label."""
        curves = []
        for index, series in enumerate(self.series):
            for table, key, label in wanted:
                column = getattr(series, table).get(key, [])
                if any(value is not None and (value or not nonzero) for value in column):
                    kind: Any = table
                    curves.append(Curve(index, kind, key, label, markers=table == "evaluation"))
        return curves

    def _loss(self) -> Iterator[Chart]:
        yield Chart(
            "loss-chart",
            "Cross-entropy",
            "nats per token",
            self._curves(("train", "train/loss", "training"), ("evaluation", "eval/loss", "evaluation")),
            smooth=True,
            skipped=True,
            wide=True,
        )
        yield Chart(
            "other-losses",
            "Auxiliary and z losses, with their coefficients",
            "per token",
            self._curves(
                ("train", "train/aux_loss", "load balance"),
                ("train", "train/router_z_loss", "router z"),
                ("train", "train/z_loss", "output z"),
                nonzero=True,
            ),
            log=True,
            smooth=True,
            wide=True,
        )

    def _evaluation(self) -> Iterator[Chart]:
        yield Chart(
            "eval-loss",
            "Evaluation loss",
            "nats per token",
            self._curves(("evaluation", "eval/loss", "evaluation")),
        )
        known = {bits for run in self.runs if (bits := _zlib_bits(run)) is not None}
        yield Chart(
            "bits-per-byte",
            "Bits per byte of the validation text",
            "bits per byte",
            self._curves(("evaluation", "eval/bits_per_byte", "model")),
            lines=[{"value": bits, "label": f"zlib -9: {bits:.3f}"} for bits in sorted(known)[:3]],
        )

    def _sources(self) -> Iterator[Chart]:
        charts = (
            ("source-loss", "Training loss by source", "nats per token", "train", "train/source/", "/loss"),
            (
                *("source-eval", "Evaluation loss by source", "nats per token"),
                *("evaluation", "eval/source/", "/loss"),
            ),
            (
                *("source-bits", "Bits per byte by source", "bits per byte"),
                *("evaluation", "eval/source/", "/bits_per_byte"),
            ),
            (
                *("source-tokens", "Loss tokens by source", "tokens per step"),
                *("train", "train/source/", "/loss_tokens"),
            ),
        )  # fmt: skip
        for name, title, unit, table, prefix, suffix in charts:
            keys = dict.fromkeys(
                key
                for series in self.series
                for key in getattr(series, table)
                if key.startswith(prefix) and key.endswith(suffix)
            )
            wanted = [(table, key, key.removeprefix(prefix).removesuffix(suffix)) for key in keys]
            yield Chart(name, title, unit, self._curves(*wanted), smooth=table == "train")

    def _optimisation(self) -> Iterator[Chart]:
        yield Chart(
            "learning-rate",
            "Learning rate",
            "per step",
            self._curves(("train", "train/learning_rate", "learning rate")),
        )
        limits = {limit for run in self.runs if (limit := run.number("training", "max_grad_norm"))}
        yield Chart(
            "grad-norm",
            "Gradient norm, before clipping",
            "norm",
            self._curves(("train", "train/grad_norm", "gradient norm")),
            smooth=True,
            skipped=True,
            lines=[{"value": limit, "label": f"clipped to {limit:g}"} for limit in sorted(limits)[:3]],
        )
        yield Chart(
            "loss-scale",
            "Loss scale",
            "factor",
            self._curves(("train", "train/loss_scale", "loss scale")),
            log=True,
            skipped=True,
        )

    def _speed(self) -> Iterator[Chart]:
        speed = ("train", "perf/tokens_per_second", "loss tokens")
        yield Chart("speed-chart", "Loss tokens per second", "tokens / s", self._curves(speed), smooth=True)
        mfu = self._curves(("train", "perf/mfu", "MFU"))
        yield Chart("mfu", "Model FLOPs utilisation", "%", mfu, scale=100.0, smooth=True)
        memory = self._curves(("train", "perf/memory_bytes", "memory"))
        yield Chart("memory", "Memory of the first process", "GiB", memory, scale=1 / GIBIBYTE)
        seconds = self._curves(("train", "perf/step_seconds", "step"))
        yield Chart("step-seconds", "Time of a step", "seconds", seconds, smooth=True)

    def _experts(self) -> Iterator[Chart]:
        yield Chart(
            "expert-peak",
            "Most loaded expert of any layer",
            "times an even load",
            self._curves(("train", "experts/load_max", "largest load")),
            smooth=True,
            lines=[{"value": 1.0, "label": "even"}],
        )
        entropy = (
            ("train", "experts/entropy_mean", "mean of the layers"),
            ("train", "experts/entropy_lowest", "lowest layer"),
        )
        counts = {count for run in self.runs if (count := run.number("model", "num_experts"))}
        highest = [{"value": math.log(count), "label": f"even over {count:g}"} for count in sorted(counts)]
        yield Chart(
            "router-entropy", "Router entropy", "nats", self._curves(*entropy), smooth=True, lines=highest[:3]
        )
        yield Chart(
            "dead-experts",
            "Experts without a token, over all layers",
            "experts",
            self._curves(("train", "experts/dead", "dead experts")),
        )


_EXPERTS_NOTE = "A load of 1 is even: the expert gets as many tokens as the mean of its layer."


def _zlib_bits(run: RunRecord) -> float | None:
    """What zlib needs for the validation text, as the newest attempt that knows it says."""
    for attempt in reversed(run.attempts):
        if (bits := number(attempt.get("zlib_bits_per_byte"))) is not None:
            return bits
    return None
