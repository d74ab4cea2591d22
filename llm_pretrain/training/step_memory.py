"""Measures the memory of real steps, to check an estimate by: run in a process of its own.

    python -m llm_pretrain.training.step_memory OPTIONS DOCUMENT_LENGTH

`OPTIONS` are the scripts' as a JSON list. The batch is random ids in documents of one length: no store is
needed. Prints a line of JSON, last of all. The step is a run's, on one rank; nothing is saved or logged.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch
from llm_pretrain.model import initialize_weights
from llm_pretrain.training.building import build_model
from llm_pretrain.training.engine import empty_batch
from llm_pretrain.training.objective import Objective, StepSums
from llm_pretrain.training.optimizers import build_optimizer
from llm_pretrain.training.process import prepare_process

STEPS = 2
"""The optimizer's state appears at the end of the first."""


def random_batch(config: Config, document_length: int, device: torch.device) -> Batch:
    """A micro batch of documents of one length, all of whose tokens bear loss."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    ids = torch.randint(0, config.model.vocab_size or 1, (rows, length + 1))
    place = torch.arange(length).expand(rows, length)
    documents = place // document_length if config.data.isolate_documents else torch.zeros_like(place)
    empty = empty_batch(device)
    empty.input_ids, empty.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    empty.document_ids = documents.contiguous()
    empty.position_ids = (place % document_length).contiguous()
    empty.loss_mask = torch.ones(rows, length, dtype=torch.bool)
    empty.num_loss_tokens = rows * length
    return empty.to(device)


class Measured(NamedTuple):
    """Bytes that steps take.

    Args:
        peak: Of model, optimizer and steps, at most at once.
        libraries: That the libraries took for themselves meanwhile and keep: on a CPU oneDNN's machine code,
            about 0.6 MiB for every combination of a product's sizes, of which it keeps the last 1024.
    """

    peak: int
    libraries: int


def step_memory(config: Config, document_length: int) -> Measured:
    """Run the steps twice, and measure the second time: the first pays for what the libraries keep.

    The same steps to the bit, so that every product's code is there when what is measured begins. A smaller
    model would not do: the sizes of a mixture's products follow from how its router sends the tokens.

    Args:
        config: Resolved.
        document_length: Of the batch's documents.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at_first = _begin(device)
    _run_steps(config, document_length, device)
    before = _begin(device)
    _run_steps(config, document_length, device)
    return Measured(_peak(device) - before, max(0, before - at_first))


def _run_steps(config: Config, document_length: int, device: torch.device) -> None:
    """A run's first steps on random tokens, always the same."""
    torch.manual_seed(config.run.seed)
    model = build_model(config)
    initialize_weights(model, config.run.seed)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    objective = Objective(config, 1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.training.precision)
    micro_batches = min(2, config.gradient_accumulation_steps(1))
    for _ in range(STEPS):
        sums = StepSums(config)
        for _ in range(micro_batches):
            batch = random_batch(config, document_length, device)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                output = model(**batch.model_inputs())
            objective(output, batch.num_loss_tokens).backward()
            sums.add(output, batch)
            del output
        clip_grad_norm_(model.parameters(), config.training.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _begin(device: torch.device) -> int:
    """Give back what nobody uses, and start to watch for the peak; bytes in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # a run keeps freed blocks; here they would hide what is asked for next
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Measure what the command line says."""
    config = load_config(json.loads(sys.argv[1]), needs_data=False)
    prepare_process(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = step_memory(config, int(sys.argv[2]))
    print(json.dumps({**found._asdict(), "device": device}), flush=True)


if __name__ == "__main__":
    main()
