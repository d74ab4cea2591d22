"""Text of generated ids: whole characters, nothing lost, and a beginning that may end within a token."""

from pathlib import Path

import pytest
import torch
from support.corpora import make_tokenizer

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.generation import TextStream, generate, generate_texts, heal
from llm_pretrain.training.model_setup import initialize_weights

TEXT = "naïve 你好 😀👩‍👩‍👧 e\u0301  two spaces\n\ttab \x00 \ufffd </s> ▁"


@pytest.fixture(scope="module", params=["plain bytes", "sentencepiece-bpe", "bytelevel-bpe", "char"])
def tokenizer(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "folder"
    if request.param == "plain bytes":
        make_tokenizer(folder)
    else:
        corpus = folder.with_name("corpus.txt")
        corpus.write_text("the quick brown fox and so on and on\n" * 40)
        size = {"char": None, "bytelevel-bpe": 270}.get(request.param, 320)
        train_tokenizer([str(corpus)], folder, size, type=request.param)
    return open_tokenizer(folder)


def test_text_comes_whole_and_only_in_whole_characters(tokenizer):
    expected = TEXT if tokenizer.decode(tokenizer.encode([TEXT])[0]) == TEXT else TEXT.replace("▁", " ")
    ids = tokenizer.encode([TEXT])[0]
    assert len(ids) > len(TEXT), "characters take several ids"
    stream = TextStream(tokenizer.token_pieces())
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == expected
    assert "" in parts
    assert sum("\ufffd" in part for part in parts) == 1, "the text's own, and no half character"


def test_broken_bytes_spoil_only_themselves(tokenizer):
    """A lone continuation byte after a whole character: decoding all ids anew would spoil that one too."""
    pieces = tokenizer.token_pieces()
    ids = [pieces.index(bytes([byte])) for byte in "好".encode() + b"\x80" + b"\xe5" + b"a"]
    stream = TextStream(pieces)
    parts = [stream.push(token) for token in ids]
    assert parts[:3] == ["", "", "好"]
    assert "".join(parts) + stream.finish() == "好\ufffd\ufffda"
    half = TextStream(pieces)
    assert half.push(pieces.index(b"\xe5")) == ""
    assert half.finish() == "\ufffd"
    assert half.finish() == ""


def test_special_ids_stand_for_no_text(tokenizer):
    stream = TextStream(tokenizer.token_pieces())
    assert stream.push(tokenizer.eos_token_id) == ""


BEGINNINGS = ["the quick bro", "the ", "fox a", " ", "the quick brown fox and so", "so 你", "the"]


def model_and_prompts(tokenizer: Tokenizer) -> tuple[Decoder, list[list[int]]]:
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 5, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    model = Decoder(config)
    initialize_weights(model, 0)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    assert start is not None
    return model.eval(), [[start, *ids] for ids in tokenizer.encode(BEGINNINGS)]


def covers(model: Decoder, prompt: list[int], pieces: list[bytes]) -> dict[tuple[int, ...], float]:
    """Log-probability, by a whole forward pass, of each beginning of `prompt` and a token for the rest."""
    found = {}
    with torch.inference_mode():
        log_probs = model(torch.tensor([prompt])).logits[0, :, : len(pieces)].double().log_softmax(-1)
    before = 0.0
    for place in range(1, len(prompt)):
        rest = b"".join(pieces[token] for token in prompt[place:])
        for token, piece in enumerate(pieces):
            if [token] == prompt[place:] or (piece.startswith(rest) and len(piece) > len(rest)):
                found[(*prompt[:place], token)] = before + log_probs[place - 1, token].item()
        before += log_probs[place - 1, prompt[place]].item()
    return found


def test_a_prompt_ends_in_the_likeliest_of_the_tokens_that_cover_its_end(tokenizer):
    (model, prompts), pieces = model_and_prompts(tokenizer), tokenizer.token_pieces()
    healed = heal(model, prompts, pieces, temperature=0)
    for prompt, (ids, _) in zip(prompts, healed, strict=True):
        scores = covers(model, prompt, pieces)
        assert scores[tuple(ids)] == pytest.approx(max(scores.values()), abs=1e-4)
    assert [heal(model, [prompt], pieces, temperature=0)[0] for prompt in prompts] == healed


def test_prompts_end_as_often_in_a_token_as_it_is_likely(tokenizer):
    (model, prompts), pieces = model_and_prompts(tokenizer), tokenizer.token_pieces()
    for prompt in prompts[:2]:
        scores = covers(model, prompt, pieces)
        count = 2000
        drawn = heal(model, [prompt] * count, pieces, temperature=1.0, seed=range(count))
        first = pieces[prompt[1]]
        share = sum(len(pieces[ids[1]]) > len(first) for ids, _ in drawn) / count
        weights = {ids: torch.tensor(score).exp().item() for ids, score in scores.items()}
        longer = sum(weight for ids, weight in weights.items() if len(pieces[ids[1]]) > len(first))
        expected = longer / sum(weights.values())
        assert share == pytest.approx(expected, abs=4 * (0.25 / count) ** 0.5)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_text_begins_with_its_prompt(tokenizer, temperature: float):
    (model, prompts), pieces = model_and_prompts(tokenizer), tokenizer.token_pieces()
    prompts = prompts * 5
    healed = heal(model, prompts, pieces, temperature=temperature, seed=range(len(prompts)))
    for prompt, (ids, added) in zip(prompts, healed, strict=True):
        assert ids[:-1] == prompt[: len(ids) - 1]
        assert b"".join(pieces[token] for token in ids) == b"".join(pieces[token] for token in prompt) + added
    assert any(added for _, added in healed) == any(len(piece) > 1 and piece.isascii() for piece in pieces)


def test_without_healing_the_tokens_of_the_prompt_stay(tokenizer):
    (model, prompts), pieces = model_and_prompts(tokenizer), tokenizer.token_pieces()
    how = {"max_new_tokens": 8, "temperature": 0}
    columns = list(generate(model, prompts, vocab_size=len(pieces), **how))
    texts = [""] * len(prompts)
    for row, text, end in generate_texts(model, prompts, pieces, token_healing=False, **how):
        texts[row] += text
        assert end in {None, "max_new_tokens"}
    for row, text in enumerate(texts):
        assert text == b"".join(pieces[column[row]] for column in columns).decode("utf-8", "replace")
