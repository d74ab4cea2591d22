"""GPUs and the links between them: sizes and speeds from data sheets, which nothing reaches."""

from __future__ import annotations

from dataclasses import dataclass

from llm_pretrain.tracking.metrics import device_peak_flops

GPU_GB = {
    "t4": 16, "v100": 32, "a10": 24, "a10g": 24, "a30": 24, "a40": 48, "a100": 80, "a800": 80, "l4": 24,
    "l40": 48, "l40s": 48, "h20": 96, "h100": 80, "h800": 80, "h200": 141, "gh200": 96, "b100": 192,
    "b200": 180, "b300": 288, "gb200": 186, "gb300": 288, "mi300x": 192, "mi325x": 256, "mi355x": 288,
    "4090": 24,
}  # fmt: skip
"""Memory in GB, by the vendors' datasheets; the larger variant where there are two."""
DEFAULT_MFU = 0.4
"""Share of a GPU's peak that a run is expected to reach."""


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, in equal nodes.

    Args:
        memory_gb: Of a GPU.
        bf16_tflops: Dense products in bf16 or fp16.
        fp32_tflops: In fp32, without tensor cores.
        memory_gb_per_second: Bandwidth of a GPU's memory.
        gpus_per_node: GPUs that the inner link connects.
        nvlink_gb_per_second: Of a GPU to the others of its node, in one direction.
        network_gb_per_second: Of a GPU's share of its node's network, in one direction.
        nvlink_microseconds: Time of one hop inside a node, whatever is sent.
        network_microseconds: The same between nodes. Both are NCCL's own for large messages (`hwLat` in
            src/graph/tuning.cc).
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


def _machine(gpu: str, *numbers: float, capability: int) -> Machine:
    flops = device_peak_flops(gpu)
    assert flops is not None, gpu
    fp32, memory, per_node, nvlink, network = numbers
    return Machine(
        GPU_GB[gpu], flops / 1e12, fp32, memory, int(per_node), nvlink, network, capability=capability
    )


MACHINES = {
    # NVIDIA's data sheets of the GPU (SXM) and of DGX A100, H100, H200, B200: a network card for each GPU
    "a100": _machine("a100", 19.5, 2039, 8, 300, 25, capability=80),
    "h100": _machine("h100", 66.9, 3350, 8, 450, 50, capability=90),
    "h200": _machine("h200", 66.9, 4800, 8, 450, 50, capability=90),
    "b200": _machine("b200", 75, 8000, 8, 900, 50, capability=100),
    # NVIDIA's Ada whitepaper, appendix A; PCIe 4.0 x16 instead of NVLink; 100 Gbit/s for a node, assumed
    "4090": _machine("4090", 82.6, 1008, 8, 32, 1.6, capability=89),
}
"""Common clusters by the name of their GPU."""
