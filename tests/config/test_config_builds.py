"""Every configuration is refused with a message, or accepted and then really builds: nothing in between.

Built are: the model (without memory where it is large), its parameters and optimizer, the learning rate of
every step, the objective, the sample order and a batch of a tiny store, and its home in other libraries.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_trees import trees
from support.fuzzing import fuzzed

from llm_pretrain.config.loading import from_dict, resolve_model, validate
from llm_pretrain.config.schema import field_types
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import evaluation_batches, global_batches
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.export.config_json import match_hf_architecture
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.optim.schedule import learning_rate
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.saving import fingerprints
from llm_pretrain.training.step import Objective

FEW_PARAMETERS, FEW_TOKENS = 1 << 20, 1 << 14
TOKENIZER_SIZE = 259


def build(config: Config, world_size: int) -> None:
    """Everything that a run builds before its first step and that needs no process group."""
    config = resolve_model(config, TOKENIZER_SIZE)
    model, training = config.model, config.training
    with torch.device("meta"):
        empty = Decoder(model, activation_checkpointing=training.activation_checkpointing)
    size = count_parameters(model)
    assert size.total == sum(parameter.numel() for parameter in empty.parameters())
    if size.total <= FEW_PARAMETERS:
        real = Decoder(model)
        initialize_weights(real, config.run.seed)
        assert all(parameter.isfinite().all() for parameter in real.parameters())
        build_optimizer(real, config.optimizer)
    steps = {0, 1, training.max_steps // 2, training.max_steps - 1, config.schedule.warmup_steps}
    for step in steps | set(range(min(64, training.max_steps))):
        rate = learning_rate(config, step)
        assert math.isfinite(rate)
        assert 0 <= rate <= config.optimizer.learning_rate * (1 + 1e-9), f"step {step}: {rate}"
    assert math.isfinite(Objective(config, world_size).factor)
    assert config.gradient_accumulation_steps(world_size) >= 1
    fingerprints(config)
    loader = global_batches(config, start_step=0)
    tokens = training.micro_batch_size * training.sequence_length
    assert len(loader) * training.micro_batch_size == training.max_steps * training.global_batch_size
    if tokens <= FEW_TOKENS:
        assert loader.batch_sampler is not None
        next(iter(loader))
        last = training.max_steps * training.global_batch_size - training.micro_batch_size
        loader.dataset.__getitems__(list(range(last, last + training.micro_batch_size)))  # type: ignore[attr-defined]
        evaluated = evaluation_batches(config)
        if len(evaluated):
            evaluated[0]
    try:
        home = match_hf_architecture(model)
    except ConfigError as error:
        named = [line.startswith("model.") for line in error.problems]
        assert all(named)
    else:
        assert home


def accepted(tree: dict[str, Any], world_size: int) -> bool:
    """Whether the configuration is accepted, and then builds; asserts how it is refused."""
    try:
        config = from_dict(tree)
        problems = validate(config, world_size)
    except ConfigError as error:
        config, problems = None, list(error.problems)
    for line in problems:
        assert "\n" not in line
        name, _, rest = line.partition(": ")
        assert name.partition(".")[0] in field_types(Config)
        assert "expected" in rest
    if problems or config is None:
        return False
    said = ""
    try:
        build(config, world_size)
    except (ConfigError, DataError) as error:
        said = str(error)
    # what only the store can tell
    assert not said or said.startswith(("model.vocab_size: expected at least", "data.sources")), said
    return True


@pytest.mark.fuzz
def test_whatever_is_accepted_builds(plain_store: Path, changed_store: Path):
    seen: Counter[bool] = Counter()

    @given(
        tree=trees(stores=[str(plain_store), str(changed_store)]),
        world_size=st.sampled_from([1, 1, 2, 3]),
    )
    @fuzzed(50)
    def check(tree: dict[str, Any], world_size: int) -> None:
        seen[accepted(tree, world_size)] += 1

    check()
    share = seen[True] / seen.total()
    print(f"{seen.total()} configurations, {share:.0%} accepted")
    assert 0.15 < share < 0.9
