"""Measures the memory of real optimizer steps on one process, for `estimate --verify`.

    python -m llm_pretrain.commands._measured_steps OPTIONS DOCUMENT_LENGTH

`OPTIONS` is a JSON list of script options. The batch consists of random tokens, so no token store is needed.
The last line of the output is the result in JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch, padded_offsets
from llm_pretrain.distributed.process import prepare_process
from llm_pretrain.optim import build_optimizer
from llm_pretrain.training import Objective, StepMetrics, build_model, dummy_batch, initialize_weights

STEPS = 2
"""The optimizer allocates its state at the end of the first step."""


def random_batch(config: Config, document_length: int, device: torch.device) -> Batch:
    """A micro batch of random documents of one length, without masked tokens."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    ids = torch.randint(0, config.model.vocab_size or 1, (rows, length + 1))
    place = torch.arange(length).expand(rows, length)
    size = document_length if config.data.isolate_documents else length
    empty = dummy_batch(device)
    empty.input_ids, empty.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    empty.document_ids = (place // size).contiguous()
    empty.position_ids = (place % size).contiguous()
    empty.document_offsets = padded_offsets(np.flatnonzero(empty.position_ids.view(-1) == 0), rows * length)
    empty.loss_mask = torch.ones(rows, length, dtype=torch.bool)
    empty.num_loss_tokens = rows * length
    return empty.to(device)


class Measured(NamedTuple):
    """Memory of the steps in bytes.

    Args:
        peak: Largest memory in use at once by model, optimizer and steps.
        libraries: Memory that libraries allocated and keep. On a CPU this is oneDNN's machine code, about
            0.6 MiB for each combination of matrix sizes, of which it keeps the last 1024.
    """

    peak: int
    libraries: int


def step_memory(config: Config, document_length: int) -> Measured:
    """Run the same steps twice and measure the second run, after libraries have allocated what they keep.

    Both runs compute the same bits, so that the first one compiles every matrix product of the second. A
    smaller model would not, since the router decides the sizes of a mixture's matrix products.

    Args:
        config: Resolved configuration.
        document_length: Tokens per document.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at_first = reset_peak_memory(device)
    _run_steps(config, document_length, device)
    before = reset_peak_memory(device)
    _run_steps(config, document_length, device)
    return Measured(peak_memory(device) - before, max(0, before - at_first))


def _run_steps(config: Config, document_length: int, device: torch.device) -> None:
    """The first steps of a run on random tokens."""
    torch.manual_seed(config.run.seed)
    model = build_model(config)
    initialize_weights(model, config.run.seed)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    objective = Objective(config, 1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.training.precision)
    micro_batches = min(2, config.gradient_accumulation_steps(1))
    for _ in range(STEPS):
        step = StepMetrics(1, [], num_sources=len(config.data.sources))
        for _ in range(micro_batches):
            batch = random_batch(config, document_length, device)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                output = model(**batch.model_inputs())
            objective(output, batch.num_loss_tokens).backward()
            step.add(output, batch)
            del output
        clip_grad_norm_(model.parameters(), config.training.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def reset_peak_memory(device: torch.device) -> int:
    """Free unused memory and reset the peak; returns the bytes in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed blocks would hide later allocations
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    return _status("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once since `reset_peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Measure with the options of the command line."""
    config = load_config(json.loads(sys.argv[1]), needs_data=False)
    prepare_process(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = step_memory(config, int(sys.argv[2]))
    print(json.dumps({**found._asdict(), "device": device}), flush=True)


if __name__ == "__main__":
    main()
