"""`attempts.jsonl`: who worked on a run, when and with what: one row each time that it is started or resumed.

For people, the report and `verify`; nothing in training reads it back.
"""

from __future__ import annotations

import os
import time

from llm_pretrain.checkpoints import environment
from llm_pretrain.config import Config, to_dict
from llm_pretrain.model import count_parameters
from llm_pretrain.tracking import MetricsWriter
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.run_folder import RunFolder


def note_attempt(
    folder: RunFolder, config: Config, engine: Engine, step: int, zlib_bits_per_byte: float | None
) -> None:
    """Append this attempt's row, on rank 0.

    Args:
        folder: The run's.
        config: Resolved.
        engine: Tells launcher, processes and device.
        step: Optimizer steps done before the attempt.
        zlib_bits_per_byte: What zlib needs for the validation text, None where it is not known.

    Raises:
        OutputError: the file cannot be written.
    """
    if engine.rank != 0:
        return
    versions = environment(engine.device)
    size = count_parameters(config.model)
    row = {
        "step": step,
        "time": time.time(),
        "launcher": engine.launcher,
        "world_size": engine.world_size,
        "device": versions.pop("device"),
        "host_cores": os.cpu_count(),
        "parameters": size.total,
        "active_parameters": size.active,
        "zlib_bits_per_byte": zlib_bits_per_byte,
        "versions": versions,
        "config": to_dict(config),  # config.yaml is the newest attempt's alone
    }
    with MetricsWriter(folder.attempts) as attempts:
        attempts.append(row)
