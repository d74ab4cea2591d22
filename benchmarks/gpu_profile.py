"""Steps of a case of `gpu_step` in one process: speed and memory against the estimate, and time by kernel.

    python -m benchmarks.gpu_profile CASE [RESULT.json]

Where memory is short, the micro batch is halved, first as `estimate` says, then after an error. `gpu_step
--profile` and `llm-pretrain doctor --gpu` run it; without a GPU it takes the cases of tiny presets. No
benchmark by itself.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.documents import Documents, make_store
from benchmarks.engine_pairs import Steps
from benchmarks.gpu_step import CASES, Case, case_options, case_vocabulary
from benchmarks.measuring import Interval, interleaved
from llm_pretrain.commands._gpu_sections import Findings, nvidia_smi
from llm_pretrain.commands.estimate import DEFAULT_MFU
from llm_pretrain.config import Config, load_config, multiplies_in_bf16, resolve_model
from llm_pretrain.data import open_stores
from llm_pretrain.distributed.process import prepare_process
from llm_pretrain.memory import TOLERANCE, estimate_memory, estimate_time, is_out_of_memory
from llm_pretrain.model import flops_per_token
from llm_pretrain.tracking import device_peak_flops
from train_pretrain import TorchrunEngine

LAPS, LAP_STEPS, PROFILED_STEPS, ROWS = 7, 3, 3, 25
_USED = 0.9
"""Share of the GPU's free memory that the estimate may fill."""
TINY = [
    Case(name, name, 64, 4, training={"precision": "fp32"}, documents=500)
    for name in ("tiny-dense", "tiny-moe")
]


def main() -> None:
    """Measure a case; after running out of memory, once more with half the micro batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=[case.name for case in [*CASES, *TINY]])
    parser.add_argument("result", nargs="?", type=Path, help="file for the tables as JSON")
    parser.add_argument("--micro_batch_size", type=int, help="default: the case's")
    arguments = parser.parse_args()
    case = next(case for case in [*CASES, *TINY] if case.name == arguments.case)
    case = case._replace(micro_batch_size=arguments.micro_batch_size or case.micro_batch_size)
    with tempfile.TemporaryDirectory() as temporary:
        findings = Findings(arguments.result or Path(temporary) / "result.json")
        try:
            _measure(case, Path(temporary), findings)
        except Exception as error:
            if not is_out_of_memory(error) or case.micro_batch_size == 1:
                raise
            size = case.micro_batch_size // 2
            print(f"{case.micro_batch_size} sequences: out of memory; now {size}", flush=True)
        else:
            _print(findings)
            return
    # in a new process image nothing of the failed attempt is left on the device
    options = [*([str(arguments.result)] if arguments.result else []), "--micro_batch_size", str(size)]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_profile", case.name, *options])


def _measure(case: Case, folder: Path, findings: Findings) -> None:
    """Take the steps: the first, timed ones, some under load for nvidia-smi, and profiled ones."""
    if torch.cuda.is_available() and not multiplies_in_bf16():
        case = case._replace(training={**case.training, "precision": "fp16"})
    size = case_vocabulary(case)
    documents = Documents.lognormal(case.documents, size)
    make_store(folder / "store", documents, size)
    case = _fitting(case, folder)
    config = _config(case, folder)
    prepare_process(config)
    engine = TorchrunEngine(config)
    before = _peak_memory(engine.device)
    start = time.perf_counter()
    steps = Steps(config, engine)
    steps.step()
    _wait(engine.device)
    first_seconds = time.perf_counter() - start

    def lap() -> None:
        for _ in range(LAP_STEPS):
            steps.step()
        _wait(engine.device)

    laps = interleaved({"steps": lap}, LAPS, warmup=1, clock=time.perf_counter)["steps"]
    peak = _peak_memory(engine.device) - before
    step_tokens = config.training.global_batch_size * config.training.sequence_length
    speed = Interval.of(step_tokens * LAP_STEPS / seconds for seconds in laps)
    _compare(config, engine.device, findings, speed, peak)
    findings.row("first step, compilation included: seconds", None, first_seconds, None)
    if engine.device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved()
        findings.row("the allocator's memory: GiB", None, reserved / 2**30, None)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(nvidia_smi)
            while not told.done():
                lap()
        if rows := told.result():
            findings.table("nvidia-smi while it trains", list(rows[0]), [list(row.values()) for row in rows])
    _profile(steps, engine.device, findings)


def _peak_memory(device: torch.device) -> int:
    """Most bytes in use so far, on a CPU by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _config(case: Case, folder: Path) -> Config:
    config = load_config([*case_options(case, folder / "store", folder / "run")])
    return resolve_model(config, open_stores(config)[0].vocab_size)


def _fitting(case: Case, folder: Path) -> Case:
    """The case with the largest micro batch, its own halved again and again, that should fit."""
    if not torch.cuda.is_available():
        return case
    free = torch.cuda.mem_get_info()[0] * _USED
    while case.micro_batch_size > 1:
        config = _config(case, folder)
        if estimate_memory(config, 1, on_gpu=True).peak < free:
            break
        case = case._replace(micro_batch_size=case.micro_batch_size // 2)
    return case


def _compare(config: Config, device: torch.device, findings: Findings, speed: Interval, peak: int) -> None:
    """The table of what `estimate` says and what was measured."""
    training = config.training
    on_gpu = device.type == "cuda"
    memory = estimate_memory(config, 1, on_gpu=on_gpu).peak
    shape = f"{training.micro_batch_size} x {training.sequence_length} tokens, {training.precision}"
    findings.table(f"{shape}, on {device.type}", ["what", "estimate", "measured", "measured / estimate"])
    what = "peak memory: GiB" if on_gpu else "peak memory, with what libraries load: GiB"
    findings.row(what, memory / 2**30, peak / 2**30, peak / memory)
    if on_gpu and abs(memory / peak - 1) > TOLERANCE:
        findings.problem(f"the estimated peak is {memory / peak:.2f} of the measured one")
    flops = device_peak_flops(torch.cuda.get_device_name(device)) if on_gpu else None
    expected = None
    if flops:
        time = estimate_time(config, 1, tokens=1, flops=flops, mfu=DEFAULT_MFU)
        expected = time.tokens_per_second
    ratio = speed.median / expected if expected else None
    findings.row("tokens per second", expected, speed.median, ratio)
    findings.row("95 % interval of its median", None, f"{speed.low:.0f} to {speed.high:.0f}", None)
    per_token = flops_per_token(config.model, training.sequence_length)
    mfu = speed.median * per_token / flops if flops else None
    findings.row("MFU", DEFAULT_MFU if flops else None, mfu, ratio)
    findings.row("model TFLOP/s", None, speed.median * per_token / 1e12, None)


def _profile(steps: Steps, device: torch.device, findings: Findings) -> None:
    """The kernels of a few steps by their time, and the share of time in which any of them ran."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            steps.step()
        _wait(device)
        wall = (time.perf_counter() - start) * 1e6
    kernels = sorted(_kernels(profiled, device), key=lambda each: -each[2])
    total = sum(each[2] for each in kernels)
    what = "kernels" if device.type == "cuda" else "operations"
    findings.table(
        f"Time by kernel: {total / wall:.0%} of {wall / PROFILED_STEPS / 1e3:.1f} ms a step in {what}",
        ["kernel", "calls a step", "ms a step", "share"],
    )
    for name, calls, microseconds in kernels[:ROWS]:
        share = microseconds / total
        findings.row(name, calls / PROFILED_STEPS, microseconds / PROFILED_STEPS / 1e3, share)


def _kernels(profiled: Any, device: torch.device) -> Iterator[tuple[str, int, float]]:
    """Name, calls and microseconds of each kernel, or of each operation of a CPU."""
    on_gpu = device.type == "cuda"
    for each in profiled.key_averages():
        if each.device_type != (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            continue
        if not getattr(each, "is_user_annotation", False):
            seconds = each.self_device_time_total if on_gpu else each.self_cpu_time_total
            yield each.key, each.count, seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print(findings: Findings) -> None:
    for table in findings.tables:
        print(table["title"], " | ".join(table["heads"]), sep="\n")
        for row in table["rows"]:
            cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell)[:100] for cell in row]
            print("  " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
