"""Rates and initial values that follow the width: the arithmetic, and that the best rate stays the best."""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import small_config
from support.resuming import Attempt, drift
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, OptimizerConfig, ScheduleConfig, TrainingConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.optim.schedule import learning_rate, set_learning_rate
from llm_pretrain.training.model_setup import initialize_weights

BASE = 64
NAMES = pytest.mark.parametrize("name", ["adamw", "muon"])
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def decoder(width: int, base: int | None, *, vocab_size: int = 64, **changes: Any) -> Decoder:
    """Two layers whose inner sizes grow with the width, in heads of 16."""
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        moe_intermediate_size=width,
        **changes,
    )
    model = Decoder(config)
    initialize_weights(model, 0, base)
    return model


@NAMES
@pytest.mark.parametrize("experts", [0, 4])
def test_at_the_base_width_nothing_changes(plain_store: Path, tmp_path: Path, name: str, experts: int):
    """Neither the initial values nor what three steps make of them, to the bit."""
    config = small_config(plain_store, optimizer={"name": name}, model={"num_experts": experts})
    based = replace(config.optimizer, base_hidden_size=config.model.hidden_size)
    runs = []
    for optimizer in (config.optimizer, based):
        attempt = Attempt(replace(config, optimizer=optimizer), tmp_path)
        initialize_weights(attempt.model, 0, optimizer.base_hidden_size)
        runs.append(attempt.train(3).parameters())
    assert drift(*runs) == 0.0


def test_the_factors_are_those_of_the_table():
    """At four times the base width."""
    optimizer = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, base_hidden_size=32)
    model, plain = (decoder(128, base, num_experts=2, n_shared_experts=1) for base in (32, None))
    groups = build_optimizer(model, optimizer).param_groups
    found = {
        id(p): (group["lr_ratio"], group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        initial = parameter.detach().std() / plain.get_parameter(name).detach().std()
        is_map = ".layers." in name and "norm" not in name and not name.endswith("gate.weight")
        if name == "model.norm.weight":
            assert found[id(parameter)] == (0.25, 2.5e-4, 0.0)
            assert torch.equal(parameter.detach(), torch.full((128,), 0.25))
        elif "norm" in name:
            assert found[id(parameter)] == (1.0, 1e-3, 0.0)
            assert torch.equal(parameter.detach(), torch.ones_like(parameter))
        elif name == "model.embed_tokens.weight":
            assert found[id(parameter)] == (1.0, 1e-3, 0.1)
            assert float(initial) == pytest.approx(1.0)
        else:
            assert found[id(parameter)] == (0.25, 2.5e-4, 0.4), name
            assert float(initial) == pytest.approx(0.5 if is_map else 0.25, rel=1e-5), name


def test_muon_s_rate_stays_whatever_the_width():
    optimizer = OptimizerConfig(name="muon", learning_rate=1e-3, muon_learning_rate=0.02, base_hidden_size=32)
    groups = build_optimizer(decoder(128, 32), optimizer).param_groups
    rates = {group["lr"] for group in groups if group["algorithm"] == "muon"}
    assert len(rates) == 1
    assert rates.pop() == pytest.approx(0.02)
    assert {group["lr_ratio"] for group in groups if group["algorithm"] == "adamw"} == {1.0, 0.25}


def moved(width: int, base: int | None, name: str, tied: bool, steps: int = 1) -> dict[str, float]:
    """How far steps on one batch move what each block puts out, and the logits: root mean squares."""
    model = decoder(width, base, tie_word_embeddings=tied)
    config = OptimizerConfig(name=name, learning_rate=4e-3, base_hidden_size=base)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config)
    ids = torch.randint(0, 64, (8, 33), generator=torch.Generator().manual_seed(5))
    before = outputs(model, ids)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss_sum / 256
        loss.backward()
        optimizer.step()
    after = outputs(model, ids)
    return {key: float((after[key] - before[key]).square().mean().sqrt()) for key in before}


@torch.no_grad()
def outputs(model: Decoder, ids: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda *call, name=name: found.__setitem__(name, call[2]))
        for name, module in model.named_modules()
        if name.endswith(("self_attn", "mlp", "lm_head"))
    ]
    model(ids[:, :-1])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@TIED
def test_a_step_moves_the_function_as_far_at_every_width(name: str, tied: bool):
    """Eight times as wide: about as far with a base, and without one several times as far, in every part."""
    narrow, wide = (moved(width, BASE, name, tied) for width in (BASE, 8 * BASE))
    unscaled = moved(8 * BASE, None, name, tied)
    assert narrow.keys() >= {"model.layers.1.mlp", "lm_head"}
    for part, distance in narrow.items():
        assert 0.6 < wide[part] / distance < 1.5, part
        assert unscaled[part] / distance > 4, part


# An experiment of minutes.

CHARACTERS = {character: number for number, character in enumerate(string.printable)}
SEQUENCE, SEQUENCES, STEPS = 64, 4, 120
WIDTHS = NARROW, WIDE = 128, 512
RATES = {"adamw": [2.0**-k for k in (11, 10, 9, 8, 7)], "muon": [0.01 * 2.0**k for k in range(5)]}
"""Of what the layers' matrices take; with Muon, the rest has a quarter of it."""


def text() -> Tensor:
    """Characters of two modules of the standard library."""
    code = "".join(Path(str(module.__file__)).read_text("utf-8") for module in (argparse, json.decoder))
    return torch.tensor([CHARACTERS[character] for character in code if character in CHARACTERS])


def batches(characters: Tensor, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(characters) - SEQUENCE - 1, (SEQUENCES,), generator=generator)
        yield torch.stack([characters[start : start + SEQUENCE + 1] for start in starts.tolist()])


def final_loss(width: int, base: int | None, name: str, rate: float, steps: int = STEPS) -> float:
    """Mean loss of the last 20 steps.

    With a base, `initializer_range` is what belongs to its width; the default is that of far wider models.
    """
    optimizer_config = OptimizerConfig(
        name=name,  # type: ignore[arg-type]  # parametrised
        learning_rate=rate if name == "adamw" else rate / 4,
        muon_learning_rate=rate,
        base_hidden_size=base,
    )
    config = Config(
        optimizer=optimizer_config,
        schedule=ScheduleConfig(name="linear", warmup_steps=10),
        training=TrainingConfig(max_steps=steps),
    )
    changes = {} if base is None else {"initializer_range": base**-0.5}
    model = decoder(width, base, vocab_size=len(CHARACTERS), **changes)
    optimizer, losses = build_optimizer(model, optimizer_config), []
    for step, ids in enumerate(batches(text(), steps)):
        set_learning_rate(optimizer, learning_rate(config, step))
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss_sum / (SEQUENCES * SEQUENCE)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20


def grid(width: int, base: int | None, name: str, numbers: Sequence[int] = range(5)) -> dict[int, float]:
    """Final loss by the number of the rate."""
    losses = {number: final_loss(width, base, name, RATES[name][number]) for number in numbers}
    shown = ", ".join(f"{RATES[name][number]:g}: {loss:.3f}" for number, loss in losses.items())
    print(f"{name}, width {width}, base {base}: {shown}", flush=True)
    return losses


@pytest.mark.slow
@NAMES
def test_the_best_rate_of_width_128_is_near_the_best_of_512(name: str):
    """On a grid of factor 2; and the wide model is as good there as at its best without a base."""
    narrow, wide = (grid(width, NARROW, name) for width in WIDTHS)
    best_narrow, best_wide = min(narrow, key=narrow.__getitem__), min(wide, key=wide.__getitem__)
    assert abs(best_wide - best_narrow) <= 1
    assert 0 < best_narrow < len(RATES[name]) - 1, "the best is no end of the grid"
    lower = range(max(0, best_narrow - 3), best_narrow)
    assert wide[best_wide] <= min(grid(WIDE, None, name, lower).values()) + 0.02
    assert wide[best_narrow] < narrow[best_narrow], (
        "the wider model is the better one, at the rate that was found"
    )
