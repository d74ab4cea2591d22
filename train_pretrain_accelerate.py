"""Pretraining through Accelerate: `accelerate launch train_pretrain_accelerate.py --config FILE`.

The same run as `train_pretrain.py`, method for method; read the two side by side to see what each line
of Accelerate stands for.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    gather_object,
)
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import DecoderOutput
from llm_pretrain.training import (
    DDP_OPTIONS,
    Launcher,
    Objective,
    StepCounts,
    StepResult,
    StepSums,
    adopt_parameters,
    check_accelerate_settings,
    check_fsdp_version,
    check_strategy,
    check_world_size,
    layer_precision,
    plain_number,
    prepare_process,
    pretrain,
    release_parameters,
    report_errors,
    seed_dropout,
    settle_buckets,
    shard_full_precision,
)


class AccelerateEngine:
    """The same data parallelism, done by Accelerate."""

    launcher: Launcher = "accelerate"

    def __init__(self, config: Config):
        self.config = config
        accumulation_steps = config.gradient_accumulation_steps(int(os.environ.get("WORLD_SIZE", "1")))
        check_accelerate_settings(config, accumulation_steps)
        on_gpu = torch.cuda.is_available()
        if config.training.precision == "fp16" and not on_gpu:
            raise ConfigError(
                "training.precision: fp16 through Accelerate needs a GPU (on CPU it would silently train in "
                "fp32), found none; use bf16 or fp32, or torchrun with train_pretrain.py"
            )
        self.accelerator = Accelerator(
            cpu=not on_gpu,
            fsdp_plugin=fsdp_plugin(config, on_gpu) if config.distributed.strategy == "fsdp" else None,
            mixed_precision={"fp32": "no"}.get(config.training.precision, config.training.precision),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=accumulation_steps, sync_with_dataloader=False
            ),
            dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
            kwargs_handlers=[
                DistributedDataParallelKwargs(**DDP_OPTIONS),
                InitProcessGroupKwargs(timeout=timedelta(seconds=config.distributed.timeout_seconds)),
            ],
        )
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self.scaler = self.accelerator.scaler
        check_world_size(self.world_size)
        check_strategy(config, self.accelerator.distributed_type.value, self.world_size)
        self.objective = Objective(config, self.world_size)

    def prepare(self, model: Module, optimizer: Optimizer, batches: DataLoader) -> Iterable[Batch]:
        names = None
        if self.accelerator.is_fsdp2:
            names = release_parameters(model, optimizer)
            shard_full_precision(model)
            adopt_parameters(model, optimizer, names)
        self.model, self.optimizer, own = self.accelerator.prepare(model, optimizer, batches)
        if names is not None:  # `prepare` tells parameters by their address, and empty parts have none
            adopt_parameters(model, optimizer, names)
        self.unwrapped_model = model
        settle_buckets(self)
        return own

    def forward(self, batch: Batch) -> DecoderOutput:
        with self.accelerator.autocast():  # FSDP's `prepare` leaves it to us, DDP's does not mind
            return self.model(**batch.model_inputs())

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        counts = StepCounts.of(micro_batches, self.reduce_sum)
        if counts.num_loss_tokens == 0:
            return StepResult(counts, skipped="no_loss_tokens")
        sums, grad_norm = StepSums(self.config), math.nan
        for batch in micro_batches:
            with self.accelerator.accumulate(self.model):
                seed_dropout(self.config.run.seed, batch)
                output = self.forward(batch)
                loss = self.objective(output, counts.num_loss_tokens)
                self.accelerator.backward(loss)  # divides by the accumulation steps, scales for fp16
                sums.add(output, batch)
                if self.accelerator.sync_gradients:
                    max_norm = self.config.training.max_grad_norm or math.inf
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                    grad_norm = plain_number(norm)  # type: ignore[arg-type]  # None only under DeepSpeed
                    if math.isfinite(grad_norm):
                        self.optimizer.step()  # with a scaler: its step and its update
                    elif self.scaler:
                        self.scaler.update()
                    self.optimizer.zero_grad()
        return StepResult.of(counts, sums.reduced(self.reduce_sum), grad_norm, self.scaler)

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        total = self.accelerator.reduce(tensor.to(self.device), "sum")
        return total  # type: ignore[return-value]  # typed for nests of tensors

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_object([value])

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        return self.unwrapped_model, self.optimizer.optimizer

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        return nullcontext(self.model_and_optimizer())

    def close(self) -> None:
        del self.model, self.unwrapped_model, self.optimizer
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def fsdp_plugin(config: Config, on_gpu: bool) -> FullyShardedDataParallelPlugin:
    """FSDP's second version, a group per layer; all that a launch file could set otherwise is set here."""
    check_fsdp_version()
    if not on_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Accelerate shards on GPUs only, and makes DDP of it elsewhere without a word. Its private state is
        # the one place to change its mind; on a GPU nothing is touched.
        PartialState(cpu=True, timeout=timedelta(seconds=config.distributed.timeout_seconds))
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["DecoderLayer"],
        mixed_precision_policy=layer_precision(config.training.precision),  # type: ignore[arg-type]  # FSDP2's
        cpu_offload=False,
        activation_checkpointing=False,  # the model's own
        cpu_ram_efficient_loading=False,
    )


def main(argv: list[str] | None = None) -> int:
    """Train as the options in `argv` say (default: the command line's); returns the exit code."""
    with report_errors():
        config = load_config(argv)
        prepare_process(config)
        return pretrain(config, AccelerateEngine(config))
    raise AssertionError("report_errors leaves by itself")


if __name__ == "__main__":
    sys.exit(main())
