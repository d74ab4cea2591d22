"""A CUDA device that is not there, as a pytest plugin: `pytest -p fake_cuda tests/cuda_without_gpu`.

Fake tensors have types, shapes, strides and a device, but no values. With the hooks and the guard of
`fake_cuda.cpp`, which is built here and loaded before torch, and the properties of an H100, a GPU's code runs
on them. In a build of torch for CUDA they take the place of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def reason_without() -> str | None:
    """Why there can be no fake device here; None if there can."""
    return None if _compiler() else "no C++ compiler (g++ or clang++) to build the fake device with"


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _build() -> Path:
    """The compiled source, from a cache by source, torch's version and its folder, from which it loads."""
    torch = _torch_folder()
    facts = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + os.fsencode(torch)
    key = hashlib.sha256(facts).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"llm_pretrain-fake-cuda-{os.getuid()}" / f"{key}.so"
    if built.exists():
        return built
    built.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = built.with_suffix(f".{os.getpid()}")
    include, lib = torch / "include", torch / "lib"
    subprocess.run(
        [
            *(str(_compiler()), "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(unfinished)),
            *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
            *(f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"),
        ],
        check=True,
    )
    unfinished.rename(built)
    return built


H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85_520_809_984,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=52_428_800,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
    is_integrated=0,
    gcnArchName="",
)


class Event:
    """An event or a stream on which nothing is outstanding."""

    stream_id, device_index, device_type, cuda_stream = 0, 0, 1, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


def install() -> None:
    """Load the hooks, then make torch see one H100."""
    assert "torch" not in sys.modules, "the hooks must be loaded before torch; use -p fake_cuda"
    library = ctypes.CDLL(str(_build()))
    import torch
    from torch._subclasses import fake_tensor

    library.register_guard()
    avoids_init: Any = property(lambda self: True)
    fake_tensor.FakeTensorMode.avoid_device_init = avoids_init
    fake_tensor.init_gpu_context = lambda device: None
    stream = Event()
    capability: Any = lambda device=None: (H100.major, H100.minor)  # noqa: E731
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "is_initialized": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": capability,
        "get_device_name": lambda device=None: H100.name,
        "get_device_properties": lambda device=None: H100,
        "_get_device_properties": lambda device=None: H100,
        "Event": Event,
        "Stream": Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda self, stream: None
    for name, value in {
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
    }.items():
        setattr(torch._C, name, value)
    from llm_pretrain.forecast.simulation.device import register_kernels

    register_kernels("CUDA")


REASON = reason_without()
if REASON is None:
    install()
