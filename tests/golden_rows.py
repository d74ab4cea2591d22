"""Golden rows: what 20 steps of two small models wrote when the file was made, and a comparison with today's.

    python tests/golden_rows.py --write

writes the rows of this machine into `tests/assets/golden_rows.jsonl`, in the place of those of the same
environment. The commit says why rows changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.corpora import WORDS, make_tokenizer, write_jsonl
from support.fork_server import fork_server, remove_shared
from support.launching import Finished, launch

from llm_pretrain.audit.comparison import (
    GRAD_NORM,
    KEYS,
    LOSSES,
    REROUTED_BOUND,
    SAMPLES,
    Tolerance,
    compare_rows,
    exact_differences,
)
from llm_pretrain.config.loading import multiplies_in_bf16
from llm_pretrain.data.preparation import Preparation, prepare_store

FILE = Path(__file__).parent / "assets" / "golden_rows.jsonl"
STEPS = 20
LAUNCHERS = ("torchrun", "accelerate")
WORLD_SIZES = (1, 2)

_DENSE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 1e-3,
}
MODELS = {"dense": _DENSE, "mixture": _DENSE | _MIXTURE}

_ROW_KEYS = (*KEYS, "train/z_loss", "train/router_z_loss", "train/learning_rate", "train/tokens", "moe/load")
_NOT_OF_ENVIRONMENT = ("llm_pretrain", "python", "platform", "git_revision")
"""Not kept of a run's environment: they do not decide the arithmetic, or are what is tested."""


@dataclass
class GoldenSet:
    """The rows of one environment: hardware, torch, threads and variables that change the arithmetic.

    `runs`: a run's name, `dense-1` for the dense model at one rank, to its rows by step.
    """

    environment: dict[str, Any]
    runs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)


def make_golden_store(folder: Path) -> Path:
    """A token store of 300 random documents, the same on every machine and version: RandomState is frozen."""
    generator = np.random.RandomState(48)
    documents = [
        {"text": " ".join(WORDS[index] for index in generator.randint(0, len(WORDS), size=length))}
        for length in generator.randint(1, 40, size=300)
    ]
    corpus = write_jsonl(folder / "corpus.jsonl", documents)
    tokenizer = make_tokenizer(folder / "tokenizer")
    return prepare_store(Preparation([str(corpus)], tokenizer, folder / "store", workers=1)).path


def golden_config(store: Path, model: str) -> dict[str, Any]:
    """The configuration of a run; four micro batches make a step at one rank, two at two."""
    return {
        "model": MODELS[model],
        "data": {"sources": [{"store": str(store)}]},
        "training": {
            "sequence_length": 32,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "max_steps": STEPS,
            "precision": "fp32",
            "z_loss_coef": 1e-3,
        },
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"name": "cosine", "warmup_steps": 4, "min_learning_rate": 3e-4},
        "evaluation": {"eval_steps": 0},
        "checkpoint": {"save_steps": 0},
        "distributed": {"cpu_threads": 1},
        "logging": {"logging_steps": 1, "wandb_mode": "disabled", "parameters_sha256": True},
    }


def train_golden(
    launcher: str,
    world_size: int,
    model: str,
    store: Path,
    folder: Path,
    before: Sequence[tuple[str, list[Any]]] = (),
) -> Finished:
    """Run one launcher's script on forked ranks; `before` injects a fault, as in `launch`."""
    folder.mkdir(parents=True)
    file = folder / "settings.yaml"
    file.write_text(json.dumps(golden_config(store, model)))
    return launch(launcher, world_size, folder / "run", ["--config", str(file)], before=before)


def golden_rows(run: Finished) -> dict[int, dict[str, Any]]:
    """The kept keys of a run's rows."""
    return {
        step: {key: row[key] for key in _ROW_KEYS if key in row}
        for step, row in run.rows.items()
        if 1 <= step <= STEPS
    }


def environment_of(run: Finished) -> dict[str, Any]:
    """What bits depend on: the environment that the run has recorded, and whether products are in bf16."""
    attempt = run.attempts[0]
    kept = {name: value for name, value in attempt["versions"].items() if name not in _NOT_OF_ENVIRONMENT}
    return {"device": attempt["device"], "multiplies_in_bf16": multiplies_in_bf16(), **kept}


def first_difference(left: Mapping[int, Any], right: Mapping[int, Any]) -> str | None:
    """The first step and key at which rows are not the same bits, in words; None where there is none."""
    steps = max({**left, **right}, default=0)
    return next((each.text for each in exact_differences(left, right, steps=steps)), None)


def out_of_bounds(golden: Mapping[int, Any], rows: Mapping[int, Any]) -> str | None:
    """The first difference from a set's rows that another machine's rounding does not explain, in words.

    Samples are exact, losses and gradient norms within 1e-5. From the first step on at which a token goes to
    another of two experts that tie, the bounds are those of `llm-pretrain parity` for that.
    """
    bounds: dict[str, float] = dict.fromkeys((*LOSSES, GRAD_NORM), 1e-5)
    found = compare_rows(golden, rows, STEPS, Tolerance(SAMPLES, bounds, rerouted=REROUTED_BOUND))
    return found.first.text if found.first else None


def read_sets() -> list[GoldenSet]:
    """The sets of the file: a line with an environment, then a line for each row."""
    sets: list[GoldenSet] = []
    for line in FILE.read_text().splitlines():
        entry = json.loads(line)
        if "environment" in entry:
            sets.append(GoldenSet(entry["environment"]))
        else:
            sets[-1].runs.setdefault(entry.pop("run"), {})[entry.pop("step")] = entry
    return sets


def write_sets(sets: Sequence[GoldenSet]) -> None:
    """Write the file anew."""
    lines: list[dict[str, Any]] = []
    for each in sets:
        lines.append({"environment": each.environment})
        for run, rows in each.runs.items():
            lines += [{"run": run, "step": step, **row} for step, row in rows.items()]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the golden rows of this machine anew.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    mine = GoldenSet({})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_golden_store(folder)
        for model in MODELS:
            for world_size in WORLD_SIZES:
                run = train_golden(LAUNCHERS[0], world_size, model, store, folder / f"{model}-{world_size}")
                mine.runs[f"{model}-{world_size}"] = golden_rows(run)
                mine.environment = environment_of(run)
    others = [each for each in read_sets() if each.environment != mine.environment] if FILE.exists() else []
    write_sets([*others, mine])
    print(f"{FILE}: {len(others) + 1} sets, the last one of {mine.environment}")
    return 0


if __name__ == "__main__":
    fork_server()
    try:
        sys.exit(main())
    finally:
        remove_shared()
