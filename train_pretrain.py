"""Pretraining by hand: `torchrun --nproc_per_node N train_pretrain.py --config FILE`.

Everything that distributed data parallelism asks for stands here in plain sight; read it beside
`train_pretrain_accelerate.py`, which does the same, method for method, through Accelerate.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # until the run begins a Ctrl-C just ends the process, wherever it waits
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config import Config, load_config
from llm_pretrain.data import Batch, shard
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
    check_world_size,
    close_channel,
    collective_timeout,
    end_script,
    forget_process_groups,
    heed_verdict,
    layer_precision,
    mark_last,
    meeting_point,
    open_channel,
    prepare_process,
    pretrain,
    release_parameters,
    report_errors,
    seed_dropout,
    settle_buckets,
    shard_full_precision,
    watching,
    whole_norm,
    with_global_expert_counts,
)


class TorchrunEngine:
    """Data parallelism on `torch.distributed`, written out."""

    launcher: Launcher = "torchrun"

    def __init__(self, config: Config):
        self.config = config
        if config.distributed.strategy == "deepspeed":
            raise ConfigError(
                "distributed.strategy: expected ddp or fsdp, found deepspeed, which "
                "train_pretrain_accelerate.py runs; start that with `accelerate launch`"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.rank, self.world_size = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            timeout = collective_timeout(config)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # the host's integers stay on the host
            dist.init_process_group(backend, init_method=meeting_point(), timeout=timeout)
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        check_world_size(self.world_size)
        self.channel = open_channel(config, self.world_size, collective_timeout(config))
        self.is_sharded = config.distributed.strategy == "fsdp" and self.world_size > 1
        precision = config.training.precision
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.autocast = torch.autocast(self.device.type, dtype) if dtype else nullcontext()
        self.grad_scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        # what a checkpoint keeps; without fp16 `grad_scaler` passes everything through
        self.scaler = self.grad_scaler if precision == "fp16" else None
        self.accumulation_steps = config.gradient_accumulation_steps(self.world_size)
        self.objective = Objective(config, self.world_size)

    def prepare(self, model: Module, optimizer: Optimizer, batches: DataLoader) -> Iterable[Batch]:
        self.unwrapped_model, self.optimizer = model, optimizer
        self.no_sync = nullcontext
        if self.is_sharded:
            self.model: Any = shard_model(model, optimizer, self.config.training.precision)
        else:
            self.model = model.to(self.device)
        if self.world_size > 1 and not self.is_sharded:
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(model, device_ids=device_ids, **DDP_OPTIONS)
            self.no_sync = self.model.no_sync
        self.parameters = list(self.model.parameters())  # to look for them takes longer than to clip them
        settle_buckets(self)
        own = shard(batches, self.rank, self.world_size)
        return (batch.to(self.device, non_blocking=True) for batch in own)

    def forward(self, batch: Batch) -> DecoderOutput:
        with self.autocast:
            return self.model(**batch.model_inputs())

    def train_step(self, micro_batches: Sequence[Batch], judge: Judge | None) -> StepResult:
        counts = StepCounts.of(micro_batches, self.sum_integers)
        if counts.num_loss_tokens == 0:
            return StepResult(counts, skipped="no_loss_tokens")
        micro_batches = with_global_expert_counts(self, self.config, micro_batches)
        sums = StepSums(self.config)
        for is_last, batch in mark_last(micro_batches):
            if self.is_sharded:
                self.model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last else self.no_sync():
                seed_dropout(self.config, batch)
                output = self.forward(batch)
                loss = self.objective(output, counts.num_loss_tokens)
                if self.accumulation_steps > 1:
                    loss = loss / self.accumulation_steps
                self.grad_scaler.scale(loss).backward()
                sums.add(output, batch)
        self.grad_scaler.unscale_(self.optimizer)
        max_norm = self.config.training.max_grad_norm or math.inf
        grad_norm = whole_norm(clip_grad_norm_(self.parameters, max_norm))
        result = StepResult.of(counts, sums.reduced(self.reduce_sum), grad_norm, judge, self.scaler)
        if not result.skipped:
            heed_verdict(self.optimizer, result)
            self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return result

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
        # DDP must go before its process group, or finished runs abort now and then.
        del self.model, self.no_sync, self.unwrapped_model, self.optimizer
        del self.parameters
        if self.world_size > 1:
            dist.barrier()
            close_channel(self.channel)
            dist.destroy_process_group()
        if self.is_sharded:
            forget_process_groups()


def shard_model(model: Module, optimizer: Optimizer, precision: str) -> Module:
    """Split every parameter over all ranks, moving no more than a layer to the device at a time.

    Each layer's matrices are a group: gathered whole for the layer's forward pass, freed, gathered again
    for its backward pass, then their gradients are averaged over ranks, of which each keeps its part.
    """
    names = release_parameters(model, optimizer)
    shard_full_precision(model)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mp_policy=layer_precision(precision))
    fully_shard(model)
    adopt_parameters(model, optimizer, names)
    return model


def main(argv: list[str] | None = None) -> int:
    """Train as the options in `argv` say (default: the command line's); returns the exit code."""
    with report_errors():
        config = load_config(argv)
        prepare_process(config)
        with watching(config):
            return pretrain(config, TorchrunEngine(config))
    raise AssertionError("report_errors leaves by itself")


if __name__ == "__main__":
    end_script(main())
