"""What `doctor --gpu` asks a device, and how it fits a micro batch into one, on a fake H100."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks import gpu_profile
from benchmarks.gpu_step import CASES
from llm_pretrain.commands import _gpu_sections
from llm_pretrain.commands._gpu_sections import Findings
from llm_pretrain.config import load_config


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (40 << 30, 80 << 30))


def test_a_device_is_described(tmp_path: Path):
    findings = Findings(tmp_path / "result.json")
    _gpu_sections.facts(findings)
    tables = {table["title"]: table["rows"] for table in json.loads(findings.file.read_text())["tables"]}
    properties = torch.cuda.get_device_properties(0)
    assert tables["GPUs"] == [[0, properties.name, "9.0", properties.total_memory / 2**30, 40.0, 132, 50.0]]
    assert tables["Peer access, from row to column"] == [[0, "yes"]]


def test_a_micro_batch_is_halved_until_the_estimate_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    case = next(case for case in CASES if case.name == "mixture")
    monkeypatch.setattr(gpu_profile, "_config", lambda case, folder: load_config(
        [
            *("--config", "gpt2-124m", "--training.sequence_length", "1024", "--training.precision", "bf16"),
            *(word for name, value in case.model.items() for word in (f"--model.{name}", str(value))),
            *("--training.micro_batch_size", str(case.micro_batch_size)),
            *("--training.global_batch_size", str(case.micro_batch_size)),
        ],
        needs_data=False, has_bf16=True,
    ))  # fmt: skip
    large = gpu_profile._fitting(case, tmp_path, 300).micro_batch_size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (24 << 30, 80 << 30))
    small = gpu_profile._fitting(case, tmp_path, 300).micro_batch_size
    assert 1 <= small < large <= case.micro_batch_size


def test_kernels_are_told_from_the_operations_that_start_them():
    event = SimpleNamespace(
        device_type=DeviceType.CUDA, key="gemm", count=3, self_device_time_total=7.0, self_cpu_time_total=0.0
    )
    started = SimpleNamespace(**vars(event) | {"device_type": DeviceType.CPU, "key": "aten::mm"})
    marked = SimpleNamespace(**vars(event) | {"key": "Optimizer.step", "is_user_annotation": True})
    profiled = SimpleNamespace(key_averages=lambda: [event, started, marked])
    assert list(gpu_profile._kernels(profiled, torch.device("cuda"))) == [("gemm", 3, 7.0)]
    assert [each[0] for each in gpu_profile._kernels(profiled, torch.device("cpu"))] == ["aten::mm"]
