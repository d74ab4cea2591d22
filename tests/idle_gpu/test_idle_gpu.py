"""Both scripts on GPUs that do nothing: what they start, write, print and refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from idle_gpu import environment
from support.launching import ROOT, TIMEOUT_SECONDS, Finished, launch, run_options
from support.launching import environment as own_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build: make test-lowest"),
]

KNOWN = (
    "To avoid this warning pass in values",  # Accelerate, started without a file
    "warning: changed since the attempt before: ",  # the steps, which a test changes
    "UserWarning: Slicing a flattened dim from root mesh",  # torch 2.11 of its own mesh, in FSDP
)


def variables(**settings: Any) -> dict[str, str]:
    """Of the idle GPUs, without what the tests hide from other launches."""
    shown = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(settings.get("count", 1)))),
        "PYTHONWARNINGS": "",
    }
    return own_environment() | shown | environment(**settings)


def train(
    launcher: str,
    processes: int,
    folder: Path,
    options: Sequence[str],
    exit_code: int | None = 0,
    **settings: Any,
) -> Finished:
    """A launch on idle GPUs of these `settings`; Accelerate gets the file of its strategy."""
    file = folder.with_suffix(".yaml")
    is_sharded = "--distributed.strategy=fsdp" in options
    example = ROOT / "configs" / "accelerate" / ("fsdp2.yaml" if is_sharded else "cpu2.yaml")
    file.write_text(example.read_text().replace("use_cpu: true", "use_cpu: false"))
    return launch(
        launcher, processes, folder, options, gpu=True, accelerate_file=file, exit_code=exit_code,
        variables=variables(**({"count": processes} | settings)),
    )  # fmt: skip


def options(preset: str, store: Path, settings: str = "") -> list[str]:
    short = "training.max_steps=3 training.compile=off training.global_batch_size=16 "
    return run_options(preset, store, f"{short} evaluation.max_batches=1 {settings}")


def assert_trained(run: Finished, steps: int) -> None:
    """It took the GPU, and has every row, checkpoint and weights; nothing warned."""
    assert "x cuda" in run.output
    assert set(run.rows) == set(range(steps + 1))
    assert (run.folder / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert list((run.folder / "weights" / f"step-{steps:08d}").glob("*.safetensors"))
    lines = [line for line in run.output.splitlines() if not any(known in line for known in KNOWN)]
    assert not [line for line in lines if re.search("warn|deprecat|error", line, re.IGNORECASE)]


def refusal(run: Finished) -> str:
    """What a run ended with: lines of the package, and after them what launchers and threads say."""
    lines = run.output.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert run.exit_code
    assert errors, run.output
    assert "Traceback (most recent call last):" not in lines[: lines.index(errors[0])]
    return "\n".join(errors)


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_one_script_continues_the_other_on_one_gpu(plain_store: Path, tmp_path: Path, compiled: str):
    chosen = options("tiny-moe", plain_store, f"training.compile={compiled}")
    chosen += ["--evaluation.sample_prompts", "[a b]", "--evaluation.sample_tokens", "4"]
    assert_trained(train("torchrun", 1, tmp_path / "run", [*chosen, "--training.max_steps", "2"]), 2)
    continued = train("accelerate", 1, tmp_path / "run", chosen)
    assert_trained(continued, 3)
    assert len(continued.attempts) == 2
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert samples
    assert all(json.loads(line) for line in samples)


MESHES = {
    "ddp": ("torchrun", 2, "training.precision=fp16"),
    "ddp, accelerate": ("accelerate", 2, "training.deterministic=true"),
    "fsdp": ("torchrun", 2, "distributed.strategy=fsdp optimizer.name=muon training.deterministic=true"),
    "fsdp, accelerate": (
        "accelerate",
        2,
        "distributed.strategy=fsdp checkpoint.async_save=true training.precision=bf16",
    ),
    "hsdp": (
        "torchrun",
        4,
        "distributed.strategy=fsdp distributed.dp_replicate_size=2",
    ),
    "tp, cp": ("accelerate", 4, "distributed.strategy=fsdp distributed.tp_size=2 distributed.cp_size=2"),
}


@pytest.mark.parametrize("name", MESHES)
def test_several_gpus(plain_store: Path, tmp_path: Path, name: str):
    launcher, processes, settings = MESHES[name]
    run = train(launcher, processes, tmp_path / "run", options("tiny-moe", plain_store, settings))
    assert_trained(run, 3)
    assert f"{processes} x cuda" in run.output


def test_two_processes_on_one_gpu_are_refused(plain_store: Path, tmp_path: Path):
    chosen = options("tiny-dense", plain_store)
    run = train("torchrun", 2, tmp_path / "run", chosen, exit_code=None, count=1)
    assert refusal(run).startswith("error: launch: expected one process per GPU, so at most 1 here, found 2;")


def test_a_file_for_the_cpu_keeps_the_gpu_idle(plain_store: Path, tmp_path: Path):
    chosen = options("tiny-dense", plain_store)
    run = launch("accelerate", 2, tmp_path / "run", chosen, gpu=True, variables=variables(count=2))
    assert "2 x cpu" in run.output
    assert set(run.rows) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "gpu", "told"),
    [
        ("model.hidden_size=4096", {"gib": 1}, "out of memory before the model was built: .* 1.0 GiB"),
        ("", {"taken_mib": 81919}, "out of memory: CUDA out of memory.* 113,024 parameters take 1.7 MiB"),
        (
            "training.micro_batch_size=16 training.sequence_length=512",
            {"taken_mib": 81820},
            "out of memory: CUDA out of memory.* training.micro_batch_size 8",
        ),
    ],
)
def test_too_little_memory_is_one_line(
    plain_store: Path, tmp_path: Path, settings: str, gpu: dict, told: str
):
    chosen = options("tiny-dense", plain_store, settings)
    run = train("torchrun", 1, tmp_path / "run", chosen, exit_code=None, caching=True, **gpu)
    assert re.fullmatch(f"error: {told}.*", refusal(run))


def test_a_card_without_bf16_trains_in_fp32(plain_store: Path, tmp_path: Path):
    chosen = options("tiny-dense", plain_store, "training.precision=auto")
    run = train("torchrun", 1, tmp_path / "run", chosen, capability=7)
    assert_trained(run, 3)
    assert "1 x cuda, ddp, fp32" in run.output


def test_an_old_driver_is_told(plain_store: Path, tmp_path: Path):
    """The runtime is CUDA's own here, and finds a driver of CUDA 12.4 for one of CUDA 13."""
    command = [sys.executable, "-m", "llm_pretrain", "doctor"]
    old = variables(driver=12040)
    how: dict[str, Any] = {"cwd": ROOT, "env": old, "timeout": TIMEOUT_SECONDS}
    doctor = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert doctor.returncode == 1, "it has warnings"
    run = launch("torchrun", 1, tmp_path / "run", options("tiny-dense", plain_store), gpu=True, variables=old)
    assert "1 x cpu" in run.output
    for output in (doctor.stdout + doctor.stderr, run.output):
        (line,) = [line for line in output.splitlines() if line.startswith("warning: ")]
        assert re.search(
            "GPU: NVIDIA's driver is here, but training takes the CPU: .* driver .* too old", line
        )


def test_kernels_that_compute_nothing_are_found(plain_store: Path, tmp_path: Path):
    chosen = options("tiny-dense", plain_store)
    run = train("torchrun", 1, tmp_path / "run", chosen, exit_code=None, self_check=True)
    lines = refusal(run).splitlines()
    assert all(re.search(r"differ by .* on idle GPU \(9.0\)", line) for line in lines)
    assert re.search("found none: attention sdpa computed results that differ", lines[0])
