"""The family of each preset: every size is a valid model, and the base is one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.presets import preset

from llm_pretrain.config.loading import PRESETS, validate
from llm_pretrain.errors import ConfigError
from llm_pretrain.forecast.family import member, width_step
from llm_pretrain.model.sizes import count_parameters

BASES = [path.stem for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "quickstart-chat"]


@pytest.mark.parametrize("name", BASES)
def test_every_size_of_a_preset_is_a_valid_model(name):
    base = preset(name)
    sizes = []
    for heads in (1, 2, 3, 5, 7, 12):
        config = member(base, heads * width_step(base))
        model = config.model
        assert validate(config, needs_data=False) == []
        assert model.attention_head_dim == base.model.attention_head_dim
        assert model.num_attention_heads % model.num_key_value_heads == 0
        assert (model.num_experts, model.num_experts_per_tok) == (
            base.model.num_experts,
            base.model.num_experts_per_tok,
        )
        assert bool(model.moe_layers) == bool(base.model.moe_layers)
        sizes.append(count_parameters(model).active)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("name", BASES)
def test_a_base_is_a_member_at_its_own_rates(name):
    base = preset(name)
    own = member(base, base.model.hidden_size)
    tuned_for = base.optimizer.base_hidden_size or base.model.hidden_size
    assert own == dataclasses.replace(
        base, optimizer=dataclasses.replace(base.optimizer, base_hidden_size=tuned_for)
    )


def test_sizes_follow_the_dial():
    model = member(preset("quickstart"), 96).model
    assert (model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads) == (2, 3, 1)
    assert (model.intermediate_size, model.moe_intermediate_size) == (256, 128)


def test_a_sparse_step_longer_than_the_model_keeps_a_layer_of_experts():
    base = preset("tiny-moe")
    shape = dataclasses.replace(
        base.model, num_hidden_layers=6, decoder_sparse_step=3, first_k_dense_replace=2
    )
    for heads in (1, 2, 3, 4):
        config = member(dataclasses.replace(base, model=shape), heads * width_step(base))
        assert config.model.moe_layers


def test_what_has_no_family_is_refused():
    base = preset("quickstart")
    with pytest.raises(ConfigError, match=r"model\.hidden_size: expected a multiple of 32, .*, found 100"):
        member(base, 100)
    tuned = dataclasses.replace(base, model=dataclasses.replace(base.model, init_from=str(Path("weights"))))
    with pytest.raises(ConfigError, match=r"model\.init_from: expected none"):
        member(tuned, 96)
