"""Pretraining through Accelerate: `accelerate launch train_pretrain_accelerate.py --config FILE`.

The same run as `train_pretrain.py`, method for method; read the two side by side to see what each line
of Accelerate stands for.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # until the run begins a Ctrl-C just ends the process, wherever it waits
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import accelerate.optimizer
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
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
    Judge,
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
    close_channel,
    collective_timeout,
    end_script,
    heed_verdict,
    launch_settings,
    layer_precision,
    meeting_point,
    open_channel,
    prepare_process,
    pretrain,
    release_parameters,
    report_errors,
    restore_launch_settings,
    seed_dropout,
    settle_buckets,
    shard_full_precision,
    watching,
    whole_norm,
    with_global_expert_counts,
)
from llm_pretrain.training.deepspeed_state import (
    clip_as_torch,
    lent_state,
    prepare_deepspeed,
    stop_if_diverged,
    zero_options,
)

# at every step it would search sys.path for a package of other optimizers
accelerate.optimizer.is_lomo_available = cache(accelerate.optimizer.is_lomo_available)


class AccelerateEngine:
    """The same data parallelism, done by Accelerate."""

    launcher: Launcher = "accelerate"

    def __init__(self, config: Config):
        self.config = config
        accumulation_steps = config.gradient_accumulation_steps(int(os.environ.get("WORLD_SIZE", "1")))
        check_accelerate_settings(config, accumulation_steps)
        on_gpu = torch.cuda.is_available()
        precision = config.training.precision
        if precision == "fp16" and not on_gpu:
            raise ConfigError(
                "training.precision: fp16 through Accelerate needs a GPU (on CPU it would silently train in "
                "fp32), found none; use bf16 or fp32, or torchrun with train_pretrain.py"
            )
        timeout = collective_timeout(config)
        self.uses_deepspeed = config.distributed.strategy == "deepspeed"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else None  # the host's integers stay on the host
        if self.uses_deepspeed:
            backend = "nccl" if on_gpu else "gloo"
        elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
            backend = None  # a named back-end needs a process group
        launched = launch_settings()
        self.accelerator = Accelerator(
            cpu=not on_gpu and not self.uses_deepspeed,  # with cpu=True Accelerate forgets DeepSpeed
            mixed_precision="no" if precision == "fp32" or self.uses_deepspeed else precision,
            deepspeed_plugin=zero_plugin(config) if self.uses_deepspeed else None,
            fsdp_plugin=fsdp_plugin(config, timeout) if config.distributed.strategy == "fsdp" else None,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=accumulation_steps, sync_with_dataloader=False
            ),
            dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
            kwargs_handlers=[
                DistributedDataParallelKwargs(**DDP_OPTIONS),
                InitProcessGroupKwargs(backend=backend, init_method=meeting_point(), timeout=timeout),
            ],
        )
        restore_launch_settings(launched)
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self.scaler = self.accelerator.scaler
        check_world_size(self.world_size)
        self.channel = open_channel(config, self.world_size, collective_timeout(config))
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
        self.parameters = list(self.model.parameters())  # to look for them takes longer than to clip them
        if self.uses_deepspeed:
            clip_as_torch(self.optimizer.optimizer, model, self.config, self.device)
        else:
            settle_buckets(self)
        return own

    def forward(self, batch: Batch) -> DecoderOutput:
        # what `prepare` returned casts by itself, FSDP's aside; casting twice would cost 0.1 ms each time
        with self.accelerator.autocast() if self.accelerator.is_fsdp2 else nullcontext():
            return self.model(**batch.model_inputs())

    def train_step(self, micro_batches: Sequence[Batch], judge: Judge | None) -> StepResult:
        counts = StepCounts.of(micro_batches, self.sum_integers)
        result = StepResult(counts, skipped="no_loss_tokens")
        if counts.num_loss_tokens == 0:
            return result
        micro_batches = with_global_expert_counts(self, self.config, micro_batches)
        sums = StepSums(self.config)
        for batch in micro_batches:
            with self.accelerator.accumulate(self.model):
                seed_dropout(self.config, batch)
                output = self.forward(batch)
                loss = self.objective(output, counts.num_loss_tokens)
                self.accelerator.backward(loss)  # divides by the accumulation steps, scales for fp16
                sums.add(output, batch)
                if self.accelerator.sync_gradients:
                    max_norm = self.config.training.max_grad_norm or math.inf
                    norm = self.accelerator.clip_grad_norm_(self.parameters, max_norm)
                    grad_norm = whole_norm(norm)  # type: ignore[arg-type]  # never None: zero_compute_grad_norm
                    reduced = sums.reduced(self.reduce_sum)
                    result = StepResult.of(counts, reduced, grad_norm, judge, self.scaler)
                    if self.uses_deepspeed:  # its engine has clipped and stepped inside `backward`
                        stop_if_diverged(self.optimizer.optimizer, result, batch.step)
                    if not result.skipped:
                        heed_verdict(self.optimizer.optimizer, result)
                        self.optimizer.step()  # with a scaler: its step and its update
                    elif self.scaler:
                        self.scaler.update()
                    if not self.uses_deepspeed:  # whose engine has zeroed
                        # the wrapper's own looks the method's signature up at every step
                        self.optimizer.optimizer.zero_grad(set_to_none=True)
        return result

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        total = self.accelerator.reduce(tensor, "sum")
        return total  # type: ignore[return-value]  # typed for nests of tensors

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        if self.world_size == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.int64)
        # DeepSpeed's back-end knows one device alone
        return self.reduce_sum(own.to(self.device) if self.uses_deepspeed else own).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_object([value])

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        return self.unwrapped_model, self.optimizer.optimizer

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        model, optimizer = self.model_and_optimizer()
        if self.uses_deepspeed:
            return lent_state(optimizer, model, self.config, loading=loading)
        return nullcontext((model, optimizer))

    def close(self) -> None:
        del self.model, self.unwrapped_model, self.optimizer
        del self.parameters
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        close_channel(self.channel)
        self.accelerator.end_training()


def zero_plugin(config: Config) -> DeepSpeedPlugin:
    """ZeRO as the configuration says; its engine clips, steps and zeroes inside `accelerator.backward`."""
    prepare_deepspeed()
    world_size = int(os.environ["WORLD_SIZE"])
    plugin = DeepSpeedPlugin(
        zero_stage=config.distributed.zero_stage,  # type: ignore[arg-type]  # None: as launched, else 2
        gradient_accumulation_steps=config.gradient_accumulation_steps(world_size),
        zero3_init_flag=False,
    )
    plugin.deepspeed_config |= zero_options(config, world_size)
    return plugin


def fsdp_plugin(config: Config, timeout: timedelta) -> FullyShardedDataParallelPlugin:
    """FSDP's second version, a group per layer; all that a launch file could set otherwise is set here."""
    check_fsdp_version()
    if not torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Accelerate shards on GPUs only, and makes DDP of it elsewhere without a word. Its private state is
        # the one place to change its mind; on a GPU nothing is touched.
        PartialState(cpu=True, init_method=meeting_point(), timeout=timeout)
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
        with watching(config):
            return pretrain(config, AccelerateEngine(config))
    raise AssertionError("report_errors leaves by itself")


if __name__ == "__main__":
    end_script(main())
