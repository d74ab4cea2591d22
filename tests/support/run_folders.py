"""Run folders as a training leaves them, made up in no time: for what reads runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

START = 1_700_000_000.0
"""When the first attempt began, Unix seconds."""


def training_row(step: int, *, layers: int = 0, experts: int = 0, **more: Any) -> dict[str, Any]:
    """A row of a healthy run, with a second a step."""
    row: dict[str, Any] = {
        "step": step,
        "time": START + step,
        "train/loss": 2.0 + 6.0 * math.exp(-step / 50),
        "train/z_loss": 0.001,
        "train/grad_norm": 1.0 + 1.0 / step,
        "train/learning_rate": 1e-3,
        "train/loss_tokens": 1000,
        "train/tokens": 1000 * step,
        "train/loss_scale": None,
        "train/skipped": None,
        "perf/tokens_per_second": 1000.0,
        "perf/step_seconds": 1.0,
        "perf/mfu": None,
        "perf/memory_bytes": 2**30,
    }
    if layers:
        total = experts * (experts + 1) / 2
        load = [[(expert + layer) % experts + 1 for expert in range(experts)] for layer in range(layers)]
        row["moe/load"] = [[count / total for count in counts] for counts in load]
        row |= {"train/aux_loss": 0.01, "train/router_z_loss": 0.002}
        for layer in range(layers):
            row[f"moe/layer_{layer}/load_max"] = experts * experts / total
            row[f"moe/layer_{layer}/dead_experts"] = layer
            row[f"moe/layer_{layer}/router_entropy"] = math.log(experts) - 0.1 * layer
    return row | {key.replace("__", "/"): value for key, value in more.items()}


def attempt_row(step: int, seconds: float, launcher: str = "torchrun", **more: Any) -> dict[str, Any]:
    """A row of attempts.jsonl; `seconds` counts from START."""
    return {
        "step": step,
        "time": START + seconds,
        "launcher": launcher,
        "world_size": 2,
        "device": "a processor",
        "host_cores": 2,
        "parameters": 5_000_000,
        "active_parameters": 2_000_000,
        "zlib_bits_per_byte": 2.5,
        "versions": {"torch": "2.13.0", "llm_pretrain": "0.1.0", "python": "3.11.2"},
    } | more


def make_run(
    folder: Path,
    rows: Iterable[dict[str, Any]],
    *,
    attempts: Iterable[dict[str, Any]] | None = None,
    samples: Iterable[dict[str, Any]] = (),
    config: dict[str, Any] | None = None,
    **status: Any,
) -> Path:
    """A run's folder with these files; returns it."""
    folder.mkdir(parents=True)
    tree = {"run": {"name": folder.name}, "training": {"max_steps": 100}} | (config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))
    state = {"state": "finished", "exit_code": 0, "reason": None, "step": 100, "checkpoint": None}
    (folder / "status.json").write_text(json.dumps(state | status))
    files = {"metrics": rows, "attempts": [attempt_row(0, 0.0)] if attempts is None else attempts}
    for name, lines in (files | {"samples": samples}).items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text:
            (folder / f"{name}.jsonl").write_text(text)
    return folder
