"""Measures the memory of real steps, to check an estimate by: run in a process of its own.

    python -m llm_pretrain.training.step_memory OPTIONS DOCUMENT_LENGTH

`OPTIONS` are the scripts' as a JSON list. The batch is random ids in documents of one length: no store is
needed. Prints a line of JSON, last of all. The step is a run's, on one rank; nothing is saved or logged.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path

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


def step_peak(config: Config, document_length: int) -> int:
    """Bytes that model, optimizer and steps add to the process at their peak.

    Args:
        config: Resolved.
        document_length: Of the batch's documents.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _warm_up(device)
    before = _begin(device)
    model = build_model(config)
    initialize_weights(model, config.run.seed)
    model.to(device)
    optimizer, objective = build_optimizer(model, config.optimizer), Objective(config, 1)
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
    return _peak(device) - before


def _warm_up(device: torch.device) -> None:
    """What the libraries take for themselves at their first product, norm and random number."""
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        (weight @ weight).float().sum().backward()
    (weight @ weight).square().sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    gc.collect()


def _begin(device: torch.device) -> int:
    """Start to watch for the peak; bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
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
    print(json.dumps({"peak": step_peak(config, int(sys.argv[2])), "device": device}), flush=True)


if __name__ == "__main__":
    main()
