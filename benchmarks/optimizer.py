"""An optimizer's step on a preset's parameters: ours, torch's other AdamW kernels, Muon; one CPU thread.

Interleaved, by the process's CPU time; gradients are random, nothing is trained. `ours` is what
`build_optimizer` makes of optimizer.name adamw, `muon` of muon.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.optim import AdamW, Optimizer

from benchmarks.launching import preset_without_data
from benchmarks.measuring import interleaved, ratio
from benchmarks.reporting import report
from llm_pretrain.distributed.process import keep_freed_memory
from llm_pretrain.model import Decoder
from llm_pretrain.optim.param_groups import build_optimizer
from llm_pretrain.training import initialize_weights

QUICK = ["--pairs", "7", "--without_muon"]
VARIANTS = {"default": {}, "foreach": {"foreach": True}, "for loop": {"foreach": False}}
"""torch's AdamW without `fused`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--config", default="minimind3-64m", help="a preset of configs/")
    parser.add_argument("--without_muon", action="store_true", help="Muon takes seconds a step on a CPU")


def run(arguments: argparse.Namespace) -> None:
    """Prints the milliseconds of each, and their ratio to ours."""
    torch.set_num_threads(1)
    keep_freed_memory()
    config = preset_without_data(arguments.config)
    model = Decoder(config.model)
    initialize_weights(model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    adamw, muon = (replace(config.optimizer, name=name) for name in ("adamw", "muon"))
    sides: dict[str, Callable[[], object]] = {"ours": _steps(build_optimizer(model, adamw))}
    for name, options in VARIANTS.items():
        sides[name] = _steps(AdamW(model.parameters(), lr=1e-4, **options))
    if not arguments.without_muon:
        sides["muon"] = _steps(build_optimizer(model, muon, "bf16"))
    times = interleaved(sides, arguments.pairs, clock=time.process_time)
    for name in sides:
        if name != "ours":
            label = f"{'optimizer.name muon' if name == 'muon' else f'AdamW, {name}'} / AdamW, ours (fused)"
            milliseconds = 1e3 * min(times["ours"]), 1e3 * min(times[name])
            note = f"ours {milliseconds[0]:.0f} ms, {name} {milliseconds[1]:.0f} ms at best"
            report(f"{label}, `{arguments.config}`", ratio(times[name], times["ours"]), digits=2, note=note)


def _steps(optimizer: Optimizer) -> Callable[[], object]:
    return optimizer.step
