"""Console output of a run: one line per logged step, or a progress bar on a terminal.

After an output error (a closed pipe, say) the console shows nothing more; training goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import printable
from llm_pretrain.runs.rows import finite_number

Row = Mapping[str, Any]


class Console:
    """Messages and progress of one run.

    Lines go to standard output, warnings and the bar to standard error.

    Args:
        config: The run's configuration; the progress bar shows its name.
        enabled: True on one process only; the others show nothing.
        start_step: Step from which the run starts.
        max_steps: Step at which it ends.
    """

    def __init__(self, config: Config, *, enabled: bool, start_step: int, max_steps: int):
        self._enabled = enabled
        self._step = start_step
        self._max_steps = max_steps
        self._first: tuple[float, int] | None = None
        self._bar = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            # some terminals (in containers, say) report 0 columns and rows, with which tqdm shows nothing
            has_size = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            self._bar = tqdm(
                desc=config.run.name,
                initial=start_step,
                total=max_steps,
                unit="step",
                dynamic_ncols=has_size,
                ncols=None if has_size else 120,
                nrows=None if has_size else 24,
            )

    def info(self, text: str) -> None:
        """Print a line to standard output."""
        self._write(text, sys.stdout)

    def warning(self, text: str) -> None:
        """Print a warning to standard error."""
        self._write(f"warning: {text}", sys.stderr)

    def row(self, row: Row) -> None:
        """Show a row of metrics: training, evaluation or both."""
        if not self._enabled:
            return
        step = row["step"]
        if any(key.startswith(("train/", "perf/")) for key in row):
            remaining = self._remaining_seconds(row)
            parts = [*_training_parts(row), *_expert_parts(row)]
            if self._bar is not None:
                self._bar.set_postfix_str("  ".join(parts), refresh=False)
                self._bar.update(step - self._bar.n)
            else:
                parts += [f"eta {time_text(remaining)}"] if remaining is not None else []
                self.info("  ".join([f"step {step}/{self._max_steps}", *parts]))
        if evaluation := list(_evaluation_parts(row)):
            self.info("  ".join([f"step {step}/{self._max_steps}", *evaluation]))

    def close(self) -> None:
        """Close the progress bar and show nothing more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._enabled = False

    def _remaining_seconds(self, row: Row) -> float | None:
        """Time left at the mean rate since the first row; at the first row, at its own step time."""
        now, step = time.monotonic(), row["step"]
        left = self._max_steps - step
        if self._first is None:
            self._first = (now, step)
        elapsed, steps = now - self._first[0], step - self._first[1]
        if steps > 0:
            return elapsed / steps * left
        seconds = finite_number(row.get("perf/step_seconds"))
        return None if seconds is None else seconds * left

    def _write(self, text: str, stream: TextIO) -> None:
        if not self._enabled:
            return
        text = printable(text)
        try:
            if self._bar is not None:
                self._bar.write(text, file=stream)
            else:
                print(text, file=stream, flush=True)
        except (OSError, ValueError):  # a closed pipe or file, or a character that the terminal lacks
            self._enabled = False


def _training_parts(row: Row) -> Iterator[str]:
    if row.get("train/skipped"):
        yield f"skipped ({row['train/skipped']})"
    if "train/loss" in row:
        yield f"loss {_number(row['train/loss'], '.4f')}"
    if "train/learning_rate" in row:
        yield f"lr {_number(row['train/learning_rate'], '.2e')}"
    if "train/grad_norm" in row:
        yield f"grad {_number(row['train/grad_norm'], '.3g')}"
    if (speed := finite_number(row.get("perf/tokens_per_second"))) is not None:
        yield f"{_scaled(speed, 1000)} tok/s"
    if (memory := finite_number(row.get("perf/memory_bytes"))) is not None:
        yield f"mem {_scaled(memory, 1024)}B"
    if (mfu := finite_number(row.get("perf/mfu"))) is not None:
        yield f"mfu {mfu:.0%}"


def _expert_parts(row: Row) -> Iterator[str]:
    """Summary of the experts: largest load over mean load, number of dead experts, mean router entropy."""
    layers = row.get("moe/load") or []
    loads = [max(layer) * len(layer) / sum(layer) for layer in layers if layer and sum(layer) > 0]
    loads = loads or _per_layer(row, "load_max")
    if loads:
        yield f"load {max(loads):.2f}x"
    if dead := _per_layer(row, "dead_experts"):
        yield f"dead {round(sum(dead))}"
    if entropy := _per_layer(row, "router_entropy"):
        yield f"entropy {sum(entropy) / len(entropy):.2f}"


def _evaluation_parts(row: Row) -> Iterator[str]:
    labels = {
        "eval/loss": "eval loss",
        "eval/predicted_loss": "predicted",
        "eval/perplexity": "perplexity",
        "eval/bits_per_byte": "bits/byte",
    }
    for key, label in labels.items():
        if key in row:
            yield f"{label} {_number(row[key], '.2f' if key == 'eval/perplexity' else '.4f')}"


def _per_layer(row: Row, name: str) -> list[float]:
    return [
        value
        for key, value in row.items()
        if key.startswith("moe/layer_") and key.endswith(f"/{name}") and finite_number(value) is not None
    ]


def _number(value: object, spec: str) -> str:
    known = finite_number(value)
    return "-" if known is None else format(known, spec)


def _scaled(value: float, base: int) -> str:
    """`12.3k`; with base 1024 there is a space before the unit: `512 M`."""
    gap = " " if base == 1024 else ""
    for unit in ("", "k", "M", "G"):
        if abs(value) < base:
            return f"{value:.0f}{gap}{unit}" if value >= 100 or not unit else f"{value:.1f}{gap}{unit}"
        value /= base
    return f"{value:.1f}{gap}T"


def time_text(seconds: float) -> str:
    """Seconds as text, such as `1h05m`, `12m30s` or `45s`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minute}m{second:02d}s" if minute else f"{second}s"
