"""Rotary scaling against transformers' functions, and its tables."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.model_config import YARN_BETAS, ModelConfig
from llm_pretrain.model import attention

CONFIG = ModelConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_theta=1e4)
SCALED = {
    "linear": dataclasses.replace(CONFIG, rope_type="linear", rope_factor=3.0),
    "yarn": dataclasses.replace(CONFIG, rope_type="yarn", rope_factor=8.0),
    "yarn-original": dataclasses.replace(
        CONFIG, rope_type="yarn", rope_factor=4.0, original_max_position_embeddings=2048, rope_theta=1e6
    ),
    "yarn-tiny-context": dataclasses.replace(
        CONFIG, rope_type="yarn", rope_factor=4.0, original_max_position_embeddings=4, head_dim=6
    ),
}


def theirs(config: ModelConfig) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": config.rope_type,
        "rope_theta": config.rope_theta,
        "factor": config.rope_factor,
    }
    if config.rope_type == "yarn":
        parameters |= {
            "original_max_position_embeddings": config.rope_original_context,
            **YARN_BETAS,
        }
    their_config = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_type](their_config, torch.device("cpu"))


def ours(config: ModelConfig) -> tuple[torch.Tensor, float]:
    return attention.rotary_frequencies(config, torch.device("cpu")), attention.attention_factor(config)


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_factor_are_those_of_transformers_bit_for_bit(name):
    frequencies, factor = ours(SCALED[name])
    expected, expected_factor = theirs(SCALED[name])
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


def test_tables_hold_each_position_s_own_angles_scaled_by_the_attention_factor():
    config = SCALED["yarn"]
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 4095]])  # also those of a decoding step
    cos, sin = attention.rotary_tables(positions, config, torch.float64)
    assert cos.shape == sin.shape == (2, 5, 1, 32)
    assert cos.dtype == torch.float64
    length = (cos**2 + sin**2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, attention.attention_factor(config)))
    assert torch.equal(cos[0, :2], cos[0, 3:])
    angle = 4095 * attention.rotary_frequencies(config, torch.device("cpu"))
    torch.testing.assert_close(
        torch.atan2(sin, cos)[1, 4, 0].tan().float(), angle.tan(), rtol=1e-3, atol=1e-3
    )
