"""A step on packed, isolated documents against one on whole rows, and against a mask, on one CPU thread.

Forward and backward of two decoder layers of width 512 (8 query heads of 64, 2 key heads), layout of the
documents included, in interleaved rounds by CPU time of this process, with the allocator set as a training
process sets it. `packed`: documents as batches bring them; `unmasked`: one document per row; `mask`: the same
documents by a mask over all pairs; `sdpa`: the same by a call of torch's kernel per document.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.measuring import goal, interleaved, ratio
from llm_pretrain.config import ModelConfig
from llm_pretrain.distributed.process import keep_freed_memory
from llm_pretrain.model import Decoder, decoder
from llm_pretrain.model.kernels import attention
from llm_pretrain.model.kernels.attention import DocumentLayout
from llm_pretrain.training import initialize_weights

GOAL_RATIO = 1.0
CASES = ((1, 2048, 12), (4, 512, 3))
"""Rows, positions of a row, documents in a row."""
SIDES = ("packed", "unmasked", "mask", "sdpa")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--pairs", type=int, default=9)


def documents(rows: int, columns: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """document_ids and position_ids [rows, columns] of random cuts, and their offsets."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(rows, columns, dtype=torch.bool)
    starts[:, 0] = True
    for row in range(rows):
        starts[row, 1 + torch.randperm(columns - 1, generator=generator)[: count - 1]] = True
    ids = starts.long().cumsum(1) - 1
    position = torch.arange(columns)
    first = torch.where(starts, position, 0).cummax(1).values
    offsets = torch.cat([starts.flatten().nonzero()[:, 0], torch.tensor([rows * columns] * 20)])
    return ids, position - first, offsets.int()


@contextmanager
def way(side: str, document_ids: Tensor) -> Iterator[None]:
    """Puts a layout or a kernel in the place of the chosen one."""
    layout, use_blocks = decoder.document_layout, attention._use_blocks
    causal = torch.ones(document_ids.shape[1], document_ids.shape[1]).bool().tril()
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & causal
    try:
        if side == "mask":
            decoder.document_layout = lambda *_: DocumentLayout(mask=mask)
        elif side == "sdpa":
            attention._use_blocks = lambda *_: False
        yield
    finally:
        decoder.document_layout, attention._use_blocks = layout, use_blocks


def build(side: str, case: tuple[int, int, int], dtype: torch.dtype | None) -> Callable[[], None]:
    """One forward and backward pass of a side."""
    rows, columns, count = case
    config = ModelConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=columns,
    )
    model = Decoder(config)
    initialize_weights(model, 0)
    document_ids, position_ids, offsets = documents(rows, columns, count)
    ids = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(1))
    packed = {"position_ids": position_ids, "document_ids": document_ids, "document_offsets": offsets}
    inputs = {"input_ids": ids, "labels": ids} | ({} if side == "unmasked" else packed)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with way(side, document_ids), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            total = model(**inputs).loss_sum
        total.backward()

    return step


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per case and precision, and the goal at 2,048 positions."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for precision, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        for case in CASES:
            times = interleaved({side: build(side, case, dtype) for side in SIDES}, arguments.pairs)
            found = {side: ratio(times["packed"], times[side]) for side in SIDES[1:]}
            milliseconds = ", ".join(f"{side} {1e3 * statistics.median(times[side]):.0f}" for side in SIDES)
            print(
                f"{case[0]} x {case[1]}, {case[2]} documents a row, {precision}  packed over "
                + ", ".join(f"{side} {each.text()}" for side, each in found.items())
                + f"; ms {milliseconds}",
                flush=True,
            )
            if case == CASES[0]:
                name = f"packed over unmasked at {case[1]} positions, {precision},"
                print(goal(name, found["unmasked"], at_most=GOAL_RATIO), flush=True)
