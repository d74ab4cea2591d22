"""Round 1: both scripts, deterministic, for 20 steps: the same bits, after a resume too, and a CPU's losses.

All launches run at the same time. A run that ended is copied as if it had been killed after its checkpoint of
step 10, and continued by the other launcher.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import launching
from benchmarks.gpu.parts import Context
from llm_pretrain.audit.comparison import tensor_differences
from llm_pretrain.checkpoints.manifest import read_manifest

STEPS, SAVED = 20, 10
CPU_BOUND = 1e-5
"""Of a loss on the GPU against the CPU's in fp32, relatively, over all steps."""
HALF_BOUND = 0.02
"""Of a loss in half precision against fp32's."""

Rows = dict[int, dict[str, Any]]
"""What a run logged, by step; None in its place if the launch failed."""


def compare(context: Context, *names: str) -> None:
    """Launch the presets in every precision by both scripts, and compare."""
    on_gpu = torch.cuda.is_available()
    _Comparison(context, names[:1] if context.is_dry else names, on_gpu).run()


class _Comparison:
    def __init__(self, context: Context, names: tuple[str, ...], on_gpu: bool):
        self.context, self.names, self.on_gpu = context, names, on_gpu
        self.folder = Path(context.work, context.part)
        self.store = context.store(context.case("tiny-dense"))
        self.precisions = ["fp32", "bf16", "fp16"] if on_gpu else ["fp32"]
        self.failed = False

    def run(self) -> None:
        with ThreadPoolExecutor(16 if self.on_gpu else 2) as pool:
            runs: dict[tuple[str, str, str], Future[Rows | None]] = {}
            for name in self.names:
                for precision in self.precisions:
                    for launcher in launching.SCRIPTS:
                        run = pool.submit(self._launch, name, precision, launcher, launcher)
                        runs[name, precision, launcher] = run
                runs[name, "fp32", "cpu"] = pool.submit(self._launch, name, "fp32", "torchrun", "cpu")
            resumed: dict[tuple[str, str], Future[Rows | None]] = {}
            for name in self.names:
                for precision in self.precisions:
                    first = runs[name, precision, "torchrun"].result()
                    self._same(
                        name, precision, first, runs[name, precision, "accelerate"].result(), "accelerate"
                    )
                    if first is not None:
                        self._cut(name, precision)
                        resumed[name, precision] = pool.submit(
                            self._launch, name, precision, "accelerate", "resumed"
                        )
                fp32 = runs[name, "fp32", "torchrun"].result()
                self._near(
                    f"{name} fp32 against the CPU", fp32, runs[name, "fp32", "cpu"].result(), CPU_BOUND
                )
                for precision in self.precisions[1:]:
                    half = runs[name, precision, "torchrun"].result()
                    self._near(f"{name} {precision} against fp32", half, fp32, HALF_BOUND)
            for (name, precision), run in resumed.items():
                self._same(
                    name, precision, runs[name, precision, "torchrun"].result(), run.result(), "resumed"
                )
        if self.failed:
            sys.exit(1)

    def _path(self, name: str, precision: str, side: str) -> Path:
        return self.folder / f"{name}-{precision}-{side}"

    def _launch(self, name: str, precision: str, launcher: str, side: str) -> Rows | None:
        folder = self._path(name, precision, side)
        options = [
            *launching.training_options(name, self.store, folder), "--training.precision", precision,
            *("--training.deterministic", "true", "--training.max_steps", str(STEPS)),
            *("--checkpoint.save_steps", str(SAVED), "--checkpoint.keep_last", "4"),
            *("--checkpoint.keep_best", "false", "--logging.report", "false"),
        ]  # fmt: skip
        on_cpu = not self.on_gpu or side == "cpu"
        try:
            done = launching.launch(
                launching.launch_command(launcher, 1, on_gpu=not on_cpu), options, folder,
                variables={"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {},
            )  # fmt: skip
        except SystemExit as error:
            self.failed = True
            print(error, flush=True)
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.context.emit(f"{name} {precision} {side}: FAILED", " | ".join(lines[-2:])[:500])
            return None
        return {row["step"]: row for row in done.rows}

    def _cut(self, name: str, precision: str) -> None:
        """Copy a finished run as if it had been killed after the checkpoint of step SAVED."""
        later = [f"step-{step:08d}" for step in range(SAVED + 1, STEPS + 1)]
        shutil.copytree(
            self._path(name, precision, "torchrun"), self._path(name, precision, "resumed"),
            ignore=shutil.ignore_patterns(*later, "metrics.jsonl"),
        )  # fmt: skip

    def _same(self, name: str, precision: str, one: Rows | None, other: Rows | None, side: str) -> None:
        """Compare every exact number of every row, and every tensor of the last checkpoint, bit for bit.

        A resumed run has rows from the step after its checkpoint on.
        """
        what = f"{name} {precision}: torchrun / {side}"
        if one is None or other is None:
            self.context.emit(what, "not compared: a launch failed")
            return
        differing = [
            f"step {step}: {key} {one[step].get(key)!r} / {value!r}"[:160]
            for step, row in sorted(other.items())
            for key, value in ((key, row.get(key)) for key in {**one[step], **row})
            if key != "time" and not key.startswith("perf/") and one[step].get(key) != value
        ]
        missing = sorted(other) != list(range(SAVED + 1 if side == "resumed" else 1, STEPS + 1))
        first, last = (
            self._path(name, precision, each) / "checkpoints" / f"step-{STEPS:08d}"
            for each in ("torchrun", side)
        )
        mine, theirs = read_manifest(first), read_manifest(last)
        other_bits = [each.key for each in tensor_differences(first, last, mine, theirs)]
        result = "identical"
        if missing:
            self.failed = True
            result = f"DIFFERS: rows of the steps {sorted(other)}"
        elif differing or other_bits:
            self.failed = True
            count = len(mine.tensors)
            result = f"DIFFERS: {differing[:2]}; {len(other_bits)} of {count} tensors {other_bits[:3]}"
        losses = [one[1]["train/loss"], one[STEPS]["train/loss"]]
        self.context.emit(what, result[:600], loss=losses, loss_scale=one[STEPS].get("train/loss_scale"))

    def _near(self, what: str, one: Rows | None, other: Rows | None, bound: float) -> None:
        """Compare losses, and whether both saw the same samples."""
        if one is None or other is None:
            self.context.emit(f"{what}: losses", "not compared: a launch failed")
            return
        errors = [
            abs(one[step]["train/loss"] / other[step]["train/loss"] - 1) for step in range(1, STEPS + 1)
        ]
        key = "data/batch_sha256"
        same = all(one[step][key] == other[step][key] for step in range(1, STEPS + 1))
        self.failed |= not same
        first = next((step for step, error in enumerate(errors, 1) if not error <= bound), None)
        result = "ok" if same and first is None else f"beyond {bound:g} from step {first}, a tie of experts?"
        self.context.emit(
            f"{what}: relative error of the loss, first step, worst of {STEPS}", [errors[0], max(errors)],
            result=result if same else "other samples",
        )  # fmt: skip
