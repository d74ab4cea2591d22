"""Compares what must be equal on all ranks: settings, code, data and parameters."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.optimizers import OPTIMIZERS, declaration
from llm_pretrain.config.tree import Config
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.collectives import check_same
from llm_pretrain.errors import ConfigError, DivergedError
from llm_pretrain.hardware import ARITHMETIC_VARIABLES, package_version
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.training.engine import Engine

MAY_DIFFER = {"data.num_workers", "distributed.cpu_threads", "run.output_dir"}
"""Settings that may differ between ranks, because they change no result: numbers of workers and threads, and
the path of the run's folder. A marker in the folder, checked before every write, identifies the run."""
PATHS = {"model.init_from", "checkpoint.resume", "checkpoint.start_from"}
"""Settings that are paths. A path may differ between machines, so only whether it is set is compared here;
`check_parameters` compares what the run reads from it."""


def check_launch(config: Config, engine: Engine) -> None:
    """Stop unless all ranks run the same script and source code, with equal settings, packages and variables.
    This is the first collective of a run, and works even between ranks that run different scripts.

    Raises:
        ConfigError: naming each difference with both values and ranks.
    """
    if engine.world_size > 1:
        heartbeat("comparing the settings of all ranks")
        check_same(engine, launch_facts(config, engine))


def launch_facts(config: Config, engine: Engine) -> dict[str, str]:
    """Name -> value of everything that must be equal on all ranks before any file is opened."""
    facts = {"script": _script(engine), "device": engine.device.type}
    for section, fields in to_dict(config).items():
        names = {f"{section}.{field}": value for field, value in fields.items()}
        facts |= {name: _setting(name, value) for name, value in names.items()}
    facts["Python"] = ".".join(map(str, sys.version_info[:2]))
    declared = declaration(config.optimizer.name)
    if declared.needs_whole_matrices:  # the ranks exchange buffers of this type
        from llm_pretrain.optim.orthogonal import product_dtype

        dtype = product_dtype(engine.device, config.training.precision != "fp32")
        facts[f"type of {declared.title}'s products"] = str(dtype)
    if config.optimizer.name not in OPTIMIZERS:
        from llm_pretrain.optim.by_path import imported

        with suppress(ConfigError, OSError):  # a failing import is reported later, on every rank
            file = _file_of(imported(config.optimizer.name).__module__)
            facts["source of optimizer.name"] = _digest(file.read_bytes())
    packages = ["torch", "numpy", "safetensors"]  # what computes or communicates; `_script` has Accelerate
    packages += ["deepspeed"] if config.distributed.strategy == "deepspeed" else []
    packages += ["torchao"] if config.training.float8 else []
    facts |= {f"package {each}": package_version(each) or "not installed" for each in packages}
    facts |= {f"environment variable {name}": os.environ.get(name, "unset") for name in ARITHMETIC_VARIABLES}
    package = Path(__file__).parent.parent
    for file in sorted(package.rglob("*.py")):
        facts[f"source {file.relative_to(package.parent)}"] = _digest(file.read_bytes())
    return facts


def _setting(name: str, value: Any) -> str:
    """The text by which a setting is compared; a constant for a setting that may differ between ranks."""
    if name in MAY_DIFFER:
        return "any"
    if name == "data.sources":  # the stores are compared by their contents
        return json.dumps([source | {"store": None} for source in value])
    if name in PATHS and value not in (None, "auto", "never"):
        return "a path"
    return json.dumps(value)


def _script(engine: Engine) -> str:
    """Name and digest of the file that defines the engine; under Accelerate also Accelerate's version.

    An engine class from a notebook has no file; the name of the class is used instead.
    """
    file = _file_of(type(engine).__module__)
    parts = [file.name, _digest(file.read_bytes())] if file.is_file() else [type(engine).__name__]
    if engine.launcher == "accelerate":
        parts += ["accelerate", package_version("accelerate") or "not installed"]
    return " ".join(parts)


def _file_of(module: str) -> Path:
    """The file of an imported module; the current folder for a module without a file."""
    return Path(getattr(sys.modules.get(module), "__file__", None) or "")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def check_stores(engine: Engine, stores: Sequence[TokenStore]) -> None:
    """Stop unless all ranks have opened the same token stores, wherever they lie (collective)."""
    check_same(engine, {f"data.sources[{k}].store": store.hash[:12] for k, store in enumerate(stores)})


def check_parameters(engine: Engine, model: Module, when: str, *, training: bool = False) -> None:
    """Stop unless parameters and buffers that several ranks hold are equal on these ranks (collective).

    A tensor's digest is the sum of its memory as integers: one pass, on the device. If several replicas each
    shard a tensor, the digests of its shards are added within each replica. A tensor held only once is left
    out.

    Args:
        engine: The run's engine.
        model: Unwrapped.
        when: The moment of the comparison, for the message, such as "after initialisation".
        training: Whether training has changed the values since they were last compared.

    Raises:
        ConfigError: naming the first tensor that differs.
        DivergedError: instead of ConfigError, with `training`.
    """
    if engine.world_size == 1:
        return
    from llm_pretrain.distributed.fsdp import replicated_digests

    digests = replicated_digests(model, engine.world_size, bits_sum)
    kind = DivergedError if training else ConfigError
    if (pipeline := engine.pipeline) is not None:  # each stage has other parts of the model
        stages, digests = pipeline.gather(digests), pipeline.merged(digests)
        # a tied matrix is in the first and the last stage
        apart = [name for each in stages for name, value in each.items() if value != digests[name]]
        for names in engine.gather_objects(apart):
            if names:
                raise kind(f"{names[0]} {when}: expected the same in all stages, found different values")
    facts = {f"{name} {when}": f"{value % 2**64:016x}" for name, value in digests.items()}
    check_same(engine, facts, kind, limit=1)


def bits_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's memory, read as 64-bit integers, plus the bytes left over; int64, 0-dim.

    This sum is 40 times as fast as a sum of the elements. It wraps around at 2^64.
    """
    tensor = tensor.detach().contiguous().flatten()
    if tensor.storage_offset() * tensor.element_size() % 8:  # int64 needs aligned memory
        tensor = tensor.clone()
    if tensor.nbytes % 8 == 0:
        return tensor.view(torch.int64).sum()
    content = tensor.view(torch.uint8)
    whole = len(content) // 8 * 8
    return content[:whole].view(torch.int64).sum() + content[whole:].sum(dtype=torch.int64)
