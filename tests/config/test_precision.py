"""`training.precision: auto`: what it becomes, that it is concrete once loaded, that ranks agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm_pretrain.config import loading as module
from llm_pretrain.config.loading import (
    dump_yaml,
    load_config,
    multiplies_in_bf16,
)
from llm_pretrain.training.trainer import config_diff

SOURCES = ("--data.sources", "[{store: x}]")


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_loaded_configuration_is_concrete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_bf16: bool, precision: str
):
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: has_bf16)
    assert load_config([*SOURCES]).training.precision == precision
    assert load_config([*SOURCES, "--training.precision", "auto"]).training.precision == precision
    for named in ("fp32", "bf16", "fp16"):
        assert load_config([*SOURCES, "--training.precision", named]).training.precision == named
    with pytest.raises(SystemExit):
        load_config(["--print_config"])
    assert f"precision: {precision}\n" in capsys.readouterr().out


MKLDNN, AVX512_BF16, AMX = "mkldnn", "avx512_bf16", "amx"


@pytest.mark.parametrize(
    ("machine", "has", "expected"),
    [
        ("x86_64", {MKLDNN, AVX512_BF16}, True),
        ("x86_64", {MKLDNN, AMX}, True),
        ("x86_64", {MKLDNN}, False),  # AVX-512 without bf16: oneDNN emulates
        ("x86_64", {AVX512_BF16}, False),  # torch built without oneDNN
        ("aarch64", {MKLDNN}, True),
        ("arm64", set(), False),
    ],
)
def test_emulated_bf16_does_not_count(
    monkeypatch: pytest.MonkeyPatch, machine: str, has: set[str], expected: bool
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: MKLDNN in has)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: AVX512_BF16 in has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: AMX in has)
    assert multiplies_in_bf16() is expected


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_decides_where_there_is_one(monkeypatch: pytest.MonkeyPatch, native: bool):
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert multiplies_in_bf16() is native


def test_this_cpu_is_what_the_system_says():
    file = Path("/proc/cpuinfo")
    if torch.cuda.is_available() or not file.is_file() or "flags" not in file.read_text():
        pytest.skip("no x86 Linux without a GPU")
    flags = file.read_text()
    assert multiplies_in_bf16() is ("avx512_bf16" in flags or "amx_bf16" in flags)


def test_another_precision_than_the_attempt_before_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same command, on a machine without bf16."""
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: True)
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(load_config([*SOURCES])))
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: False)
    changed = load_config([*SOURCES, "--optimizer.base_hidden_size", "64"])
    assert config_diff(file, changed) == [
        "optimizer.base_hidden_size: null -> 64",
        "training.precision: bf16 -> fp32",
    ]
