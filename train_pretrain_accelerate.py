"""Pretraining through Accelerate: `accelerate launch train_pretrain_accelerate.py --config FILE`.

This script does what `train_pretrain.py` does, method for method. Compare both to see what each call of
Accelerate does.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # until the run begins, Ctrl-C ends the process at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import os
from collections.abc import Callable, Iterable, Sequence
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
    ParallelismConfig,
    gather_object,
)
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import shard
from llm_pretrain.distributed.deepspeed import (
    clip_as_torch,
    materialized_state,
    prepare_deepspeed,
    zero_options,
)
from llm_pretrain.distributed.expert_parallel import shard_experts
from llm_pretrain.distributed.fsdp import (
    clear_mesh_caches,
    layer_precision,
    parallelize,
    rebound_optimizer,
    shard_full_precision,
    sum_gradients,
)
from llm_pretrain.distributed.mesh import Meshes, Place, build_meshes, expert_mesh, set_timeout
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import (
    check_accelerate_settings,
    check_strategy,
    check_world_size,
    obey_use_cpu,
    preserved_environment,
)
from llm_pretrain.launch.process import exit_process, prepare_process, rendezvous_init_method, report_errors
from llm_pretrain.launch.watchdog import collective_timeout, hang_watchdog
from llm_pretrain.model.decoder import Decoder, DecoderOutput, full_precision_modules
from llm_pretrain.training.engine import DDP_OPTIONS, Launcher, own_part, seed_dropout, warm_up_backward
from llm_pretrain.training.step import Objective, Step
from llm_pretrain.training.trainer import pretrain

# AcceleratedOptimizer calls this function in every step, and each call searches sys.path
accelerate.optimizer.is_lomo_available = cache(accelerate.optimizer.is_lomo_available)


class AccelerateEngine:
    """Parallelism by Accelerate: DDP, FSDP2 with any mesh except pipelines, or DeepSpeed ZeRO."""

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
        if self.uses_deepspeed:
            backend = "nccl" if on_gpu else "gloo"
        elif on_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            backend = "cpu:gloo,cuda:nccl"  # Gloo sums CPU integers
        else:
            backend = None  # Accelerate's choice; for one process a named back-end would need a process group
        with preserved_environment():
            self.accelerator = Accelerator(
                cpu=not on_gpu and not self.uses_deepspeed,  # with cpu=True Accelerate drops DeepSpeed
                mixed_precision="no" if precision == "fp32" or self.uses_deepspeed else precision,
                deepspeed_plugin=zero_plugin(config) if self.uses_deepspeed else None,
                fsdp_plugin=fsdp_plugin(config, timeout) if config.distributed.strategy == "fsdp" else None,
                parallelism_config=parallelism(config),
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=accumulation_steps,
                    sync_with_dataloader=False,
                    sync_each_batch=config.distributed.strategy == "fsdp"
                    and config.distributed.sync_each_batch,
                ),
                dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
                kwargs_handlers=[
                    DistributedDataParallelKwargs(**DDP_OPTIONS),
                    InitProcessGroupKwargs(
                        backend=backend, init_method=rendezvous_init_method(), timeout=timeout
                    ),
                ],
            )
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        check_world_size(self.world_size)
        check_strategy(config, self.accelerator.distributed_type.value, self.world_size)
        self.max_grad_norm = config.training.max_grad_norm or math.inf
        self.clip_grad_norm: Callable[..., Any] = self.accelerator.clip_grad_norm_  # unscales first
        self.place = Place.of(config, self.rank, self.world_size)
        self.meshes = Meshes()
        if not self.place.sizes.is_data_parallel:
            self.meshes = build_meshes(config, self.device.type, self.world_size)
        self.pipeline: Any = None  # only torchrun runs pipelines
        self.objective = Objective(config, self.world_size)

    def prepare(
        self,
        model: Decoder,
        optimizer: Optimizer,
        batches: DataLoader,
        initialize: Callable[[Decoder], None],
    ) -> Iterable[Batch]:
        if self.accelerator.is_fsdp2:
            with rebound_optimizer(model, optimizer):
                self.shard(model)
                if self.place.sizes.is_data_parallel:
                    prepared = self.accelerator.prepare(model, optimizer, batches)
                    self.model, self.optimizer, rank_batches = prepared
                else:  # Accelerate would give each rank batches of its own
                    self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
                    group_batches = shard(batches, self.place.data, self.place.sizes.data)
                    own = (own_part(batch, self.place) for batch in group_batches)
                    rank_batches = (batch.to(self.device, non_blocking=True) for batch in own)
                sum_gradients(model)
                initialize(model)  # only this rank's shards
            self.sync_replicas = self.model.set_requires_all_reduce
        else:
            with rebound_optimizer(model, optimizer):
                initialize(model)
            self.model, self.optimizer, rank_batches = self.accelerator.prepare(model, optimizer, batches)
            self.sync_replicas = lambda is_last: None
        self.unwrapped_model = model
        self.parameters = list(self.model.parameters())  # once: collecting them takes longer than clipping
        # AcceleratedOptimizer.zero_grad inspects a signature in every step, so torch's zero_grad is called
        # directly; under DeepSpeed, the engine zeroes the gradients, and the wrapper's zero_grad does nothing
        self.zero_grad = self.optimizer.zero_grad if self.uses_deepspeed else optimizer.zero_grad
        if self.uses_deepspeed:
            clip_as_torch(self.optimizer.optimizer, model, self.config, self.device)
        else:
            warm_up_backward(self)
        return rank_batches

    def forward(self, batch: Batch) -> DecoderOutput:
        seed_dropout(self.config, batch)
        # `prepare` wraps the forward pass in autocast, except under FSDP; a second context costs 0.1 ms
        with self.accelerator.autocast() if self.accelerator.is_fsdp2 else nullcontext():
            return self.model(**batch.model_inputs())

    def train_step(self, step: Step) -> None:
        for batch in step.micro_batches:
            with self.accelerator.accumulate(self.model):
                self.sync_replicas(self.accelerator.sync_gradients)  # HSDP: replicas once a step
                # divides by the accumulation steps, scales for fp16; under DeepSpeed also clips and steps
                self.accelerator.backward(step.add(self.forward(batch), batch))
                if self.accelerator.sync_gradients:
                    grad_norm = step.clip(self.clip_grad_norm, self.parameters, self.max_grad_norm)
                    if step.may_update(grad_norm):  # True if the GPU decides
                        self.optimizer.step()  # with a scaler: scaler.step and scaler.update
                    elif self.scaler.is_enabled():
                        self.scaler.update()
                    self.zero_grad()

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        total = self.accelerator.reduce(tensor, "sum")
        return total  # type: ignore[return-value]  # typed for nests of tensors

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        if self.world_size == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.int64)
        # DeepSpeed's process group has one back-end, for tensors on the device only
        return self.reduce_sum(own.to(self.device) if self.uses_deepspeed else own).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_object([value])

    def model_and_optimizer(self) -> tuple[Module, Optimizer]:
        return self.unwrapped_model, self.optimizer.optimizer

    def checkpoint_state(self, *, loading: bool = False) -> AbstractContextManager[tuple[Module, Optimizer]]:
        model, optimizer = self.model_and_optimizer()
        if self.uses_deepspeed:
            return materialized_state(optimizer, model, self.config, loading=loading)
        return nullcontext((model, optimizer))

    def close(self) -> None:
        del self.model, self.unwrapped_model, self.optimizer, self.zero_grad, self.sync_replicas
        del self.parameters, self.meshes
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        if self.world_size > 1 and self.config.distributed.strategy == "fsdp":
            clear_mesh_caches()

    def shard(self, model: Decoder) -> None:
        """Shard what Accelerate cannot: experts, parameters in full precision, ranks that share data."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        if not self.place.sizes.is_data_parallel:
            plugin.auto_wrap_policy = None  # layers are sharded already, and Accelerate keeps them
            parallelize(model, self.meshes, self.place, self.config)
            return
        plugin.ignored_modules = full_precision_modules(model)
        mesh: Any = self.accelerator.torch_device_mesh
        if (experts := expert_mesh(self.config, self.device.type, self.world_size)) is not None:
            shard_experts(model, experts, self.config, layer_precision(self.config.training.precision))
        if mesh is not None:
            mesh = mesh["dp_replicate", "dp_shard_cp"]
            set_timeout(mesh, self.config)
        shard_full_precision(model, mesh)


def zero_plugin(config: Config) -> DeepSpeedPlugin:
    """The plugin for ZeRO, whose engine clips, steps and zeroes gradients inside `accelerator.backward`."""
    prepare_deepspeed()
    world_size = int(os.environ["WORLD_SIZE"])
    plugin = DeepSpeedPlugin(
        zero_stage=config.distributed.zero_stage,  # type: ignore[arg-type]  # None: the launcher's, else 2
        gradient_accumulation_steps=config.gradient_accumulation_steps(world_size),
        zero3_init_flag=False,
    )
    plugin.deepspeed_config |= zero_options(config, world_size)
    return plugin


def fsdp_plugin(config: Config, timeout: timedelta) -> FullyShardedDataParallelPlugin:
    """The plugin for FSDP2, one group per layer; it sets every option, so that launch files change none."""
    if not torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Accelerate shards only on GPUs and silently runs DDP elsewhere; only its private state changes this
        PartialState(cpu=True, init_method=rendezvous_init_method(), timeout=timeout)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["DecoderLayer"],
        mixed_precision_policy=layer_precision(config.training.precision),  # type: ignore[arg-type]  # FSDP2's
        cpu_offload=False,
        activation_checkpointing=False,  # the model recomputes its layers itself
        cpu_ram_efficient_loading=False,
    )


def parallelism(config: Config) -> ParallelismConfig | None:
    """The mesh of FSDP's replicas and shards; None for one replica, and if ranks share micro batches."""
    replicas, world_size = config.distributed.dp_replicate_size, int(os.environ.get("WORLD_SIZE", "1"))
    if replicas == 1 or world_size == 1 or not config.distributed.mesh(world_size).is_data_parallel:
        return None
    shards = config.distributed.mesh(world_size).dp_shard
    return ParallelismConfig(
        dp_replicate_size=replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1
    )


def main(argv: list[str] | None = None) -> int:
    """Train with the options in `argv` (default: the command line's); returns the exit code."""
    with report_errors():
        obey_use_cpu()
        config = load_config(argv)
        prepare_process(config)
        with hang_watchdog(config):
            return pretrain(config, AccelerateEngine(config))
    raise AssertionError("unreachable: report_errors exits after an error")


if __name__ == "__main__":
    exit_process(main())
