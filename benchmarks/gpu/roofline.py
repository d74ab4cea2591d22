"""Lower bound of a compiled training step's time on a GPU that this machine need not have, part by part.

    python -m benchmarks.gpu.roofline [--gpu NAME] [CASE …]

Every kernel of the step is counted on fake tensors (`kernels.py`). It takes at least as long as its matrix
products at the peak of their type, and at least as long as its bytes at the peak of the memory: the larger is
its bound, and the step's is their sum. One GPU, one micro batch; a kernel reads each distinct input once and
writes each output once; other operations than matrix products cost bytes only; no launch takes time.
Attention multiplies the lower triangle of each row of one document, backward 2.5 times as much as forward.
No kernel reaches these peaks: a bound below a goal rules the goal out, one above does not promise it.

Needs a C++ compiler and the package triton (`make .venv-triton/.installed`), and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.gpu.parts import CASES
from benchmarks.machine import ROOT, python_path
from benchmarks.reporting import SkippedError
from llm_pretrain.hardware import CLUSTERS, Cluster

NAMES = ["gpt2-124m", "qwen3-0.6b", "finegrained-moe-136m", "mixture", "dense of equal FLOPs"]
_PATHS = ("tests/cuda_without_gpu", "tests")


class Launch(NamedTuple):
    """A kernel and how many times a step launches it; the other fields are those of `kernels.Launch`."""

    times: int
    part: str
    name: str
    flops: float
    in_bf16: bool
    mfu_flops: float
    bytes: float

    def seconds(self, gpu: Cluster) -> float:
        """Lower bound of the time of all its launches in a step."""
        peak = (gpu.bf16_tflops if self.in_bf16 else gpu.fp32_tflops) * 1e12
        return self.times * max(self.flops / peak, self.bytes / (gpu.memory_gb_per_second * 1e9))


def bounds(names: list[str], gpu: Cluster) -> dict[str, dict[str, Any]]:
    """By case: milliseconds of its parts and of the step, MFU at that time, and the micro batch.

    Raises:
        SkippedError: this machine cannot count.
    """
    found = {}
    for counted in _count(names):
        case, parts = CASES[counted["case"]], defaultdict[str, float](float)
        for launch in (Launch(*row) for row in counted["launches"]):
            parts[f"{launch.part}: {'products' if launch.flops else 'memory'}"] += 1e3 * launch.seconds(gpu)
        total = sum(parts.values())
        found[case.name] = {
            "micro_batch": f"{case.micro_batch_size} x {case.length}", "total_ms": round(total, 3),
            "mfu": counted["mfu_flops"] / (gpu.bf16_tflops * 1e12) / (total / 1e3),
            "parts": {part: round(parts[part], 3) for part in sorted(parts, key=lambda part: -parts[part])},
        }  # fmt: skip
    return found


def _count(names: list[str]) -> list[dict[str, Any]]:
    """The lines of `kernels.py`, run in a process that loads the fake device before torch."""
    paths = [*_PATHS, *([] if find_spec("triton") else [".venv-triton"])]
    path = os.pathsep.join([*(str(ROOT / each) for each in paths), python_path()])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.kernels", *names], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"roofline: counting failed with exit code {done.returncode}; see above")
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if counted and "skipped" in counted[0]:
        raise SkippedError(counted[0]["skipped"])
    return counted


def main() -> None:
    """Print a table per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--gpu", choices=CLUSTERS, default="h100", help="default: h100")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(NAMES)):
        parser.error(f"CASE: expected some of {', '.join(NAMES)}, found {', '.join(unknown)}")
    try:
        found = bounds(arguments.cases or NAMES, CLUSTERS[arguments.gpu])
    except SkippedError as skipped:
        print(f"skipped  roofline: {skipped}")
        return
    for name, each in found.items():
        print(f"\n| {name}, {each['micro_batch']}, on {arguments.gpu} | ms | share |\n|---|---|---|")
        for part, milliseconds in each["parts"].items():
            print(f"| {part} | {milliseconds:.2f} | {milliseconds / each['total_ms']:.1%} |")
        print(f"| whole step; MFU {each['mfu']:.1%} | {each['total_ms']:.2f} | |")


if __name__ == "__main__":
    main()
