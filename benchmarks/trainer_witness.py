"""Our runs beside transformers' Trainer: the tables of docs/trainer.md.

`python benchmarks/trainer_witness.py --store STORE` runs all cells, some minutes on two cores. With
`--gradients FILE OPTIONS…` it is the process that one cell starts: one step, and the routers' gradients.
No test of exactness; those are in tests/end_to_end/test_trainer_path.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it starts itself as a script

from benchmarks.machine import ROOT, python_path
from llm_pretrain.runs.rows import read_metrics

TRAINER_SCRIPT = ROOT / "examples" / "train_pretrain_trainer.py"
OURS = ROOT / "train_pretrain.py"
GLOBAL_BATCH_SIZE = 32
CELLS = {(1, 1): 32, (1, 4): 8, (2, 1): 16, (2, 4): 4}
"""(world size, accumulation steps): micro batch size of the same 32 sequences."""


def options(preset: str, store: Path, *more: str) -> list[str]:
    """Options of a short run of `preset`, the same for every script."""
    return [
        *("--config", str(ROOT / "configs" / preset), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.global_batch_size", str(GLOBAL_BATCH_SIZE), "--training.max_steps", "50"),
        *("--optimizer.learning_rate", "1e-3", "--schedule.min_learning_rate", "1e-4"),
        *("--evaluation.eval_steps", "0", "--checkpoint.save_steps", "0", "--logging.report", "false"),
        *("--logging.wandb_mode", "disabled", "--logging.logging_steps", "1"),
        *("--training.precision", "fp32", "--distributed.cpu_threads", "1"),
        *(("--model.router_z_loss_coef", "0") if "moe" in preset else ()),
        *more,
    ]


def differences(left: Path, right: Path) -> dict[str, float]:
    """Largest relative difference over the steps of two run folders; of digests, how many differ."""
    ours, theirs = (
        {row["step"]: row for row in read_metrics(each / "metrics.jsonl")} for each in (left, right)
    )
    steps = sorted(theirs)
    assert steps, f"{right}: no rows"
    assert set(steps) <= set(ours), f"{len(ours)} and {len(theirs)} rows"
    found: dict[str, float] = {}
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "train/loss_tokens"):
        pairs = [(ours[step][key], theirs[step][key]) for step in steps]
        found[key] = max(relative(a, b) for a, b in pairs)
    key = "data/batch_sha256"
    found[key] = sum(ours[step][key] != theirs[step][key] for step in steps)
    return found


def relative(left: float | None, right: float | None) -> float:
    """|left - right| / |left|; infinite where one is missing."""
    if left is None or right is None:
        return float("inf")
    return 0.0 if left == right else abs(left - right) / (abs(left) or 1.0)


def load_script(path: Path = TRAINER_SCRIPT) -> Any:
    """The trainer script as a module, for runs in this process."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def router_gradients(script: Any, arguments: Sequence[str]) -> dict[str, Tensor]:
    """Gradients of the routers in Trainer's first step, as its optimizer would get them, unclipped.

    Args:
        script: Of `load_script`.
        arguments: Options of the script, with one step and a new run folder.
    """
    from transformers import TrainerCallback

    found: dict[str, Tensor] = {}

    class Capture(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight") and parameter.grad is not None:
                    found[name] = parameter.grad.double().clone()

    class Capturing(script.WitnessTrainer):
        def __init__(self, *positional: Any):
            super().__init__(*positional)
            self.add_callback(Capture())

    original, script.WitnessTrainer = script.WitnessTrainer, Capturing
    try:
        first = ["--training.max_steps", "1", "--schedule.warmup_steps", "0", "--training.max_grad_norm", "0"]
        assert script.main([*arguments, *first]) == 0
    finally:
        script.WitnessTrainer = original
    return found


def ratio(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Length of `gradients` along `reference`, in lengths of `reference`; over all tensors together."""
    product = sum((gradients[name] * each).sum() for name, each in reference.items())
    return float(product / sum((each**2).sum() for each in reference.values()))


def run(
    script: Path,
    world_size: int,
    arguments: Sequence[str],
    *before: str,
    variables: Mapping[str, str] = os.environ,
) -> None:
    """Start a script with the environment `variables` and wait for it; its errors are shown."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    command = [sys.executable, *(launcher if world_size > 1 else []), str(script), *before, *arguments]
    environment = {**variables, "PYTHONPATH": python_path()}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def compared(folder: Path, store: Path) -> Iterator[str]:
    """Rows of the table of differences."""
    cases = {
        "dense, fp32": ("tiny-dense.yaml",),
        "dense, bf16": ("tiny-dense.yaml", "--training.precision", "bf16"),
        "MoE without balance loss, fp32": ("tiny-moe.yaml", "--model.router_aux_loss_coef", "0"),
    }
    for number, (name, (preset, *more)) in enumerate(cases.items()):
        ours = folder / f"{number}-ours"
        run(
            OURS,
            1,
            options(preset, store, *more, "--training.micro_batch_size", "8", "--run.output_dir", str(ours)),
        )
        for (world_size, steps), size in CELLS.items():
            theirs = folder / f"{number}-{world_size}-{steps}"
            arguments = options(preset, store, *more, "--training.micro_batch_size", str(size))
            run(TRAINER_SCRIPT, world_size, [*arguments, "--run.output_dir", str(theirs)])
            found = differences(ours, theirs)
            loss, norm = (f"{found[f'train/{key}']:.1e}" for key in ("loss", "grad_norm"))
            wrong = f"{found['data/batch_sha256']:.0f}"
            yield f"| {name} | {world_size} | {steps} | {loss} | {norm} | {wrong} |"


def balance(folder: Path, store: Path) -> Iterator[str]:
    """Rows of the table of the balance loss's gradient."""
    auxiliary: dict[tuple[int, int], dict[str, Tensor]] = {}
    for world_size, steps in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)):
        size = GLOBAL_BATCH_SIZE // (world_size * steps)
        found = []
        for coefficient in ("1.0", "0"):
            name = folder / f"{world_size}-{steps}-{coefficient}"
            arguments = options("tiny-moe.yaml", store, "--model.router_aux_loss_coef", coefficient)
            arguments += ["--training.micro_batch_size", str(size), "--run.output_dir", str(name)]
            file = str(name.with_suffix(".pt"))
            run(Path(__file__), world_size, arguments, "--gradients", file)
            found.append(torch.load(file, weights_only=True))
        auxiliary[world_size, steps] = {key: found[0][key] - found[1][key] for key in found[0]}
        yield f"| {world_size} | {steps} | {ratio(auxiliary[world_size, steps], auxiliary[1, 1]):.3f} |"


def main() -> None:
    """Print both tables."""
    if sys.argv[1:2] == ["--gradients"]:
        gradients = router_gradients(load_script(), sys.argv[3:])
        if os.environ.get("RANK", "0") == "0":
            torch.save(gradients, sys.argv[2])
        return
    store = Path(sys.argv[sys.argv.index("--store") + 1])
    with tempfile.TemporaryDirectory() as folder:
        print("| run | W | A | loss | gradient norm | steps with other samples |\n|---|---|---|---|---|---|")
        for line in compared(Path(folder), store):
            print(line, flush=True)
        print("\n| W | A | gradient of the balance loss |\n|---|---|---|")
        for line in balance(Path(folder), store):
            print(line, flush=True)


if __name__ == "__main__":
    main()
