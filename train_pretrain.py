"""Pretraining with PyTorch alone: `torchrun --nproc_per_node N train_pretrain.py --config FILE`.

This file shows everything that makes a step distributed: process group, DDP, mixed precision, gradient
accumulation, clipping and the optimizer's step. One line, `parallelize`, applies FSDP2 and meshes.
`train_pretrain_accelerate.py` does the same through Accelerate, method for method.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # until the run begins, Ctrl-C ends the process at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import shard
from llm_pretrain.distributed.fsdp import (
    clear_mesh_caches,
    clip_over_meshes,
    parallelize,
    rebound_optimizer,
)
from llm_pretrain.distributed.mesh import Meshes, Place, build_meshes
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import check_world_size, obey_use_cpu
from llm_pretrain.launch.process import exit_process, prepare_process, rendezvous_init_method, report_errors
from llm_pretrain.launch.watchdog import collective_timeout, hang_watchdog
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.model.kernels import DTYPES
from llm_pretrain.training.engine import DDP_OPTIONS, Launcher, own_part, seed_dropout, warm_up_backward
from llm_pretrain.training.step import Objective, Step
from llm_pretrain.training.trainer import pretrain


class TorchrunEngine:
    """Parallelism by `torch.distributed`: DDP, or FSDP2 with any mesh."""

    launcher: Launcher = "torchrun"

    def __init__(self, config: Config, device: torch.device | None = None):
        self.config = config
        if config.distributed.strategy == "deepspeed":
            raise ConfigError(
                "distributed.strategy: expected ddp or fsdp, found deepspeed, which "
                "train_pretrain_accelerate.py runs; start that with `accelerate launch`"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        found = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.device = device or found  # `llm-pretrain simulate` passes a device
        if on_gpu := self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.rank, self.world_size = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            timeout = collective_timeout(config)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # Gloo sums CPU integers
            dist.init_process_group(backend, init_method=rendezvous_init_method(), timeout=timeout)
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        check_world_size(self.world_size)
        self.place = Place.of(config, self.rank, self.world_size)
        is_fsdp = config.distributed.strategy == "fsdp"
        self.is_sharded = is_fsdp and self.world_size > self.place.sizes.pp
        self.pipeline: Any = None
        self.meshes = Meshes()
        if is_fsdp and self.world_size > 1:
            self.meshes = build_meshes(config, self.device.type, self.world_size)
        self.sync_each_batch = config.distributed.sync_each_batch
        precision = config.training.precision
        is_low = precision != "fp32"
        self.autocast = torch.autocast(self.device.type, DTYPES[precision]) if is_low else nullcontext()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.accumulation_steps = config.gradient_accumulation_steps(self.world_size)
        self.max_grad_norm = config.training.max_grad_norm or math.inf
        several_meshes = self.is_sharded and (config.distributed.ep_size > 1 or self.place.sizes.tp > 1)
        self.clip_grad_norm: Callable[..., Any] = clip_over_meshes if several_meshes else clip_grad_norm_
        self.objective = Objective(config, self.world_size)

    def prepare(
        self,
        model: Decoder,
        optimizer: Optimizer,
        batches: DataLoader,
        initialize: Callable[[Decoder], None],
    ) -> Iterable[Batch]:
        self.unwrapped_model, self.optimizer = model, optimizer
        self.no_sync = nullcontext
        with rebound_optimizer(model, optimizer):
            stages = [model]
            if self.place.sizes.pp > 1:
                from llm_pretrain.distributed.pipeline import Pipeline

                group, device = self.meshes.pp, self.device
                self.pipeline = Pipeline(model, self.config, self.place, group, device, self.autocast)
                self.clip_grad_norm = self.pipeline.clip_grad_norm
                stages = list(self.pipeline.modules.values())
            for stage in stages if self.is_sharded else []:
                parallelize(stage, self.meshes, self.place, self.config)
            initialize(model)  # in a sharded model, only this rank's shards
        self.model: Any = model
        if self.world_size > 1 and not self.is_sharded and self.pipeline is None:
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(model, device_ids=device_ids, **DDP_OPTIONS)
            self.no_sync = self.model.no_sync
        self.parameters = list(self.model.parameters())  # once: collecting them takes longer than clipping
        warm_up_backward(self)
        group_batches = shard(batches, self.place.data, self.place.sizes.data)
        own = (own_part(batch, self.place) for batch in group_batches)
        return (batch.to(self.device, non_blocking=True) for batch in own)

    def forward(self, batch: Batch) -> DecoderOutput:
        if self.pipeline is not None:
            return self.pipeline.forward(batch)
        seed_dropout(self.config, batch)
        with self.autocast:
            return self.model(**batch.model_inputs())

    def train_step(self, step: Step) -> None:
        def scaled_loss(output: DecoderOutput, batch: Batch) -> Tensor:  # adds to the step's sums
            return self.scaler.scale(step.add(output, batch) / self.accumulation_steps)

        backward = self.pipeline.backward if self.pipeline else self.backward
        backward(step.micro_batches, scaled_loss)
        self.scaler.unscale_(self.optimizer)
        grad_norm = step.clip(self.clip_grad_norm, self.parameters, self.max_grad_norm)
        if step.may_update(grad_norm):  # True if the GPU decides, by found_inf
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, micro_batches: Sequence[Batch], scaled_loss: Callable[..., Tensor]) -> None:
        for batch in micro_batches:
            is_last = batch is micro_batches[-1]
            if self.is_sharded:
                self.model.set_requires_gradient_sync(is_last or self.sync_each_batch)
                self.model.set_requires_all_reduce(is_last)  # HSDP: replicas once a step
            with nullcontext() if is_last else self.no_sync():  # DDP: ranks once a step
                scaled_loss(self.forward(batch), batch).backward()  # no variable may keep the graph alive

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        if self.world_size == 1:
            return list(values)
        return self.reduce_sum(torch.tensor(values, dtype=torch.int64)).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        gathered = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        return self.unwrapped_model, self.optimizer

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        return nullcontext(self.model_and_optimizer())

    def close(self) -> None:
        # a DDP module that outlives its process group can abort the process at exit
        del self.model, self.no_sync, self.unwrapped_model, self.optimizer
        del self.parameters, self.meshes, self.pipeline, self.clip_grad_norm
        if self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
            if self.config.distributed.strategy == "fsdp":
                clear_mesh_caches()


def main(argv: list[str] | None = None) -> int:
    """Train with the options in `argv` (default: the command line's); returns the exit code."""
    with report_errors():
        obey_use_cpu()
        config = load_config(argv)
        prepare_process(config)
        with hang_watchdog(config):
            return pretrain(config, TorchrunEngine(config))
    raise AssertionError("unreachable: report_errors exits after an error")


if __name__ == "__main__":
    exit_process(main())
