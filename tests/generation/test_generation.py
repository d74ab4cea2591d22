"""A key-value cache changes no logits; what `generate` yields depends on model, prompt, seed and settings."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import generation
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.generation import KeyValueCache, generate
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


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (DENSE, [150]),
        (DENSE, [90] + [1] * 60),
        (MOE, [60, 30, 1, 1, 58]),
        (LLAMA, [60, 30, 1, 1, 58]),
    ],
    ids=["whole", "steps", "moe", "llama"],
)
def test_logits_with_a_cache_are_those_without(config, parts):
    model = make(config)
    with torch.inference_mode():
        torch.testing.assert_close(cached_logits(model, parts), model(IDS).logits, atol=1e-5, rtol=0)


def test_attention_may_leave_its_result_in_any_layout(monkeypatch):
    """As a GPU's memory-efficient kernel does, which a mask needs: positions before heads."""
    attention = functional.scaled_dot_product_attention

    def positions_first(*arguments, **options):
        return attention(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    model, parts = make(DENSE), [40, *(1,) * 110]
    with torch.inference_mode():
        expected = cached_logits(model, parts)
        monkeypatch.setattr(functional, "scaled_dot_product_attention", positions_first)
        assert cached_logits(model, parts).equal(expected)


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


SMALL = dataclasses.replace(
    DENSE,
    **{"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": None},
    **{"max_position_embeddings": 48, "initializer_range": 0.3},
)
SMALL_MOE = dataclasses.replace(SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SMALL_SHAPES = pytest.mark.parametrize("config", [SMALL, SMALL_MOE], ids=["dense", "moe"])
STARTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [40, 41]]
VOCAB = 60


def texts(model: Decoder, prompts: list[list[int]], **options) -> list[list[int]]:
    settings = {"vocab_size": VOCAB, "max_new_tokens": 20, "temperature": 1.0} | options
    columns = list(generate(model, prompts, **settings))
    rows = [[column[k] for column in columns] for k in range(len(prompts))]
    for row in rows:
        assert None not in row[: len(row) - row.count(None)], "nothing follows an end"
    return [[token for token in row if token is not None] for row in rows]


def recomputed(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, each token from a whole forward pass."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :VOCAB].argmax()))
    return ids[len(prompt) :]


@SMALL_SHAPES
def test_greedy_text_is_that_of_whole_forward_passes(config):
    model = make(config)
    expected = [recomputed(model, prompt, 20) for prompt in STARTS]
    assert len({tuple(text) for text in expected}) == len(STARTS)
    assert texts(model, STARTS, temperature=0) == expected


@SMALL_SHAPES
def test_a_text_does_not_depend_on_its_company(config):
    model = make(config)
    options = {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "seed": 5, "stop_ids": [3, 17, 20]}
    together = texts(model, STARTS, **options)
    assert len({len(text) for text in together}) > 1, "they end at different places"
    assert together == [texts(model, [prompt], **options)[0] for prompt in STARTS]
    assert texts(model, STARTS[::-1], **options) == together[::-1]


def test_seeds_decide_and_the_global_state_is_left_alone():
    model = make(SMALL)
    state = torch.random.get_rng_state()
    first = texts(model, STARTS, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first == texts(model, STARTS, seed=1) != texts(model, STARTS, seed=2)
    assert texts(model, [[1, 2]] * 2, seed=[1, 2]) == [texts(model, [[1, 2]], seed=n)[0] for n in (1, 2)]


def test_frequencies_are_the_models_probabilities():
    """One token after one prompt, 4000 seeds: counts within four standard deviations, at each setting."""
    model = make(SMALL)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1, :VOCAB].double().detach()
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 1.0), (2.0, 20, 0.6)):
        probs = (logits / temperature).softmax(0)
        order = probs.argsort(descending=True)
        keep = order[: top_k or VOCAB]
        share = probs[keep] / probs[keep].sum()
        size = int((share.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else len(keep)
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        expected[keep[:size]] = share[:size] / share[:size].sum()
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": 1}
        drawn = texts(model, [[1, 2, 3]] * 4000, seed=range(4000), **options)
        counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=VOCAB)
        assert int((counts > 0).sum()) <= size
        spread = (4000 * expected * (1 - expected)).sqrt()
        assert bool(((counts - 4000 * expected).abs() <= 4 * spread + 3).all())


def test_no_token_waits_for_a_plan_of_cudnn(monkeypatch):
    attention, seen = functional.scaled_dot_product_attention, set()

    def watched(*arguments, **options):
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    for _ in generate(make(SMALL), STARTS, vocab_size=VOCAB, max_new_tokens=3, temperature=1.0):
        assert torch.backends.cuda.cudnn_sdp_enabled(), "the caller's own"
    assert seen == {False}


def test_a_tiny_temperature_is_greedy():
    model = make(SMALL)
    assert texts(model, STARTS, temperature=1e-300) == texts(model, STARTS, temperature=0)


def test_a_stop_id_is_the_last_that_is_yielded():
    model = make(SMALL)
    greedy = texts(model, [STARTS[0]], temperature=0)[0]
    stop = greedy[4]
    assert texts(model, [STARTS[0]], temperature=0, stop_ids={stop})[0] == greedy[: greedy.index(stop) + 1]


def test_a_text_ends_where_the_positions_end():
    model = make(SMALL)
    whole = texts(model, [STARTS[0], [5] * 47, [5] * 40], max_new_tokens=1000)
    assert [len(text) for text in whole] == [45, 1, 8]


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    model = make(SMALL)
    whole = texts(model, STARTS, temperature=0)
    monkeypatch.setattr(generation, "_PREFILL_LOGITS", 3 * 4 * 64)
    assert texts(model, STARTS, temperature=0) == whole


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"prompt 2: expected 1 to 47 tokens, .*max_position_embeddings.*, found 0"),
        ([[1] * 48], {}, "prompt 1: expected 1 to 47 tokens.*, found 48"),
        ([[1]], {"temperature": float("nan")}, "temperature: expected 0 or more, found nan"),
        ([[1]], {"top_k": -1}, "top_k: expected 0 or more"),
        ([[1]], {"top_p": 0.0}, "top_p: expected a number above 0 and up to 1, found 0.0"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens: expected 0 or more"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(prompts, options, message):
    settings = {"vocab_size": VOCAB, "max_new_tokens": 3, "temperature": 0.0} | options
    with pytest.raises(ConfigError, match=message):
        generate(make(SMALL), prompts, **settings)
