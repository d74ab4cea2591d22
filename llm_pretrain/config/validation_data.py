"""Impossible values in the `data` section that are about more than one number: sources, names, weights.

Called by `validation.py`; opens no store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from llm_pretrain.config.tree import DataConfig
from llm_pretrain.config.validation_ranges import LARGEST_INTEGER

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def data_problems(data: DataConfig, needs_data: bool) -> Iterator[str]:
    """One line for each problem of the sources and their weights, the field's name first."""
    if needs_data and not data.sources:
        yield (
            "data.sources: expected at least one token store, found none; make one with "
            "`llm-pretrain prepare`, then --data.sources '[{store: FOLDER}]'"
        )
    yield from _sources(data)
    yield from _names(data)
    yield from _weight_changes(data)


def _sources(data: DataConfig) -> Iterator[str]:
    """A weight may be 0 where a later change gives the source its share."""
    drawn_later = {k for change in data.weight_changes for k, weight in enumerate(change.weights) if weight}
    weights = [source.weight for source in data.sources]
    wrong = [
        k
        for k, weight in enumerate(weights)
        if not (math.isfinite(weight) and (weight > 0 or (weight == 0 and k in drawn_later)))
    ]
    for k, source in enumerate(data.sources):
        if not source.store.strip():
            yield f"data.sources[{k}].store: expected a folder, found {source.store!r}"
        if k in wrong:
            advice = "" if weights[k] else "; leave the source out, or bring it in with data.weight_changes"
            yield f"data.sources[{k}].weight: expected a number above 0, found {weights[k]}{advice}"
    if not wrong:
        yield from _total("data.sources", weights)


def _names(data: DataConfig) -> Iterator[str]:
    """What metrics call a source. One alone has no metrics of its own, so its folder may have any name."""
    first: dict[str, int] = {}
    for k, source in enumerate(data.sources):
        if source.name is None and (len(data.sources) == 1 or not source.store.strip()):
            continue
        label = source.label if source.name is None else source.name
        field, origin = f"data.sources[{k}].name", ", the folder's name" if source.name is None else ""
        if not _LABEL.fullmatch(label):
            yield (
                f"{field}: expected 1 to 64 letters, digits, `.`, `_` and `-`, the first no `.` or `-`, "
                f"found {label!r}{origin}; set {field}"
            )
        elif label in first:
            yield (
                f"{field}: expected a name of its own for the metrics, found {label!r}{origin}, which "
                f"data.sources[{first[label]}] has too; set {field}"
            )
        first.setdefault(label, k)


def _weight_changes(data: DataConfig) -> Iterator[str]:
    before = -1
    for j, change in enumerate(data.weight_changes):
        name = f"data.weight_changes[{j}]"
        if change.step < 0:
            yield f"{name}.step: expected 0 or more, found {change.step}"
        elif change.step > LARGEST_INTEGER:
            yield f"{name}.step: expected at most {LARGEST_INTEGER}, found {change.step}"
        elif change.step <= before:
            yield f"{name}.step: expected more than the {before} of the change before, found {change.step}"
        before = max(before, change.step)
        if len(change.weights) != len(data.sources):
            yield (
                f"{name}.weights: expected {len(data.sources)}, one for each of data.sources, "
                f"found {len(change.weights)}"
            )
        wrong = [k for k, weight in enumerate(change.weights) if not (math.isfinite(weight) and weight >= 0)]
        for k in wrong:
            yield f"{name}.weights[{k}]: expected 0 or a number above 0, found {change.weights[k]}"
        if change.weights and not wrong:
            yield from _total(f"{name}.weights", change.weights)


def _total(name: str, weights: Sequence[float]) -> Iterator[str]:
    total = sum(weights)
    if weights and total == 0:
        yield f"{name}: expected at least one weight above 0, found none"
    elif math.isinf(total) and all(map(math.isfinite, weights)):
        yield f"{name}: expected weights with a finite sum, found {total}; divide them all by one number"
