"""Turns out-of-memory errors into one line: the error, the model's size, a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError, ResourceError
from llm_pretrain.memory import CUDA_CONTEXT, estimate_memory
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.text import first_line, size_text

_MESSAGES = (
    "can't allocate memory",  # torch on Linux
    "not enough memory: you tried to allocate",  # torch elsewhere
    "std::bad_alloc",
    "can't start new thread",  # no memory for its stack
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    os.strerror(errno.ENOMEM),
)
_CGROUP = Path("/sys/fs/cgroup/memory.max")


class MemoryLimit(NamedTuple):
    """Bytes that a process may use, and the beginning of a phrase with them, such as "the machine has"."""

    total: int
    bound: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a GPU's or the host's memory ran out, in torch, NumPy or Python."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, ResourceError) or not isinstance(error, Exception):
        return False  # reported already, or an exit
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(message in str(error) for message in _MESSAGES)


@contextmanager
def explain_out_of_memory(config: Config | None = None, world_size: int = 1) -> Iterator[None]:
    """Turn any out-of-memory error into a ResourceError of one line.

    Args:
        config: The resolved configuration. If it is None, the line does not name the model's size.
        world_size: Number of processes.
    """
    # computed before an error occurs, since counting needs memory too
    lines = model_lines(config, world_size) if config else ("", "lower training.micro_batch_size")
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        parts = (f"out of memory: {first_line(error):.200}", *lines)
        explained = ResourceError("; ".join(part for part in parts if part))
        explained.shared = isinstance(error, PretrainError) and error.shared
        raise explained from error


def check_memory(config: Config, world_size: int, device: torch.device) -> list[str]:
    """Stop if the model's parameters, gradients and moments exceed the machine's memory.

    Linux overcommits memory: it grants too much, and kills processes when they use it.

    Returns:
        A warning if the estimated peak of a training step exceeds the GPU's memory.

    Raises:
        ResourceError: names the needed and the available size.
    """
    on_cpu = device.type == "cpu"
    needs = _state_bytes(config, world_size)
    if config.distributed.strategy == "deepspeed":  # it shards parameters that have their values
        needs = max(needs, 4 * count_parameters(config.model).total)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    memory = _host_memory(processes) if on_cpu else _gpu_memory(device)
    if needs > memory.total:
        raise ResourceError(
            f"out of memory before the model was built: {_requirement(config, world_size)}; "
            f"{memory.bound} {size_text(memory.total)}; {_smaller_model(config, world_size)}"
        )
    return [] if on_cpu else step_warnings(config, world_size, device)


def _gpu_memory(device: torch.device) -> MemoryLimit:
    return MemoryLimit(torch.cuda.get_device_properties(device).total_memory, "the GPU has")


def _host_memory(processes: int) -> MemoryLimit:
    """The share of each of `processes` in the memory of this machine, or of its container if that is less."""
    machine = MemoryLimit(psutil.virtual_memory().total + psutil.swap_memory().total, "the machine has")
    container = machine
    with suppress(OSError, ValueError):  # there is no control group, or no limit
        container = MemoryLimit(int(_CGROUP.read_text()), "the container may have")
    total, bound = min(machine, container)
    return MemoryLimit(total // processes, f"{bound} for each process" if processes > 1 else bound)


def step_warnings(config: Config, world_size: int, device: torch.device) -> list[str]:
    """A warning if the estimated peak of a training step exceeds the GPU's memory. On a CPU: if the peaks of
    all the run's processes together exceed this machine's memory."""
    on_gpu = device.type != "cpu"
    peak = estimate_memory(config, world_size, on_gpu=on_gpu).peak + (CUDA_CONTEXT if on_gpu else 0)
    memory = _gpu_memory(device) if on_gpu else _host_memory(world_size)
    if peak <= memory.total:
        return []
    return [
        f"a step is estimated to need about {size_text(peak)}, {memory.bound} {size_text(memory.total)}; "
        f"if it runs out of memory, change {model_lines(config, world_size)[1]}"
    ]


def model_lines(config: Config, world_size: int) -> tuple[str, str]:
    """The model's memory, and settings to change, the cheapest change first."""
    training, advice = config.training, []
    per_step = training.global_batch_size // config.distributed.mesh(world_size).data
    smaller = [size for size in range(1, training.micro_batch_size) if per_step % size == 0]
    if smaller:
        now = training.micro_batch_size
        advice.append(f"training.micro_batch_size {smaller[-1]} instead of {now} (the result stays)")
    if not training.activation_checkpointing:
        advice.append("training.activation_checkpointing true")
    advice.append(f"training.sequence_length below {training.sequence_length}")
    advice.append(_smaller_model(config, world_size))
    requirement = f"{_requirement(config, world_size)}, without activations"
    return requirement, "in this order: " + ", ".join(advice)


def _requirement(config: Config, world_size: int) -> str:
    each = " in each process" if world_size > 1 else ""
    parts = "with gradients and the optimizer's state in fp32"
    count, needs = count_parameters(config.model).total, _state_bytes(config, world_size)
    return f"{count:,} parameters take {size_text(needs)}{each} {parts}"


def _state_bytes(config: Config, world_size: int) -> int:
    """Bytes of a process's parameters, gradients and optimizer state."""
    memory = estimate_memory(config, world_size)
    return memory.weights + memory.gradients + memory.optimizer


def _smaller_model(config: Config, world_size: int) -> str:
    """Settings that reduce the memory of parameters, gradients and optimizer state."""
    can_shard = world_size > 1 and config.distributed.strategy == "ddp"
    experts = ", model.num_experts" if config.model.num_experts else ""
    smaller = f"a smaller model (model.vocab_size, model.hidden_size, model.num_hidden_layers{experts})"
    return f"distributed.strategy fsdp, {smaller}" if can_shard else smaller
