"""Datasets for workers, in a module that a worker imports quickly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Faulty:
    """A dataset in whose worker `error` is raised, or which ends with its process."""

    def __init__(self, error: Exception | None):
        self.error = error

    def __getitems__(self, numbers: list[int]) -> Any:
        if self.error is None:
            os._exit(9)
        raise self.error


class Counted:
    """A dataset that leaves a file for every micro batch it has assembled, in whatever process."""

    def __init__(self, dataset: Any, folder: Path):
        self.dataset, self.folder = dataset, folder

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: list[int]) -> Any:
        batch = self.dataset.__getitems__(numbers)
        (self.folder / str(numbers[0])).touch()
        return batch
