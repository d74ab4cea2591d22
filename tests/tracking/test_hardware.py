"""Peak FLOPS by the names that devices report, and memory in use."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llm_pretrain import hardware
from llm_pretrain.hardware import device_peak_flops, memory_bytes

DATASHEETS = {
    989.4: ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"),
    756: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
    148: ("NVIDIA H20",),
    2250: ("NVIDIA B200",),
    2500: ("NVIDIA GB200",),
    312: ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100-PCIE-40GB"),
    125: ("NVIDIA A10", "Tesla V100-SXM2-16GB"),
    70: ("NVIDIA A10G",),
    165: ("NVIDIA A30",),
    149.7: ("NVIDIA A40",),
    121: ("NVIDIA L4",),
    181.05: ("NVIDIA L40",),
    362.05: ("NVIDIA L40S",),
    65: ("Tesla T4",),
    112: ("Tesla V100-PCIE-32GB",),
    165.2: ("NVIDIA GeForce RTX 4090",),
    71: ("NVIDIA GeForce RTX 3090",),
    80: ("NVIDIA GeForce RTX 3090 Ti",),
    1307.4: ("AMD Instinct MI300X",),
}
"""Teraflops of names that devices report."""


@pytest.mark.parametrize("teraflops", DATASHEETS)
def test_known_devices_have_their_datasheets_peak(teraflops):
    for name in DATASHEETS[teraflops]:
        assert device_peak_flops(name) == pytest.approx(teraflops * 1e12), name


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA T400", "NVIDIA RTX A1000", "Apple M2", "Tesla K80"])
def test_unknown_devices_have_none(name):
    assert device_peak_flops(name) is None


def test_memory_grows_with_what_is_mapped_and_written():
    before = memory_bytes(torch.device("cpu"))
    held = np.frombuffer(mmap.mmap(-1, 2**27), dtype=np.uint8)  # no memory that the process has freed
    held[:] = 1
    assert memory_bytes(torch.device("cpu")) - before > 0.9 * held.nbytes
    assert before > 10 * 2**20


@pytest.mark.parametrize(
    ("code", "failure", "told"),
    [
        (
            0,
            RuntimeError("The NVIDIA driver is too old (found version 12040). Please update"),
            "(found version 12040)",
        ),
        (803, RuntimeError("CUDA unknown error - this may be\ndue to"), "CUDA unknown error - this may be"),
        (0, AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (100, RuntimeError("No CUDA GPUs are available"), None),
        (34, RuntimeError("CUDA driver is a stub library"), None),
        (None, RuntimeError("Found no NVIDIA driver on your system"), None),
    ],
)
def test_a_card_that_torch_cannot_use_is_told(code, failure, told, monkeypatch):
    """Its driver answers, but torch does not; nothing is said where there is no driver, or no card for it."""

    def library(name):
        if code is None:
            raise OSError
        return SimpleNamespace(cuInit=lambda flags: code)

    def init():
        raise failure

    monkeypatch.setattr(hardware.ctypes, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    found = hardware.unused_gpu()
    assert (found or "").endswith(told or "")
    assert (found is None) == (told is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reports_its_peak():
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.ones(2**20, device=device)
    peak = memory_bytes(device)
    assert peak >= held.nbytes
    del held
    assert memory_bytes(device) >= peak
