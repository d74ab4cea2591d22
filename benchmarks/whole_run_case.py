"""One case of `whole_run` in a process of its own: loops that take steps in turns, or one loop alone.

    python -m benchmarks.whole_run_case SETTINGS_AS_JSON

Prints the seconds of each side's steps, its tokens per step and the process's peak memory as a line of JSON,
last of all. No benchmark by itself.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.documents import Documents
from benchmarks.launching import training_options
from benchmarks.measuring import interleaved
from benchmarks.peers import Side, bare, litgpt, ours, trainer_packed, trainer_padded
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config

SIDES = {"ours": ours, "trainer_padded": trainer_padded, "trainer_packed": trainer_packed, "bare": bare}


def config_of(settings: dict[str, Any], precision: str | None) -> Config:
    """The preset on the documents' store; `precision` None leaves it to the framework's default."""
    options = training_options(settings["config"], Path(settings["store"]), Path(settings["folder"]) / "ours")
    size = str(settings["micro_batch_size"])
    options += ["--training.micro_batch_size", size, "--training.global_batch_size", size]
    options += ["--training.sequence_length", str(settings["sequence_length"]), "--logging.report", "false"]
    options += ["--training.max_steps", "100000", "--distributed.cpu_threads", str(settings["threads"])]
    options += ["--logging.logging_steps", "10"]
    return load_config([*options, *(["--training.precision", precision] if precision else [])])


def build(settings: dict[str, Any]) -> dict[str, Side]:
    """The sides that the settings name, each with its precision."""
    documents = Documents.lognormal(settings["documents"], settings["vocab_size"])
    made = SIDES | {"litgpt": partial(litgpt, python=settings["python"], clock=settings["clock"])}
    return {
        name: made[name](config_of(settings, precision), documents)
        for name, precision in settings["sides"].items()
    }


def main() -> None:
    """Takes the steps and prints what they took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    sides = build(settings)
    steps = {name: side.step for name, side in sides.items()}
    clock = getattr(time, settings["clock"])
    try:
        seconds = interleaved(steps, settings["pairs"], settings["warmup"], clock)
    finally:
        for side in sides.values():
            side.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {name: {"seconds": seconds[name], "tokens": side.tokens} for name, side in sides.items()}
    print(json.dumps({"sides": found, "peak_gib": peak}), flush=True)


if __name__ == "__main__":
    main()
