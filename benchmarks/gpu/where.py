"""Round 3: where a step's time goes, part by part, beside the bounds that were counted beforehand.

A kernel belongs to a part by its name and by what launched it. The trace for chrome://tracing is kept.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.engine_pairs import Steps
from benchmarks.gpu.parts import Context, wait
from llm_pretrain.launch.process import prepare_process
from train_pretrain import TorchrunEngine

STEPS = 5
_TRACE_BYTES = 15 << 20
_PRODUCT = re.compile(
    r"gemm|nvjet|cutlass|xmma|cublas|wgmma|grouped_mm|rows_times|_mm_|splitk|triton_tem", re.I
)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.I)
_NORM = re.compile(r"rsqrt|rms_norm|layer_norm", re.I)
_HEAD = re.compile(r"_log_partition_kernel|_gradient_kernel")
_RANGES = ("loss head", "clipping", "embedding", "Optimizer.step")
"""Names of ranges in a trace; the last is torch's own."""


class Kernel(NamedTuple):
    """A kernel, copy or fill of a trace; times in microseconds."""

    name: str
    category: str
    start: float
    duration: float
    launched_in: set[str]
    """Those of `_RANGES` around its launch."""

    @property
    def part(self) -> str:
        """What it was launched for."""
        is_product = bool(_PRODUCT.search(self.name))
        if self.category != "kernel":
            return "copies and fills"
        for name, part in (("Optimizer.step", "optimizer"), ("clipping", "clipping")):
            if name in self.launched_in:
                return part
        if "loss head" in self.launched_in or _HEAD.search(self.name):
            return f"loss head: {'products' if is_product else 'memory'}"
        if _ATTENTION.search(self.name):
            return "attention"
        if is_product:
            return "products of layers"
        if "embedding" in self.launched_in or "embedding" in self.name:
            return "embedding"
        if _NORM.search(self.name):
            return "norms, and what is fused with them"
        return "other fused kernels" if "triton" in self.name else "other"


def measure(context: Context, name: str) -> None:
    """Profile steady steps of a case, and compare."""
    case = context.case(name)
    config = context.config(case)
    prepare_process(config)
    engine = TorchrunEngine(config)
    steps = Steps(config, engine)
    model: Any = engine.unwrapped_model
    model.lm_head.forward = _ranged("loss head", model.lm_head.forward)
    model.model.embed_tokens.forward = _ranged("embedding", model.model.embed_tokens.forward)
    engine.clip_grad_norm = _ranged("clipping", engine.clip_grad_norm)
    _timed(steps, 2 if context.is_dry else 8)
    plain, host = _timed(steps, STEPS)
    tokens = config.training.global_batch_size * config.training.sequence_length
    context.emit(
        f"{name}: ms a step · of the host alone", [plain, host], tokens_per_second=tokens / plain * 1e3,
        micro_batch=f"{case.micro_batch_size} x {case.length}",
    )  # fmt: skip
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as profiled:
        profiled_ms, _ = _timed(steps, STEPS)
    trace = Path(context.work, f"trace-{name}.json")
    profiled.export_chrome_trace(str(trace))
    kernels = read_kernels(json.loads(trace.read_text())["traceEvents"])
    packed = gzip.compress(trace.read_bytes(), 5)
    if len(packed) <= _TRACE_BYTES:
        Path(context.output, f"{trace.name}.gz").write_bytes(packed)
    assert kernels or not on_gpu, "the trace has no kernels"
    _report(context, name, kernels, profiled_ms)
    bounds = context.counted("bounds", name)
    if bounds:
        context.emit(
            f"{name}: bound of a step by FLOPs and bytes", bounds["total_ms"], "ms", parts=bounds["parts"],
            micro_batch=bounds["micro_batch"], of_measured=bounds["total_ms"] / plain if on_gpu else None,
        )  # fmt: skip


def _ranged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in a named range of the trace."""

    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return call(*arguments, **options)

    return ranged


def _timed(steps: Steps, count: int) -> tuple[float, float]:
    """Milliseconds of a step, and those after which the host was ready to start the next."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        steps.step()
    host = time.perf_counter() - start
    wait()
    return (time.perf_counter() - start) / count * 1e3, host / count * 1e3


def read_kernels(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """The kernels of a trace's events, each with the ranges in which the host launched it."""
    launches: dict[int, tuple[Any, float]] = {}
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    found = []
    for event in (each for each in events if each.get("ph") == "X"):
        category, thread = event.get("cat"), (event["pid"], event["tid"])
        correlation = event.get("args", {}).get("correlation")
        if category in ("cuda_runtime", "cuda_driver"):
            launches[correlation] = thread, event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.append((event, correlation))
        elif name := next((each for each in _RANGES if event["name"].startswith(each)), None):
            ranges[thread].append((event["ts"], event["ts"] + event["dur"], name))
    for each in ranges.values():
        each.sort()

    def around(correlation: int) -> set[str]:
        thread, at = launches.get(correlation, (None, 0.0))
        before = ranges.get(thread, [])
        before = before[: bisect.bisect_right(before, (at, float("inf"), ""))]
        return {name for start, end, name in before[-200:] if start <= at <= end}

    return [
        Kernel(event["name"], event["cat"], event["ts"], event["dur"], around(correlation))
        for event, correlation in found
    ]


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, end = 0.0, float("-inf")
    for start, duration in sorted((each.start, each.duration) for each in kernels):
        total += max(0.0, start + duration - max(end, start))
        end = max(end, start + duration)
    return total


def _report(context: Context, name: str, kernels: list[Kernel], wall: float) -> None:
    """Milliseconds of a step by part and, not shown, by kernel; `wall` is the profiled step's."""
    running = busy(kernels) / STEPS / 1e3
    context.emit(
        f"{name}: profiled ms a step · with a kernel running · idle share",
        [wall, running, 1 - running / wall], kernels_a_step=len(kernels) / STEPS,
    )  # fmt: skip
    parts: dict[str, float] = defaultdict(float)
    names: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in kernels:
        parts[each.part] += each.duration / STEPS / 1e3
        names[each.part, each.name].append(each.duration / STEPS / 1e3)
    for part, milliseconds in sorted(parts.items(), key=lambda item: -item[1]):
        context.emit(f"{name}: {part}", milliseconds, "ms", share=milliseconds / wall)
    for (part, kernel), times in sorted(names.items(), key=lambda item: -sum(item[1]))[:25]:
        calls = len(times) / STEPS
        context.emit(f"{name}: {kernel[:140]}", sum(times), "ms", show=False, of=part, calls=calls)
