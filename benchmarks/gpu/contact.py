"""Round 1: the machine, kernels against definitions, tests, first steps, waits of the host."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from benchmarks import launching
from benchmarks.engine_pairs import Steps
from benchmarks.gpu.parts import Context, wait
from benchmarks.machine import ROOT
from llm_pretrain.commands.doctor import machine_facts
from llm_pretrain.config.loading import load_config, multiplies_in_bf16, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import this_machine
from llm_pretrain.launch.process import prepare_process
from llm_pretrain.model.kernels.choice import Kernels, resolved_kernels
from llm_pretrain.model.self_check import FIXED, PARTS, Part, check_kernels
from llm_pretrain.model.sizes import flops_per_token
from llm_pretrain.runs.rows import read_rows
from llm_pretrain.training.model_setup import build_model
from train_pretrain import TorchrunEngine

_TEST = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(PASSED|FAILED|ERROR|SKIPPED)? ?(tests/\S+?\.py::.+?)"
                   r"(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)?$")  # fmt: skip
"""A line in which pytest, or one of its workers, reports a test."""


def facts(context: Context) -> None:
    """Versions, nvidia-smi, and what bounds a step: matrix products by type and shape, and copies."""
    for name, value in machine_facts(this_machine()):
        context.emit(name, value, show=name in ("torch", "devices"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        context.emit("CUDA · free GiB of the GPU, and all", [torch.version.cuda, free / 2**30, total / 2**30])
        for command in (["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"]):
            subprocess.run(command, timeout=30, check=False)
    device, peak = torch.device("cuda" if on_gpu else "cpu"), {}
    edge = 8192 if on_gpu else 128
    shapes = [(edge, edge, edge, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    if on_gpu:  # layers and heads of gpt2-124m and qwen3-0.6b
        shapes += [
            (rows, depth, columns, torch.bfloat16)
            for rows, depth, columns in (
                *((65536, 768, 2048), (8192, 768, 50304), (32768, 1024, 3072), (8192, 1024, 151936)),
            )
        ]
    for rows, depth, columns, dtype in shapes:
        left = torch.randn(rows, depth, device=device, dtype=dtype)
        right = torch.randn(columns, depth, device=device, dtype=dtype)
        seconds = _seconds(lambda a=left, b=right: a @ b.t())
        name, flops = str(dtype).removeprefix("torch."), 2 * rows * depth * columns / seconds
        context.emit(f"product {rows} x {depth} x {columns}, {name}", flops / 1e12, "TFLOP/s")
        if dtype == torch.bfloat16 and rows == columns:
            peak["bf16_flops"] = flops
    size = 1 << (31 if on_gpu else 20)
    one, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * size / _seconds(lambda: other.copy_(one))
    context.emit("copy on the device, read and written", bandwidth / 1e9, "GB/s")
    host = torch.ones(size >> 3, dtype=torch.uint8, pin_memory=on_gpu)
    for name, copy in (("host to device", (other[: size >> 3], host)), ("back", (host, other[: size >> 3]))):
        context.emit(f"copy, {name}", (size >> 3) / _seconds(lambda c=copy: c[0].copy_(c[1])) / 1e9, "GB/s")
    if on_gpu:
        Path(context.work, "peak.json").write_text(json.dumps(peak))


def _seconds(action: Callable[[], object]) -> float:
    """Median time of 10 calls, each until the device has finished, after three others."""
    times = []
    for _ in range(13):
        wait()
        start = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def kernels(context: Context) -> None:
    """Every implementation of every part of a small mixture against its definition in float64, by type."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes, names = {"fp32": torch.float32}, get_type_hints(Kernels)
    asked: list[tuple[Part, str]] = []
    for part in PARTS:
        known = (FIXED[part],) if part in FIXED else get_args(names[part])
        asked.extend((part, name) for name in known if name != "auto")
    if device.type == "cuda":
        bf16 = {"bf16": torch.bfloat16} if multiplies_in_bf16() else {}
        dtypes = {**bf16, "fp16": torch.float16, **dtypes}
        asked.append(("compile", FIXED["compile"]))
    counts: Counter[str] = Counter()
    for precision, dtype in dtypes.items():
        for part, name in asked:
            what = f"{part} {name} in {precision}"
            config, refused = _kernel_config(part, name, precision, device)
            default = resolved_kernels(config.model, Kernels(), device, dtype)
            is_default = part in FIXED or getattr(default, part) == name
            if refused:
                counts["not here"] += 1
                context.emit(what, f"not here: {refused}", show=False)
                continue
            chosen = default if part in FIXED else replace(Kernels(), **{part: name})
            for check in check_kernels(config.model, chosen, device, dtype, parts=[part]):
                counts["wrong" if check.problem else "agree"] += 1
                context.emit(
                    what, check.problem or "agrees", show=bool(check.problem), default=is_default,
                    error=check.forward_error, of_gradients=check.backward_error, bound=check.bound,
                    seconds=check.seconds,
                )  # fmt: skip
            wait()  # after an illegal access this raises
    context.emit("kernels", ", ".join(f"{count} {result}" for result, count in counts.items()))
    if counts["wrong"]:
        sys.exit(1)


def _kernel_config(part: str, name: str, precision: str, device: torch.device) -> tuple[Config, str]:
    """A small mixture of experts for a check, and why it cannot use this kernel here; empty if it can."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 16}
    options = ["--config", "tiny-moe", "--model.first_k_dense_replace", "1"]
    options += [word for field, size in sizes.items() for word in (f"--model.{field}", str(size))]
    options += ["--training.precision", precision]
    plain = resolve_model(load_config(options, needs_data=False), launching.VOCAB_SIZE)
    if part in ("norm", "optimizer"):  # without a setting
        return plain, ""
    setting = "training.compile" if part == "compile" else f"training.{part}_implementation"
    try:
        named = load_config([*options, f"--{setting}", name], needs_data=False)
        build_model(resolve_model(named, launching.VOCAB_SIZE), device)
    except ConfigError as error:
        return plain, error.problems[0]
    return plain, ""


def tests(context: Context, workers: str, which: str) -> None:
    """The tests marked `gpu`, each result as it comes.

    Args:
        workers: Processes, if pytest-xdist is there.
        which: `launches` for those that launch trainings, which are in tests/distributed, or `units`.
    """
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    chosen = [name for name in marked if ("distributed" in name) == (which == "launches")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--basetemp={context.work}/{context.part}"]
    command += ["-n", workers] if find_spec("xdist") and not context.is_dry else []
    command += ["--timeout=150"] if find_spec("pytest_timeout") else []
    process = subprocess.Popen(
        [*command, *chosen], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    results: Counter[str] = Counter()
    for line in process.stdout:
        print(line, end="", flush=True)
        if (match := _TEST.match(line.rstrip())) and (result := match[1] or match[3]):
            results[result.lower()] += 1
            context.emit(match[2], result.lower(), show=result in ("FAILED", "ERROR"))
    code = process.wait()
    context.emit(
        "tests", ", ".join(f"{count} {result}" for result, count in results.items()) or f"exit code {code}"
    )
    if code:
        sys.exit(code)


def start(context: Context, name: str, steps: str) -> None:
    """The torchrun script as users start it: seconds to the first step, compiled anew and again from the
    cache that the first start left, and tokens per second of its later steps."""
    case, count = context.case(name), 3 if context.is_dry else int(steps)
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{context.work}/{context.part}/inductor",
             "TRITON_CACHE_DIR": f"{context.work}/{context.part}/triton"}  # fmt: skip
    config = context.config(case)
    for state, number in (("cold", count), ("with the cache of an earlier start", 3)):
        folder = Path(context.work, context.part, f"run-{number}-{state.split()[0]}")
        options = [*context.options(case), "--run.output_dir", str(folder)]
        done = launching.launch(
            launching.launch_command("torchrun", 1), [*options, "--training.max_steps", str(number)], folder,
            variables=cache,
        )  # fmt: skip
        context.emit(
            f"{case.name}, {state}: seconds to the first step", done.first_step_seconds, "s",
            cpu_s=done.first_step_cpu_seconds,
        )  # fmt: skip
        checked = list(read_rows(folder / "attempts.jsonl"))[-1].get("kernels") or {}
        for note in checked.get("notes") or []:
            context.emit(f"{case.name}: a kernel was replaced", note[:300])
        if state == "cold":
            speeds = [row["perf/tokens_per_second"] for row in done.rows][count // 2 :]
            flops = flops_per_token(config.model, case.length)
            peak = done.rows[-1]["perf/memory_bytes"]
            context.emit_speed(case, "the script", speeds, flops, done.first_step_seconds, peak, steps=count)
            losses = [row["train/loss"] for row in done.rows]
            context.emit(f"{case.name}: first loss, last loss", [losses[0], losses[-1]])


def waits(context: Context, *names: str) -> None:
    """How often and where the host waits for the GPU in a step that is not logged, in bf16, by preset."""
    failed = False
    cases = [(name, "off") for name in (names[:2] if context.is_dry else names)]
    cases += [] if context.is_dry else [("tiny-moe", "on")]
    # of these presets the data decides the vocabulary
    store = context.store(context.case("tiny-dense"))
    for name, compile in cases:
        what = f"{name}, compile {compile}"
        options = launching.training_options(name, store, Path(context.work, context.part))
        options += ["--training.precision", "bf16", "--training.compile", compile]
        options += ["--logging.logging_steps", "1000"]
        try:
            config = load_config(options)
            prepare_process(config)
            config = resolve_model(config, launching.VOCAB_SIZE)
            places = _waits(Steps(config, TorchrunEngine(config)), 2 if context.is_dry else 5)
        except Exception as error:
            failed = True
            context.emit_failure(what, error)
            continue
        context.emit(f"{what}: waits of the host a step", sum(places.values()))
        for place, count in sorted(places.items(), key=lambda item: -item[1])[:5]:
            context.emit(f"{what}: at {place}", count, "a step")
    if failed:
        sys.exit(1)


def _waits(steps: Steps, count: int) -> dict[str, float]:
    """Waits a step by file and line, after four steps to warm up."""
    for _ in range(4):
        steps.step()
    wait()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                steps.step()
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{each.filename.split('site-packages/')[-1].removeprefix(f'{ROOT}/')}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message) and "prototype" not in str(each.message)
    )
    return {place: number / count for place, number in places.items()}
