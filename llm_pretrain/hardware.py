"""Data-sheet speeds of GPUs and links, memory in use, and the facts that decide the bits of results.

Real programs do not reach the speeds in data sheets.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.text import first_line
from llm_pretrain.version import __version__

if TYPE_CHECKING:
    import torch

_PEAK_TERAFLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA data-centre datasheets; the first matching pattern counts, so variants come first
    (r"\bGB300\b|\bB300\b", 2500.0),
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bB100\b", 1750.0),
    (r"\bGH200\b", 989.4),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH[18]00\b.*PCIe", 756.0),
    (r"\bH[18]00\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10G\b", 70.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),
    (r"\bV100\b.*PCIe", 112.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
    # NVIDIA workstation and GeForce: architecture whitepapers
    (r"\bRTX 6000 Ada\b", 364.2),
    (r"\bRTX A6000\b", 154.8),
    (r"\bRTX 5090\b", 209.5),
    (r"\b4090\b", 165.2),
    (r"\bRTX 3090 Ti\b", 80.0),
    (r"\bRTX 3090\b", 71.0),
    # AMD Instinct datasheets
    (r"\bMI355X\b", 2516.6),
    (r"\bMI3(00|25)X\b", 1307.4),
    (r"\bMI250X\b", 383.0),
)
"""Pattern of a device's name and peak teraFLOPS from the datasheet, not measured: dense products (without
structured sparsity) in bf16 with fp32 accumulation, or in fp16 on devices without bf16 (V100, T4)."""
GPU_GB = {
    "t4": 16, "v100": 32, "a10": 24, "a10g": 24, "a30": 24, "a40": 48, "a100": 80, "a800": 80, "l4": 24,
    "l40": 48, "l40s": 48, "h20": 96, "h100": 80, "h800": 80, "h200": 141, "gh200": 96, "b100": 192,
    "b200": 180, "b300": 288, "gb200": 186, "gb300": 288, "mi300x": 192, "mi325x": 256, "mi355x": 288,
    "4090": 24,
}  # fmt: skip
"""Memory in GB, from the vendors' datasheets; of two variants, the larger one."""
DEFAULT_MFU = 0.4
"""Share of a GPU's peak that a run is expected to reach."""


def device_peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 floating-point operations per second of a device.

    Args:
        device_name: From `torch.cuda.get_device_name`, such as `NVIDIA H100 80GB HBM3`.

    Returns:
        The datasheet's value; None for a device that is not in the table, such as a CPU.
    """
    for pattern, teraflops in _PEAK_TERAFLOPS:
        if re.search(pattern, device_name, flags=re.IGNORECASE):
            return teraflops * 1e12
    return None


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, in equal nodes.

    Args:
        memory_gb: Memory of a GPU.
        bf16_tflops: Peak speed of dense products in bf16 or fp16.
        fp32_tflops: Peak speed in fp32, without tensor cores.
        memory_gb_per_second: Bandwidth of a GPU's memory.
        gpus_per_node: Number of GPUs that the link inside a node connects.
        nvlink_gb_per_second: Bandwidth from a GPU to the other GPUs of its node, in one direction.
        network_gb_per_second: A GPU's share of its node's network bandwidth, in one direction.
        nvlink_microseconds: Latency of one hop inside a node.
        network_microseconds: Latency between nodes. Both latencies are NCCL's values for large messages
            (`hwLat` in src/graph/tuning.cc).
        capability: CUDA's compute capability times 10, which decides the kernels.
    """

    memory_gb: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_per_second: float
    gpus_per_node: int
    nvlink_gb_per_second: float
    network_gb_per_second: float
    nvlink_microseconds: float = 3.4
    network_microseconds: float = 14.0
    capability: int = 90


def _cluster(gpu: str, *numbers: float, capability: int) -> Cluster:
    flops = device_peak_flops(gpu)
    assert flops is not None, gpu
    fp32, memory, per_node, nvlink, network = numbers
    return Cluster(
        GPU_GB[gpu], flops / 1e12, fp32, memory, int(per_node), nvlink, network, capability=capability
    )


CLUSTERS = {
    # From NVIDIA's data sheets of the GPU (SXM) and of DGX A100, H100, H200, B200: one network card per GPU
    "a100": _cluster("a100", 19.5, 2039, 8, 300, 25, capability=80),
    "h100": _cluster("h100", 66.9, 3350, 8, 450, 50, capability=90),
    "h200": _cluster("h200", 66.9, 4800, 8, 450, 50, capability=90),
    "b200": _cluster("b200", 75, 8000, 8, 900, 50, capability=100),
    # NVIDIA's Ada whitepaper, appendix A; PCIe 4.0 x16 instead of NVLink; 100 Gbit/s for a node, assumed
    "4090": _cluster("4090", 82.6, 1008, 8, 32, 1.6, capability=89),
}
"""Common clusters by the name of their GPU."""


def memory_bytes(device: torch.device) -> int:
    """Memory in use, in bytes: the peak of a CUDA device, else the resident size of the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # This is read for every row of metrics; psutil takes three times as long.
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * PAGESIZE
    import psutil

    return psutil.Process().memory_info().rss


def gpu_count() -> int:
    """GPUs that torch can use; `device_count` alone asks NVML, which also counts those of an older driver."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def unused_gpu() -> str | None:
    """A warning that torch cannot use a GPU of the NVIDIA driver here; None if it can, or there is none."""
    import torch

    with suppress(OSError):  # no driver
        if not torch.cuda.is_available() and ctypes.CDLL("libcuda.so.1").cuInit(0) not in _NO_GPU:
            try:
                torch.cuda.init()
            except (AssertionError, RuntimeError) as error:
                reason = f"torch {torch.__version__}: {first_line(error).partition('. ')[0]}"
                return f"GPU: NVIDIA's driver is here, but training takes the CPU: {reason}"
    return None


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_NO_GPU = (34, 100)
"""Answers of a stub of the driver, and of one without a GPU or whose GPUs CUDA_VISIBLE_DEVICES hides."""
ARITHMETIC_VARIABLES = (
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCHDYNAMO_DISABLE",
)
"""Environment variables that change the arithmetic or the collectives."""
_DECIDES_ARITHMETIC = ("torch", "llm_pretrain", "device", "cpu_capability", "cpu_threads")


def environment(device: torch.device) -> dict[str, str | None]:
    """Versions, hardware and git revision, and the variables of `ARITHMETIC_VARIABLES` that are set."""
    import torch

    variables = {name: os.environ[name] for name in ARITHMETIC_VARIABLES if name in os.environ}
    return variables | {
        "torch": torch.__version__,
        "llm_pretrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else None,
        "cpu_threads": str(torch.get_num_threads()) if device.type == "cpu" else None,
        "git_revision": _git_revision(),
    }


def package_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def arithmetic_changes(
    saved: Mapping[str, str | None], current: Mapping[str, str | None], then: str
) -> list[str]:
    """One line per difference of two environments that may change the last bits of results.

    `then` is a phrase that says when the `saved` environment was recorded.
    """
    return [
        f"{key} was {saved.get(key, 'unset')} {then} and is {current.get(key, 'unset')} now"
        for key in (*_DECIDES_ARITHMETIC, *ARITHMETIC_VARIABLES)
        if saved.get(key) != current.get(key)
    ]


def processor(entry: str = "model name") -> str:
    """An entry of Linux's `/proc/cpuinfo`, such as `vendor_id`; elsewhere Python's name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(entry):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _git_revision() -> str | None:
    """Commit of this framework's checkout, with `-dirty` if it has local changes; None if installed."""
    folder = Path(__file__).parent
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
    try:
        # An installed package may lie inside the repository of another project.
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, **options)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], check=True, **options
        )
        return described.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
