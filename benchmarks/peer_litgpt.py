"""LitGPT's `pretrain`, step by step: run by `peers.py` with an interpreter that has litgpt.

    python benchmarks/peer_litgpt.py SETTINGS_AS_JSON

Reads a line for each step and answers `took SECONDS`. Imports nothing of ours, which its environment lacks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt import Config  # pyright: ignore[reportMissingImports] (another environment's)
from litgpt.args import EvalArgs, TrainArgs  # pyright: ignore[reportMissingImports]
from litgpt.data import DataModule  # pyright: ignore[reportMissingImports]
from litgpt.pretrain import setup  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
ANSWERS = sys.stdout
WARMUP_STEPS, MAX_STEPS = 100, 100_000


class Rows(IterableDataset):
    """Batches of length + 1 tokens, the next when a line on standard input asks for it."""

    def __iter__(self) -> Iterator[Tensor]:
        ids = np.load(Path(SETTINGS["folder"]) / "ids.npy")
        length, size = SETTINGS["length"] + 1, SETTINGS["micro_batch_size"]
        rows = torch.from_numpy(ids[: len(ids) // length * length].reshape(-1, length))
        clock = getattr(time, SETTINGS["clock"])
        while True:
            for first in range(0, len(rows) - size, size):
                if not sys.stdin.readline():
                    sys.exit(0)
                start = clock()
                yield rows[first : first + size].clone()
                print(f"took {clock() - start}", file=ANSWERS, flush=True)


class Data(DataModule):
    """What LitGPT asks of its data."""

    def connect(self, *_: Any, **__: Any) -> None:
        """Nothing to learn."""

    def train_dataloader(self) -> DataLoader:
        """The rows, on demand."""
        return DataLoader(Rows(), batch_size=None)

    def val_dataloader(self) -> list[Tensor]:
        """None; the list is empty."""
        rows = torch.ones(1, SETTINGS["length"] + 1, dtype=torch.int64)
        return DataLoader([rows[0]], batch_size=1)  # type: ignore[return-value, arg-type]


def main() -> None:
    """Trains until standard input ends."""
    sys.stdout = sys.stderr
    length, size = SETTINGS["length"], SETTINGS["micro_batch_size"]
    config = Config(
        name="peer",
        block_size=length,
        vocab_size=SETTINGS["model"]["padded_vocab_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        **SETTINGS["model"],
    )
    setup(
        model_name="peer",
        model_config=config,
        out_dir=Path(SETTINGS["folder"]) / "out",
        precision=SETTINGS["precision"],
        data=Data(),
        train=TrainArgs(
            save_interval=None,
            global_batch_size=size,
            micro_batch_size=size,
            max_tokens=MAX_STEPS * size * length,
            lr_warmup_steps=WARMUP_STEPS,
            max_norm=SETTINGS["max_norm"],
            max_seq_length=length,
            tie_embeddings=SETTINGS["tie"],
        ),
        eval=EvalArgs(interval=MAX_STEPS, max_iters=1, initial_validation=False, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": SETTINGS["optimizer"]},
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main()
