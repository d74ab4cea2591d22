"""Expert loads over a whole run, small enough to draw: heat maps over layers, experts and steps.

A load is an expert's share of its layer's tokens times the number of experts: 1 is even. 4 layers of 8
experts and 48 of 128 take the same room: the more experts, the wider the steps that a column stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from llm_pretrain.tracking.run_files import Row

CELLS = 400_000
"""Cells over all layers, experts and columns: about 1.5 MB of the page."""
COLUMNS = (24, 200)
"""Fewest and most columns."""


def expert_maps(rows: Iterable[Row]) -> dict[str, Any] | None:
    """Loads in hundredths, as integers; None for a run without mixture-of-experts layers.

    Returns:
        `steps` [C], the middle of each column; `layers` [L], their numbers; `experts` E; `load` [L][E][C];
        `peak` [L][C], the most loaded expert's; `last` [L][E], of the last row alone; `last_step`.
    """
    loaded = [(row["step"], row["moe/load"], row) for row in rows if row.get("moe/load") is not None]
    if not loaded:
        return None
    shape = loaded[-1][1].shape  # where a run changed its experts, the last ones count
    loaded = [entry for entry in loaded if entry[1].shape == shape]
    layers, experts = shape
    fewest, most = COLUMNS
    columns = min(len(loaded), max(fewest, min(most, CELLS // (layers * experts))))
    bins = np.array_split(np.arange(len(loaded)), columns)
    steps = np.array([step for step, _, _ in loaded], dtype=float)
    means = [_even([loaded[index][1] for index in each]) for each in bins]
    load = np.stack(means, axis=-1)
    return {
        "steps": [round(float(steps[each].mean()), 1) for each in bins],
        "layers": _layer_numbers(loaded[-1][2], layers),
        "experts": experts,
        "load": _hundredths(load),
        "peak": _hundredths(load.max(axis=1)),
        "last": _hundredths(_even([loaded[-1][1]])),
        "last_step": loaded[-1][0],
    }


def _even(tables: list[np.ndarray]) -> np.ndarray:
    """Mean of the tables [L, E], in units of an even load; what is no finite number counts as no load."""
    mean = np.nan_to_num(np.stack(tables), posinf=0.0, neginf=0.0).mean(axis=0, dtype=np.float64)
    total = mean.sum(axis=1, keepdims=True)
    return mean * mean.shape[1] / np.where(total > 0, total, 1.0)


def _hundredths(values: np.ndarray) -> list[Any]:
    return np.rint(values * 100).astype(int).tolist()


def _layer_numbers(row: Row, count: int) -> list[int]:
    """Numbers of the layers that have experts, by the keys `moe/layer_N/…`."""
    names = {key.split("/")[1].removeprefix("layer_") for key in row if key.startswith("moe/layer_")}
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return numbers if len(numbers) == count else list(range(count))
