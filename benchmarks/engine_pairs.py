"""Steps of both scripts' engines in turns, in the same processes: run by the benchmark `launchers`.

    torchrun --nproc_per_node W -m benchmarks.engine_pairs OPTIONS

Prints each engine's CPU seconds per step, summed over the ranks, as a line of JSON, last of all: `Lap`s,
whole and without the work that both share. Both engines train on the same batches and end with the same
parameters. No benchmark by itself.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from benchmarks.shared_work import Lap, Stopwatch
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches, open_stores
from llm_pretrain.launch.process import prepare_process
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.model_setup import build_model, initialize_weights
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.step import Step
from llm_pretrain.training.trainer import gc_schedule, windows
from train_pretrain import TorchrunEngine
from train_pretrain_accelerate import AccelerateEngine


class Steps:
    """One engine with a model of its own, step by step; it tells the stopwatch what both sides share."""

    def __init__(self, config: Config, engine: Engine, stopwatch: Stopwatch | None = None):
        self.engine, self.stopwatch = engine, stopwatch or Stopwatch()
        self.laps: list[Lap] = []
        with torch.device("meta"):
            model = build_model(config, engine.device)
        optimizer = build_optimizer(model, config.optimizer, config.training.precision)
        self.stopwatch.leave_out(model, optimizer)
        loader = global_batches(config, start_step=0)
        batches = engine.prepare(
            model,
            optimizer,
            loader,
            lambda model: initialize_weights(model, config.run.seed, device=engine.device),
        )
        self.decision = Decision(config, engine, Progress())
        self.windows = windows(batches, config.gradient_accumulation_steps(engine.world_size))

    def step(self) -> None:
        """Fetch the next batches and take a step."""
        self.stopwatch.lap()
        micro_batches: list[Batch] = next(self.windows)
        self.engine.train_step(Step.begin(micro_batches, self.engine, self.decision))
        self.laps.append(self.stopwatch.lap())


def main() -> int:
    """Takes the steps that the command line says; rank 0 prints."""
    config = load_config(sys.argv[1:])
    prepare_process(config)
    config = resolve_model(config, open_stores(config)[0].vocab_size)
    with Stopwatch() as stopwatch, gc_schedule() as collect_garbage:
        # torchrun's comes first: it starts the process group that Accelerate then finds
        sides = [Steps(config, engine(config), stopwatch) for engine in (TorchrunEngine, AccelerateEngine)]
        for number in range(config.training.max_steps):
            collect_garbage(number)
            for side in sides if number % 2 else reversed(sides):
                side.step()
    engine = sides[0].engine
    per_rank = engine.gather_objects({side.engine.launcher: side.laps for side in sides})
    parameters = [list(side.engine.model_and_optimizer()[0].parameters()) for side in sides]
    assert all(torch.equal(one, other) for one, other in zip(*parameters, strict=True)), "paths differ"
    if engine.rank == 0:
        sums = {
            name: [Lap.sum(step) for step in zip(*(rank[name] for rank in per_rank), strict=True)]
            for name in per_rank[0]
        }
        print(json.dumps(sums), flush=True)
    engine.gather_objects(None)
    sys.stdout.flush()
    os._exit(0)  # two engines share one process group; neither may close it under the other


if __name__ == "__main__":
    main()
