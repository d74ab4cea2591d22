"""Turns out-of-memory errors into one line: bytes requested and free, the model's size, a remedy."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import PretrainError, ResourceError
from llm_pretrain.memory import CUDA_CONTEXT, estimate_memory
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.text import size_text

_NO_THREAD = "can't start new thread"
"""Python's error if memory lacks room for a thread's stack, or if a limit on processes is reached."""
_MESSAGES = (
    "can't allocate memory",  # torch on Linux
    "not enough memory: you tried to allocate",  # torch elsewhere
    "std::bad_alloc",
    _NO_THREAD,
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    os.strerror(errno.ENOMEM),
)
_ONEDNN = re.compile(r"could not create a (primitive\b(?! desc)|memory)")
"""oneDNN's error if there is no memory for generated code; the error does not name the cause."""
_ASKED = re.compile(r"(?i)(?:tried to|unable to) allocate ([\d.]+) ?(bytes|[KMGTPE]?i?B)\b")
_ON_GPU = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_UNITS = "bkmgtpe"
"""First letters of bytes, KiB, MiB and so on."""
_CGROUP = Path("/sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """Bytes that a process may use (free bytes and total), and the source of the limit.

    `bound` begins a phrase that ends with a number of bytes, such as "the machine has".
    """

    free: int
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
    return any(message in str(error) for message in _MESSAGES) or bool(_ONEDNN.search(str(error)))


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
        explained = ResourceError(_explanation(error, *lines))
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
    for memory in _host_bounds() if on_cpu else [_gpu_bound(device)]:
        if needs > memory.total:
            raise ResourceError(
                f"out of memory before the model was built: {_requirement(config, world_size)}; "
                f"{memory.bound} {size_text(memory.total)}; {_smaller_model(config, world_size)}"
            )
    return [] if on_cpu else step_warnings(config, world_size, device)


def _gpu_bound(device: torch.device) -> MemoryLimit:
    total = torch.cuda.get_device_properties(device).total_memory
    return MemoryLimit(total, total, "the GPU has")


def step_warnings(config: Config, world_size: int, device: torch.device) -> list[str]:
    """A warning if the estimated peak of a training step exceeds the GPU's memory. On a CPU: if the peaks of
    all the run's processes together exceed this machine's memory."""
    on_gpu, processes = device.type != "cpu", 1
    peak = estimate_memory(config, world_size, on_gpu=on_gpu).peak
    if on_gpu:
        peak, bounds = peak + CUDA_CONTEXT, [_gpu_bound(device)]
    else:
        processes, bounds = world_size, _host_bounds(per_process=False)
    least = min(bounds, key=lambda memory: memory.total)
    if peak * processes <= least.total:
        return []
    each = f" in each of {processes} processes" if processes > 1 else ""
    return [
        f"a step is estimated to need about {size_text(peak)}{each}, {least.bound} "
        f"{size_text(least.total)}; if it runs out of memory, change {model_lines(config, world_size)[1]}"
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


def _explanation(error: Exception, model: str, advice: str) -> str:
    """The line for an out-of-memory error: bytes requested and free, then `model` and `advice`."""
    text = str(error)
    asked = ""
    if found := _ASKED.search(text):
        asked = f"{size_text(float(found[1]) * 1024 ** _UNITS.index(found[2][0].lower()))} asked for, "
    if on_gpu := _ON_GPU.search(text):
        free = f"{on_gpu[2]} of {on_gpu[1]} free on the GPU"
    elif "CUDA" in text or "CUBLAS" in text:
        free = "none left on the GPU"
    else:
        least = min(_host_bounds(per_process=False), key=lambda memory: memory.free)
        free = f"{size_text(least.free)} left of what {least.bound}: {size_text(least.total)}"
    threads = " or threads (ulimit -u, the container's pids.max)" if _NO_THREAD in text else ""
    where = f" ({text.splitlines()[0]:.160})" if isinstance(error, PretrainError) else ""
    first = f"out of memory{threads}{where}: {asked}{free}"
    return "; ".join(part for part in (first, model, advice) if part)


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


def _host_bounds(*, per_process: bool = True) -> list[MemoryLimit]:
    """Limits of this process's memory: the machine's, the container's and the process's own (ulimit).

    Args:
        per_process: Divide shared limits by the number of the run's processes on this machine.
    """
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if per_process else 1
    machine, has = psutil.virtual_memory(), "the machine has for it" if sharing > 1 else "the machine has"
    swap = psutil.swap_memory().total if per_process else 0
    bounds = [MemoryLimit(machine.available // sharing, (machine.total + swap) // sharing, has)]
    limit = _number(_CGROUP / "memory.max")
    if limit is not None:
        free = max(0, limit - (_number(_CGROUP / "memory.current") or 0))
        bounds.append(MemoryLimit(free // sharing, limit // sharing, "the container may have"))
    if hasattr(psutil, "RLIMIT_AS"):
        process = psutil.Process()
        limit, _ = process.rlimit(psutil.RLIMIT_AS)
        if limit != psutil.RLIM_INFINITY:
            free = max(0, limit - process.memory_info().vms)
            bounds.append(MemoryLimit(free, limit, "the process may have (ulimit -v)"))
    return bounds


def _number(file: Path) -> int | None:
    """The number in a control group's file; None if there is no file or no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
