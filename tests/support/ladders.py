"""Ladders without training: ladder.json and points.jsonl, with losses of a law that is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.presets import preset

from llm_pretrain.forecast.family import Size, Sizes
from llm_pretrain.forecast.ladder_runs import with_store
from llm_pretrain.forecast.points import Ladder, Point, Rung, Training, write_points
from llm_pretrain.forecast.scaling_law import ScalingLaw

LAW = ScalingLaw(1.5, 150.0, 0.4, 400.0, 0.35)
UNIQUE_TOKENS = 50_000_000
MULTIPLES = (1, 2, 4)
"""Where decays begin: so far apart that points without noise tell the law."""
STABLE = 1.06
"""Loss before the decay, in units of that after it."""
BITS = 0.45
"""Bits per byte of a nat per token."""
SMALL_BASE = """\
run: {name: tiny}
model: {hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 8,
        num_key_value_heads: 4}
training: {sequence_length: 32, micro_batch_size: 8, global_batch_size: 8, precision: fp32}
optimizer: {learning_rate: 0.008}
schedule: {warmup_steps: 5}
"""
"""A base whose ladder trains in seconds."""


def measured(size: Size, steps: int, *, decayed: bool) -> Point:
    """A training with the loss of `LAW`."""
    training = Training.of(size, steps, UNIQUE_TOKENS)
    loss = LAW.of(training) * (1 if decayed else STABLE)
    return Point(**dataclasses.asdict(training), loss=loss, bits_per_byte=loss * BITS, decayed=decayed)


def make_ladder(folder: Path, *, sizes: Sequence[int] = (32, 64, 96, 128), noise: float = 0.0) -> Ladder:
    """Write a finished ladder of these hidden sizes of tiny-dense's family, and return it.

    The losses are those of `LAW`; `noise` is the standard deviation of their logarithm.
    """
    base = with_store(preset("tiny-dense"), Path("stores/text"))
    generator, all_sizes = np.random.default_rng(0), Sizes(base)
    branches = tuple(2000 * multiple for multiple in MULTIPLES)
    rungs = tuple(Rung(size, branches) for size in sizes)
    points = [
        measured(all_sizes.of(rung.hidden_size), steps, decayed=decayed)
        for rung in rungs
        for decayed, ends in ((True, rung.steps), (False, rung.branches))
        for steps in ends
    ]
    noisy = [
        dataclasses.replace(point, loss=point.loss * math.exp(generator.normal(0, noise))) for point in points
    ]
    ladder = Ladder(folder, base, "a" * 64, UNIQUE_TOKENS, rungs, "20m", 1, tuple(noisy))
    folder.mkdir(parents=True, exist_ok=True)
    ladder.write()
    write_points(folder, noisy)
    return ladder
