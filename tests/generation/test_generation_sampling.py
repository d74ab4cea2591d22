"""`generate`: what it yields is a function of model, prompt, seed and settings, alone or in company."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import generation
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.generation import generate
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
    initializer_range=0.3,
)
MOE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHAPES = pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [40, 41]]
VOCAB = 60


def make(config: ModelConfig) -> Decoder:
    model = Decoder(config)
    initialize_weights(model, 0)
    return model.eval()


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


@SHAPES
def test_greedy_text_is_that_of_whole_forward_passes(config):
    model = make(config)
    expected = [recomputed(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    assert texts(model, PROMPTS, temperature=0) == expected


@SHAPES
def test_a_text_does_not_depend_on_its_company(config):
    model = make(config)
    options = {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "seed": 5, "stop_ids": [3, 17, 20]}
    together = texts(model, PROMPTS, **options)
    assert len({len(text) for text in together}) > 1, "they end at different places"
    assert together == [texts(model, [prompt], **options)[0] for prompt in PROMPTS]
    assert texts(model, PROMPTS[::-1], **options) == together[::-1]


def test_seeds_decide_and_the_global_state_is_left_alone():
    model = make(DENSE)
    state = torch.random.get_rng_state()
    first = texts(model, PROMPTS, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first == texts(model, PROMPTS, seed=1) != texts(model, PROMPTS, seed=2)
    assert texts(model, [[1, 2]] * 2, seed=[1, 2]) == [texts(model, [[1, 2]], seed=n)[0] for n in (1, 2)]


def test_frequencies_are_the_models_probabilities():
    """One token after one prompt, 4000 seeds: counts within four standard deviations, at each setting."""
    model = make(DENSE)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1, :VOCAB].double().detach()
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.5), (2.0, 20, 0.6)):
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


def test_a_tiny_temperature_is_greedy():
    model = make(DENSE)
    assert texts(model, PROMPTS, temperature=1e-300) == texts(model, PROMPTS, temperature=0)


def test_a_stop_id_is_the_last_that_is_yielded():
    model = make(DENSE)
    greedy = texts(model, [PROMPTS[0]], temperature=0)[0]
    stop = greedy[4]
    assert texts(model, [PROMPTS[0]], temperature=0, stop_ids={stop})[0] == greedy[: greedy.index(stop) + 1]


def test_a_text_ends_where_the_positions_end():
    model = make(DENSE)
    whole = texts(model, [PROMPTS[0], [5] * 47, [5] * 40], max_new_tokens=1000)
    assert [len(text) for text in whole] == [45, 1, 8]


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    model = make(DENSE)
    whole = texts(model, PROMPTS, temperature=0)
    monkeypatch.setattr(generation, "_PREFILL_LOGITS", 3 * 4 * 64)
    assert texts(model, PROMPTS, temperature=0) == whole


def test_gradients_can_be_taken_between_tokens():
    """The caller's own arithmetic is not caught in the mode that generation runs in."""
    model = make(DENSE)
    for _ in generate(model, [[1]], vocab_size=VOCAB, max_new_tokens=3, temperature=0):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_nothing_to_do():
    model = make(DENSE)
    assert texts(model, [[1], [2]], max_new_tokens=0) == [[], []]
    assert list(generate(model, [], vocab_size=VOCAB, max_new_tokens=3, temperature=0)) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"prompt 2: expected 1 to 47 tokens, .*max_position_embeddings.*, found 0"),
        ([[1] * 48], {}, "prompt 1: expected 1 to 47 tokens.*, found 48"),
        ([[1]], {"temperature": -1.0}, "temperature: expected 0 or more, found -1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature: expected 0 or more, found nan"),
        ([[1]], {"top_k": -1}, "top_k: expected 0 or more"),
        ([[1]], {"top_p": 0.0}, "top_p: expected a number above 0 and up to 1, found 0.0"),
        ([[1]], {"top_p": 1.1}, "top_p: expected"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens: expected 0 or more"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(prompts, options, message):
    settings = {"vocab_size": VOCAB, "max_new_tokens": 3, "temperature": 0.0} | options
    with pytest.raises(ConfigError, match=message):
        generate(make(DENSE), prompts, **settings)
