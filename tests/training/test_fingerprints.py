"""What a checkpoint's model must match: what changes shapes or arithmetic, and nothing else."""

import dataclasses

import pytest

from llm_pretrain.checkpoints.manifest import model_fingerprint
from llm_pretrain.config.model_config import ModelConfig

PLAIN = ModelConfig(num_experts=4)


def test_where_training_started_and_how_long_the_export_may_be_do_not_matter():
    changed = dataclasses.replace(PLAIN, init_from="elsewhere", max_position_embeddings=4096)
    assert model_fingerprint(changed) == model_fingerprint(PLAIN)


@pytest.mark.parametrize(
    "changes",
    [{"n_shared_experts": 1}, {"scoring_func": "sigmoid"}, {"rope_type": "linear"}, {"hidden_act": "relu2"}],
)
def test_a_change_of_arithmetic_is_named(changes):
    changed = model_fingerprint(dataclasses.replace(PLAIN, **changes))
    plain = model_fingerprint(PLAIN)
    assert {name for name in plain if plain[name] != changed[name]} == {f"model.{name}" for name in changes}


def test_yarn_s_original_context_matters_also_where_it_is_derived():
    yarn = dataclasses.replace(PLAIN, rope_type="yarn", rope_factor=4.0, max_position_embeddings=4096)
    longer = dataclasses.replace(yarn, max_position_embeddings=8192)
    said = dataclasses.replace(longer, original_max_position_embeddings=1024)
    assert model_fingerprint(yarn) != model_fingerprint(longer)
    assert model_fingerprint(yarn) == model_fingerprint(said)
