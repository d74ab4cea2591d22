"""Small runs of either engine inside one process, with or without a mistake put in."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.faults import Fault
from support.fork_server import SCRIPTS
from support.stepping import Driven, drive, resolved

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import (
    Config,
    DataConfig,
    OptimizerConfig,
    ScheduleConfig,
    SourceConfig,
    TrainingConfig,
)

ENGINES = {"torchrun": "TorchrunEngine", "accelerate": "AccelerateEngine"}

_MODEL = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.01,
    initializer_range=0.1,
)
_TRAINING = TrainingConfig(
    sequence_length=32,
    micro_batch_size=2,
    global_batch_size=8,
    max_steps=3,
    z_loss_coef=0.01,
    precision="fp32",
)


def small_config(store: Path, **changes: dict[str, Any]) -> Config:
    """A resolved configuration over `store`; `changes` maps a section to its changed fields.

    Four micro batches of two padded sequences make a step; the learning rate differs at every step.
    """
    base = Config(
        data=DataConfig(sources=[SourceConfig(str(store))], packing="pad"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="linear", warmup_steps=1),
        distributed=DistributedConfig(cpu_threads=1, timeout_seconds=60),
        model=_MODEL,
        training=_TRAINING,
    )
    sections = {name: replace(getattr(base, name), **fields) for name, fields in changes.items()}
    return resolved(replace(base, **sections))


def engine_class(launcher: str) -> type:
    """The engine of a launch path."""
    return getattr(import_module(SCRIPTS[launcher]), ENGINES[launcher])


def run_engine(launcher: str, config: Config, *faults: Fault, windows: Any = None) -> Driven:
    """Drive one engine through `config`'s steps, with the faults in force, and close it."""
    reset_accelerate()
    chosen = engine_class(launcher)
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            fault(patch, chosen)
        engine = chosen(config)
        driven = drive(engine, config, windows=windows)
        engine.close()
    return driven


def reset_accelerate() -> None:
    """Forget the state that Accelerate keeps per process, and what it wrote into the environment."""
    for variable in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(variable, None)
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
