"""Saving and restoring a run's whole state: ours against torch.save and torch.load of the same tensors.

Ours hashes every file, syncs it to the disk and commits by a rename; restoring verifies every hash.
torch.save does none of that. Gigabytes of state per second by the wall's clock, in turns; the page cache is
warm.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import preset_without_data
from benchmarks.measuring import Interval, interleaved, ratio
from benchmarks.reporting import report
from llm_pretrain.checkpoints.manifest import RunFacts
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.distributed.collectives import OneRank
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.model_setup import initialize_weights

QUICK = ["--pairs", "7", "--config", "minimind-26m"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--config", default="minimind3-64m", help="a preset of configs/")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")


def run(arguments: argparse.Namespace) -> None:
    """Prints speeds and ratios of saving and of restoring."""
    config = preset_without_data(arguments.config)
    model = Decoder(config.model)
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        sides = _sides(model, optimizer, Path(temporary))
        times = interleaved(sides, arguments.pairs, warmup=1, clock=time.perf_counter)
    gigabytes = 12e-9 * sum(parameter.numel() for parameter in model.parameters())
    for kind in ("save", "restore"):
        own, other = times[kind], times[f"torch {kind}"]
        speed = Interval.of(gigabytes / each for each in own)
        note = f"torch's {Interval.of(gigabytes / each for each in other).text('GB/s', 2)}"
        report(f"{kind} {gigabytes:.2f} GB of state", speed, unit="GB/s", digits=2, note=note)
        report(f"time to {kind} / torch's", ratio(own, other), digits=2)


def _sides(model: Any, optimizer: Any, folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "ours", OneRank(), keep_last=2)
    step, file = 0, folder / "torch.pt"

    def save() -> None:
        nonlocal step
        step += 1
        shutil.rmtree(folder / "ours", ignore_errors=True)
        facts = RunFacts(step, 0, "torchrun", "ddp", 1, 1, 0, None, {})
        store.write(store.stage(model, optimizer, None, facts))

    def restore() -> None:
        found = store.find(expected=lambda step: {})
        assert found is not None
        store.load(found, model, optimizer, None)

    def torch_save() -> None:
        file.unlink(missing_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def torch_restore() -> None:
        loaded = torch.load(file, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    save()
    torch_save()
    return {
        "save": save,
        "torch save": torch_save,
        "restore": restore,
        "torch restore": torch_restore,
    }
