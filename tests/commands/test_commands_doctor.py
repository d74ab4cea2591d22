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
from llm_pretrain.launch import machine_checks
from llm_pretrain.launch.accelerate_checks import accelerate_surprises
from llm_pretrain.launch.checks import default_accelerate_file
from llm_pretrain.launch.jobs import Machine

CPU, GPUS = Machine(gpus=0, cores=2), Machine(gpus=2, cores=16)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path) -> None:
    """No launcher's variables, and a home without a file of Accelerate's."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(0, 2))
    for module in (doctor, machine_checks):
        monkeypatch.setattr(module, "multiplies_in_bf16", lambda: True)


def told(text: str, machine: Machine = CPU, config: Config | None = None) -> list[str]:
    lines = list(accelerate_surprises(read_yaml(text), text, machine, config))
    assert all("; do " in line and "\n" not in line for line in lines)
    return lines


def test_a_machine_without_surprises_is_fine(capsys):
    file = str(ROOT / "configs" / "accelerate" / "cpu2.yaml")
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert main(["doctor", "--accelerate_config", file, "--config", config]) == 0
    output = capsys.readouterr().out
    for name in ("python", "torch", "accelerate", "devices", "bf16", "back-ends", "threads", "disk"):
        assert any(line.startswith(name) for line in output.splitlines()), name
    assert "gloo" in output
    assert f"{file}: MULTI_GPU, 2 processes" in output
    assert output.splitlines()[-1] == "nothing here would surprise a run"


def test_the_file_is_found_where_accelerate_finds_it(capsys):
    assert main(["doctor"]) == 0
    assert f"no file at {default_accelerate_file()}" in capsys.readouterr().out
    default_accelerate_file().parent.mkdir(parents=True)
    default_accelerate_file().write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    assert main(["doctor"]) == 1
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "MULTI_CPU starts one process" in warnings[0]


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", None])
def test_accelerate_looks_there_too(variable, tmp_path, monkeypatch):
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
    ("text", "machine", "start"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 4", CPU, "distributed_type: MULTI_CPU starts"),
        ("distributed_type: 'NO'\nnum_processes: 2\nuse_cpu: true", CPU, "distributed_type: NO starts one"),
        ("distributed_type: FSDP\nnum_processes: 2", CPU, "distributed.strategy: fsdp is FSDP version 2"),
        ("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true", GPUS, "distributed.strategy: fsdp"),
        ("distributed_type: MULTI_GPU", GPUS, "num_processes is not set"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", GPUS, "num_processes: 8 on 2 GPUs"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", CPU, "num_processes: 8 on 2 cores"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 2", GPUS, "num_machines: 2 without"),
        ("distributed_type: 'NO'\neven_batches: true", CPU, "even_batches is no setting"),
        ("distributed_type: 'NO'\ngradient_accumulation_steps: 4", CPU, "gradient_accumulation_steps is no"),
        ("distributed_type: 'NO'\ncolour: red", CPU, "colour is no setting"),
        ("distributed_type: 'NO'\nmixed_precision: no", CPU, "mixed_precision: no without quotes"),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}", CPU, "training.compile: "),
        ("distributed_type: 'NO'\ncompute_environment: AMAZON_SAGEMAKER", CPU, "compute_environment: AMAZON"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2", GPUS, "distributed.strategy: ddp"),
    ],
)  # fmt: skip
def test_each_surprise_is_told_and_alone(text, machine, start):
    more = "\nuse_cpu: true" in text and machine is GPUS
    lines = told(text, machine)
    assert sum(line.startswith(start) for line in lines) == 1
    assert len(lines) == 1 + more


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        *((file.read_text(), CPU) for file in sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: 'no'", CPU),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16", GPUS),
        ("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true", CPU),
        ("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config: {fsdp_version: 2}", CPU),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: 'NO'}", CPU),
        ("distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 8\nmain_process_ip: a", GPUS),
    ],
)
def test_what_works_is_not_warned_of(text, machine):
    assert told(text, machine) == []


def test_disagreements_with_the_configuration():
    config = Config(training=TrainingConfig(precision="bf16", micro_batch_size=4, global_batch_size=16))
    base = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
    assert told(base + "mixed_precision: bf16", GPUS, config) == []
    (line,) = told(base + "mixed_precision: fp16", GPUS, config)
    assert line.startswith("training.precision: bf16, but accelerate's mixed_precision is fp16, and the run")
    (line,) = told("distributed_type: MULTI_GPU\nnum_processes: 3", Machine(4, 16), config)
    assert line.startswith("with num_processes: 3, training.global_batch_size: expected a multiple of")
    lines = told(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {gradient_accumulation_steps: 8}",
        GPUS,
        config,
    )
    assert any(line.startswith("distributed.strategy: ddp, but accelerate runs deepspeed") for line in lines)
    assert any(line.startswith("training.global_batch_size: makes 2 accumulation steps") for line in lines)


def test_the_environment_and_the_machine(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setattr(doctor, "multiplies_in_bf16", lambda: False)
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: 10**9)
    versions = {"torch": "2.9.1", "numpy": "2.0.2", "torch_xla": "2.9.0"}
    monkeypatch.setattr(machine_checks, "package_version", versions.get)
    promised = ["torch>=2.11", "numpy>=2.0", 'torch>=2.13; extra == "pipelines"']
    monkeypatch.setattr(machine_checks, "_requirements", lambda: promised)
    monkeypatch.setattr("llm_pretrain.data.loader.shutil.disk_usage", lambda folder: Mock(free=10**6))
    file = str(ROOT / "configs" / "gpt2-124m.yaml")
    (tmp_path / "workers.yaml").write_text("data: {num_workers: 2}\n")
    assert main(["doctor", "--config", file, "--config", str(tmp_path / "workers.yaml")]) == 1
    output = capsys.readouterr().out
    for text in (
        "warning: RANK in the environment", "warning: ACCELERATE_MIXED_PRECISION in the environment",
        "warning: training.precision: bf16 is emulated", "warning: accelerate is not installed",
        "warning: torch 2.9.1 is older than 2.11", "warning: torch_xla 2.9.0 is installed, but TPUs are",
        "warning: data.num_workers: expected ",
        "warning: runs/gpt2-124m: 3 checkpoints and weights take 4.8 GiB",
    ):  # fmt: skip
        assert text in output, text


def test_threads_and_folder_as_a_run_would_have_them(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLM_PRETRAIN_OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["doctor"]) == 0
    assert "3 for one process of a run, by OMP_NUM_THREADS" in capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "warning: OMP_NUM_THREADS 'many' is no number of threads, and runs ignore it" in output
    assert "warning: runs: no run can write there" in output


def test_what_the_file_may_hold_is_what_accelerate_takes():
    """Accelerate's own list of keys; an unknown one stops `accelerate launch`."""
    import dataclasses

    from accelerate.commands.config.config_args import ClusterConfig

    from llm_pretrain.launch.accelerate_checks import _KEYS

    taken = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert taken <= _KEYS
