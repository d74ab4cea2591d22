"""Remembers which documents have been seen, in 8 bytes each (16 at most, while it makes room).

Keys are 64 bits of a SHA-256: among a hundred million documents, one is taken for another by mistake with a
probability of 0.03 %.
"""

from __future__ import annotations

import numpy as np


class SeenDocuments:
    """A set of uint64 keys, as sorted arrays of which each is at least twice as long as the next."""

    def __init__(self, keys: np.ndarray | None = None):
        self._levels: list[np.ndarray] = []
        if keys is not None and len(keys):
            self._levels.append(np.sort(keys))

    def add(self, keys: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: whether each is seen for the first time. From now on all of them have been."""
        values, places = np.unique(keys, return_index=True)
        new = np.ones(len(values), dtype=np.bool_)
        for level in self._levels:
            found = np.searchsorted(level, values)
            found[found == len(level)] = 0
            new &= level[found] != values
        first = np.zeros(len(keys), dtype=np.bool_)
        first[places[new]] = True
        if new.any():
            self._insert(values[new])
        return first

    def _insert(self, values: np.ndarray) -> None:
        while self._levels and len(self._levels[-1]) < 2 * len(values):
            values = np.concatenate([self._levels.pop(), values])
            values.sort(kind="stable")
        self._levels.append(values)
