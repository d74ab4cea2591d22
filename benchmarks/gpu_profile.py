"""Where a step's time goes on a GPU: a table of kernels by their time. Run by the benchmark `gpu_step`.

    python -m benchmarks.gpu_profile OPTIONS

Takes the script's options. No benchmark by itself.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_pairs import Steps
from llm_pretrain.config import load_config, resolve_model
from llm_pretrain.data import open_stores
from llm_pretrain.training import prepare_process
from train_pretrain import TorchrunEngine

WARMUP_STEPS, PROFILED_STEPS, ROWS = 5, 3, 25


def main() -> None:
    """Profiles a few steps after the warm-up and prints the table."""
    config = load_config(sys.argv[1:])
    prepare_process(config)
    config = resolve_model(config, open_stores(config)[0].vocab_size)
    steps = Steps(config, TorchrunEngine(config))
    for _ in range(WARMUP_STEPS):
        steps.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            steps.step()
        torch.cuda.synchronize()
    table = profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=ROWS)
    print(table, flush=True)


if __name__ == "__main__":
    main()
