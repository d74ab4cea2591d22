"""What the machine can do and what it has used: peak arithmetic by device name, memory in use.

The peaks are the vendors' datasheets', dense (without structured sparsity), in bf16 with fp32
accumulation; in fp16 where the device has no bf16 (V100, T4). They are promises, not measurements.
"""

from __future__ import annotations

import re
from contextlib import suppress
from mmap import PAGESIZE
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PEAK_TERAFLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA data-centre datasheets; the first pattern that matches counts, so variants stand first
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
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090 Ti\b", 80.0),
    (r"\bRTX 3090\b", 71.0),
    # AMD Instinct datasheets
    (r"\bMI355X\b", 2516.6),
    (r"\bMI3(00|25)X\b", 1307.4),
    (r"\bMI250X\b", 383.0),
)


def device_peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 floating-point operations per second of a device.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it, such as `NVIDIA H100 80GB HBM3`.

    Returns:
        The datasheet's value, or None for a device (a CPU, say) that the table does not know.
    """
    for pattern, teraflops in _PEAK_TERAFLOPS:
        if re.search(pattern, device_name, flags=re.IGNORECASE):
            return teraflops * 1e12
    return None


def memory_bytes(device: torch.device) -> int:
    """Memory that training has taken, in bytes: the peak of a CUDA device, else the process's own size."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Linux's own, since it is read at every row and psutil takes three times as long
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * PAGESIZE
    import psutil

    return psutil.Process().memory_info().rss


def size_text(number: int) -> str:
    """A number of bytes such as `1.5 GiB`, in the unit that leaves something before the point."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
