"""TensorBoard, kept at arm's length as wandb is: a failure is a warning, and metrics.jsonl goes on.

The files lie in the run's own folder, under `tensorboard/`; each attempt adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
"""Inside the run's folder."""


class EventFiles:
    """Writes rows of numbers as TensorBoard scalars, the metrics' step as theirs.

    Args:
        folder: The run's folder.
        first_step: The first step that this attempt will write; what an attempt before wrote from there on
            is dropped when the files are read.
        warn: Shows a warning.
    """

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]):
        self._warn = warn
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step, flush_secs=10)
        except Exception as error:
            self._give_up(error)

    def log(self, numbers: Mapping[str, float], time: float | None) -> None:
        """Adds a row; `time` is Unix seconds, by default now."""
        if self._writer is None:
            return
        try:
            for key, value in numbers.items():
                if key != "step":
                    self._writer.add_scalar(key, value, int(numbers["step"]), walltime=time)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Puts everything on the disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        reason = str(error).partition("\n")[0]
        self._warn(
            f"TensorBoard is left out from here on: {type(error).__name__}: {reason}; metrics.jsonl goes on"
        )
