"""`llm-pretrain doctor`: facts, one line per surprise, and an exit code that a script can use."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.commands import doctor
from llm_pretrain.config.tree import Config, TrainingConfig
from llm_pretrain.config.yaml_text import read_yaml
from llm_pretrain.launch.checks import accelerate_surprises, default_accelerate_file
from llm_pretrain.launch.jobs import Machine
from llm_pretrain.training import machine


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher's variables, and a home without a file of Accelerate's."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(0, 2))
    monkeypatch.setattr(doctor, "multiplies_in_bf16", lambda: True)
    monkeypatch.setattr(machine, "multiplies_in_bf16", lambda: True)


SIZE = "parallelism_config_"
FSDP2 = "FSDP\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}"


def told(text: str, config: Config | None = None) -> list[str]:
    lines = list(accelerate_surprises(read_yaml(text), config))
    assert all("; do " in line and "\n" not in line for line in lines)
    return lines


def test_a_machine_without_surprises_is_fine(capsys: pytest.CaptureFixture[str]):
    file = str(ROOT / "configs" / "accelerate" / "cpu2.yaml")
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert main(["doctor", "--accelerate_config", file, "--config", config]) == 0
    output = capsys.readouterr().out
    for name in ("python", "torch", "accelerate", "devices", "bf16", "threads", "disk"):
        assert any(line.startswith(name) for line in output.splitlines()), name
    assert f"{file}: MULTI_GPU, 2 processes" in output
    assert output.splitlines()[-1] == "nothing here would surprise a run"


def test_an_idle_card_is_a_surprise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for module in (doctor, machine):
        monkeypatch.setattr(module, "unused_gpu", lambda: "GPU: idle")
    for options in ([], ["--config", str(ROOT / "configs" / "quickstart.yaml")]):
        assert main(["doctor", *options]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "warning: GPU: idle"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda f: f.stem
)
def test_the_launch_files_of_the_project_surprise_nobody(file: Path):
    assert told(file.read_text()) == []


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", None])
def test_accelerate_looks_there_too(variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accelerate.commands.config import config_args

    with monkeypatch.context() as patched:
        patched.delenv("HF_HOME")
        if variable:
            patched.setenv(variable, str(tmp_path / "home"))
        theirs = importlib.reload(config_args).default_yaml_config_file
        assert str(default_accelerate_file()) == theirs
        assert (str(tmp_path) in theirs) == (variable is not None)
    importlib.reload(config_args)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 4", "distributed_type: MULTI_CPU starts one"),
        ("distributed_type: 'NO'\nnum_processes: 2", "distributed_type: NO starts one"),
        ("distributed_type: FSDP\nnum_processes: 2", "distributed.strategy: ddp, but accelerate runs fsdp"),
        ("dynamo_config: {dynamo_backend: INDUCTOR}", "training.compile: "),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2", "distributed.strategy: ddp, but accelerate's"),
    ],
)
def test_each_surprise_is_told_and_alone(text: str, start: str):
    (line,) = told(text, Config())
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "FSDP\nfsdp_config: {fsdp_version: 1}",
            "fsdp is FSDP version 2, but accelerate runs fsdp_version 1 ",
        ),
        (f"{FSDP2}\nparallelism_config: {{{SIZE}cp_size: 2}}", "dp_replicate_size: 1, but "),
        (
            f"{FSDP2}\nparallelism_config: {{{SIZE}tp_size: 2, {SIZE}dp_replicate_size: 2}}",
            "distributed: its fields set the mesh, but accelerate's parallelism_config_tp_size is 2, not 1",
        ),
        ("DEEPSPEED\ndeepspeed_config: {offload_param_device: cpu}", "does not support offload_param_device"),
        (f"{FSDP2}\nmixed_precision: bf16", None),
        (f"{FSDP2}\nmixed_precision: fp8", "mixed_precision: fp8, but FP8 products come of training.float8"),
        ("DEEPSPEED\ndeepspeed_config: {zero_stage: 3, gradient_clipping: 0.5}", None),
    ],
)
def test_what_no_configuration_supports_is_told_without_one(text: str, found: str | None):
    lines = told(f"num_processes: 4\ndistributed_type: {text}")
    assert [found in line for line in lines] == ([True] if found else [])


def test_disagreements_with_the_configuration():
    config = Config(training=TrainingConfig(precision="bf16", micro_batch_size=4, global_batch_size=16))
    base = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
    assert told(base + "mixed_precision: bf16", config) == []
    (line,) = told(base + "mixed_precision: fp16", config)
    assert line.startswith("training.precision: bf16, but accelerate's mixed_precision is fp16, and the run")
    (line,) = told("distributed_type: MULTI_GPU\nnum_processes: 3", config)
    assert line.startswith("with num_processes: 3, training.global_batch_size: expected a multiple of")
    lines = told(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {gradient_accumulation_steps: 8}",
        config,
    )
    assert any(line.startswith("distributed.strategy: ddp, but accelerate runs deepspeed") for line in lines)
    assert any(line.startswith("training.global_batch_size: makes 2 accumulation steps") for line in lines)


def test_the_machine_and_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(machine, "multiplies_in_bf16", lambda: False)
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 10**9)
    monkeypatch.setattr("llm_pretrain.data.loader.shutil.disk_usage", lambda folder: Mock(free=10**6))
    file = str(ROOT / "configs" / "gpt2-124m.yaml")
    (tmp_path / "workers.yaml").write_text("data: {num_workers: 2}\n")
    assert main(["doctor", "--config", file, "--config", str(tmp_path / "workers.yaml")]) == 1
    output = capsys.readouterr().out
    for text in (
        "warning: training.precision: bf16 is emulated here, where a matrix product takes ",
        "warning: data.num_workers: expected ",
        "warning: runs/gpt2-124m: 3 more checkpoints and weights take 4.8 GiB",
    ):
        assert text in output, text
