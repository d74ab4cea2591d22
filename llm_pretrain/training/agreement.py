"""Compares what must be equal on all ranks: settings, code, data and parameters."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

import llm_pretrain
from llm_pretrain.config import Config, to_dict
from llm_pretrain.data import TokenStore
from llm_pretrain.distributed.collectives import check_same
from llm_pretrain.distributed.watchdog import heartbeat
from llm_pretrain.errors import ConfigError, DivergedError
from llm_pretrain.training.step import Engine

MAY_DIFFER = {"data.num_workers", "data.on_error", "distributed.cpu_threads", "run.output_dir"}
"""Settings that depend on the machine and change no result: processes and threads by its cores, and the path
under which it sees the run's folder, whose marker is compared before every write."""
PATHS = {"model.init_from", "checkpoint.resume"}
"""Settings of which only the kind is compared: machines may see one file under different paths. What is read
from there is compared by the parameters' digest."""
VARIABLES = (
    *("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR"),
    *("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE"),
)
"""Environment variables that change the arithmetic or the collectives."""


def check_launch(config: Config, engine: Engine) -> None:
    """Stop unless all ranks run one script and one source code with the same settings, packages and variables
    (collective, the first one of a run: it works between the two scripts).

    Raises:
        ConfigError: naming each difference with both values and ranks.
    """
    if engine.world_size > 1:
        heartbeat("comparing the settings of all ranks")
        check_same(engine, launch_facts(config, engine))


def launch_facts(config: Config, engine: Engine) -> dict[str, str]:
    """What must be equal on all ranks before any file is opened, by name."""
    facts = {"script": _script(engine), "device": engine.device.type}
    for section, fields in to_dict(config).items():
        names = {f"{section}.{field}": value for field, value in fields.items()}
        facts |= {name: _setting(name, value) for name, value in names.items()}
    facts["Python"] = ".".join(map(str, sys.version_info[:2]))
    facts |= {f"package {package}": _version(package) for package in _packages(config)}
    facts |= {f"environment variable {name}": os.environ.get(name, "unset") for name in VARIABLES}
    package = Path(llm_pretrain.__file__).parent
    for file in sorted(package.rglob("*.py")):
        facts[f"source {file.relative_to(package.parent)}"] = _digest(file.read_bytes())
    return facts


def _setting(name: str, value: Any) -> str:
    """A setting as it is compared."""
    if name in MAY_DIFFER:
        return "any"
    if name == "data.sources":  # the stores are compared by their contents
        return json.dumps([source | {"store": None} for source in value])
    if name in PATHS and value not in (None, "auto", "never"):
        return "a path"
    return json.dumps(value)


def _script(engine: Engine) -> str:
    """File that defines the engine with its digest (none for a notebook's class), and what launches it."""
    file = Path(getattr(sys.modules.get(type(engine).__module__), "__file__", None) or "")
    parts = [file.name, _digest(file.read_bytes())] if file.is_file() else [type(engine).__name__]
    return " ".join([*parts, *(["accelerate", _version("accelerate")] * (engine.launcher == "accelerate"))])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _packages(config: Config) -> list[str]:
    """The packages besides Accelerate that compute or communicate in this run."""
    return [
        *("torch", "numpy", "safetensors"),
        *(["deepspeed"] if config.distributed.strategy == "deepspeed" else []),
        *(["torchao"] if config.training.float8 else []),
        *(["liger-kernel"] if config.training.loss_implementation == "liger" else []),
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def check_stores(engine: Engine, stores: Sequence[TokenStore]) -> None:
    """Stop unless all ranks have opened the same token stores, wherever they lie (collective)."""
    check_same(engine, {f"data.sources[{k}].store": store.hash[:12] for k, store in enumerate(stores)})


def check_parameters(engine: Engine, model: Module, when: str, *, training: bool = False) -> None:
    """Stop unless all ranks hold the same values of what is not sharded (collective).

    A tensor's digest is the sum of its memory as integers: one pass, on the device.

    Args:
        engine, model: The run's; the model unwrapped.
        when: For the message.
        training: Whether the values are the result of training, and not of the settings.

    Raises:
        ConfigError, DivergedError: naming the first tensor that differs; the latter in training.
    """
    if engine.world_size == 1:
        return
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "full_tensor")  # a shard of FSDP
    }
    sums = [_bits_sum(tensor) for tensor in tensors.values()]
    values = torch.stack(sums).tolist() if sums else []
    facts = {
        f"{name} {when}": f"{value & (1 << 64) - 1:016x}" for name, value in zip(tensors, values, strict=True)
    }
    check_same(engine, facts, DivergedError if training else ConfigError, limit=1)


def _bits_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum modulo 2^64 of a tensor's bytes, eight at a time: 40 times as fast as of its elements."""
    tensor = tensor.detach().contiguous().flatten()
    if tensor.storage_offset() * tensor.element_size() % 8:  # a view into a larger tensor
        tensor = tensor.clone()
    content = tensor.view(torch.uint8)
    whole = len(content) // 8 * 8
    return content[:whole].view(torch.int64).sum() + content[whole:].sum(dtype=torch.int64)
