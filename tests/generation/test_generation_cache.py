"""With a key-value cache the decoder computes what it computes without one."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.generation import KeyValueCache
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.15,
)
MOE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LLAMA = dataclasses.replace(DENSE, qk_norm=False, num_key_value_heads=6)
SHAPES = pytest.mark.parametrize("config", [DENSE, MOE, LLAMA], ids=["dense", "moe", "llama"])
IDS = torch.randint(0, 96, (4, 150), generator=torch.Generator().manual_seed(1))
PROMPTS = [3, 40, 1, 17]


def make(config: ModelConfig) -> Decoder:
    model = Decoder(config)
    initialize_weights(model, 0)
    return model.eval()


def cached_logits(model: Decoder, parts: list[int], ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits of `ids`, fed to the cache in parts of these lengths."""
    cache = KeyValueCache(model.config.num_hidden_layers)
    return torch.cat([model(part, cache=cache).logits for part in ids.split(parts, 1)], 1)


def ragged_logits(model: Decoder, steps: int) -> list[torch.Tensor]:
    """[steps + 1, V] per row: rows of different lengths, padded on the right, then one by one."""
    cache = KeyValueCache(model.config.num_hidden_layers)
    padded = torch.full((4, max(PROMPTS)), 95)
    for row, length in enumerate(PROMPTS):
        padded[row, :length] = IDS[row, :length]
    logits = model(padded, cache=cache).logits
    cache.truncate(PROMPTS)
    rows = [[logits[row, length - 1]] for row, length in enumerate(PROMPTS)]
    for step in range(steps):
        fed = torch.stack([IDS[row, length + step] for row, length in enumerate(PROMPTS)])[:, None]
        logits = model(fed, cache=cache).logits
        for row in range(4):
            rows[row].append(logits[row, 0])
    return [torch.stack(row) for row in rows]


def largest_ragged_error(config: ModelConfig, steps: int = 30) -> float:
    model = make(config)
    with torch.inference_mode():
        full, cached = model(IDS).logits, ragged_logits(model, steps)
    pairs = zip(PROMPTS, cached, full, strict=True)
    return max((got - row[n - 1 : n + steps]).abs().max().item() for n, got, row in pairs)


@SHAPES
@pytest.mark.parametrize(
    "parts", [[150], [7] + [1] * 143, [60, 30, 1, 1, 58]], ids=["whole", "steps", "parts"]
)
def test_logits_with_a_cache_are_those_without(config, parts):
    model = make(config)
    with torch.inference_mode():
        torch.testing.assert_close(cached_logits(model, parts), model(IDS).logits, atol=1e-5, rtol=0)


@SHAPES
def test_rows_of_different_lengths_are_exact(config):
    assert largest_ragged_error(config) < 1e-5


def test_rows_can_leave_and_texts_be_taken_back():
    model = make(DENSE)
    cache = KeyValueCache(DENSE.num_hidden_layers)
    with torch.inference_mode():
        full = model(IDS).logits
        model(IDS[:, :20], cache=cache)
        cache.select([2, 0])
        cache.truncate([9, 20])
        fed = torch.stack([IDS[2, 9], IDS[0, 20]])[:, None]
        torch.testing.assert_close(model(fed, cache=cache).logits[0, 0], full[2, 9], atol=1e-5, rtol=0)
        assert cache.lengths == [10, 21]


def test_low_precision_stays_near():
    model = make(DENSE)
    exact = model(IDS).logits
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = cached_logits(model, [100] + [1] * 50)
    assert 1e-4 < (low.float() - exact).norm() / exact.norm() < 0.05
    whole = cached_logits(make(DENSE).bfloat16(), [100] + [1] * 50)
    assert (whole.float() - exact).norm() / exact.norm() < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_different_lengths_are_exact_on_a_gpu(dtype):
    model = make(DENSE).to("cuda", dtype)
    cache = KeyValueCache(DENSE.num_hidden_layers)
    ids = IDS.cuda()
    with torch.inference_mode():
        full = model(ids).logits.float()
        model(ids[:, :40], cache=cache)
        cache.truncate(PROMPTS)
        for step in range(20):
            fed = torch.stack([ids[row, length + step] for row, length in enumerate(PROMPTS)])[:, None]
            logits = model(fed, cache=cache).logits[:, 0].float()
            expected = torch.stack([full[row, length + step] for row, length in enumerate(PROMPTS)])
            bound = 1e-4 if dtype == torch.float32 else 0.1
            assert (logits - expected).norm() < bound * expected.norm()


def test_misuse_is_refused():
    model, cache = make(DENSE), KeyValueCache(DENSE.num_hidden_layers)
    with pytest.raises(ValueError, match="pass neither"):
        model(IDS, position_ids=torch.zeros_like(IDS), cache=cache)
    model(IDS[:, :5], cache=cache)
    with pytest.raises(ValueError, match="holds 4 rows"):
        model(IDS[:2], cache=cache)
    with pytest.raises(ValueError, match="expected a length up to"):
        cache.truncate([6, 5, 5, 5])
