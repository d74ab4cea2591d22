"""`llm-pretrain chat`: turns, commands and notes, by the template or as plain text."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.corpora import make_tokenizer

from llm_pretrain.__main__ import main
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.chat import chat_prompt_ids
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.export.config_json import huggingface_config
from llm_pretrain.export.huggingface import end_of_turn_id, to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights


def weights(folder: Path, *, positions: int = 512) -> Path:
    """A small random model beside the tokenizer that is in `folder`."""
    tokenizer = open_tokenizer(folder)
    config = ModelConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    model = Decoder(config)
    initialize_weights(model, 0)
    save_file(to_huggingface(model.state_dict(), config, torch.float32), folder / "model.safetensors")
    content = huggingface_config(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="fp32",
    )
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def with_template(tmp_path) -> Path:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox and so on and on\n" * 40)
    train_tokenizer([str(corpus)], tmp_path / "tokenizer", 320)
    return weights(tmp_path / "tokenizer")


@pytest.fixture
def base(tmp_path) -> Path:
    return weights(make_tokenizer(tmp_path / "base"))


@pytest.fixture
def talk(capsys, monkeypatch):
    """Chat through a pipe: (standard output, standard error) for lines of input."""

    def run(*argv: str | Path, lines: list[str], code: int = 0) -> tuple[str, str]:
        typed = "".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="ascii"))
        assert main(["chat", *map(str, argv)]) == code
        return tuple(capsys.readouterr())

    return run


@pytest.fixture
def prompts(monkeypatch) -> list[list[int]]:
    """What the model was given, turn by turn."""
    from llm_pretrain.model import generation

    seen, real = [], generation.generate

    def watched(model, given, **settings):
        seen.extend(list(ids) for ids in given)
        return real(model, given, **settings)

    monkeypatch.setattr(generation, "generate", watched)
    return seen


OPTIONS = ("--max_new_tokens", "8", "--temperature", "0")


def test_turns_are_laid_out_by_the_template(with_template, talk, prompts):
    options = (with_template, *OPTIONS, "--system", "be brief")
    answer, _ = talk(*options, lines=["hello"])
    out, err = talk(*options, lines=["hello", "", "again <|im_end|>"])
    assert out.startswith(answer)
    assert "cut off" in err
    tokenizer = open_tokenizer(with_template)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert prompts[0] == prompts[1] == chat_prompt_ids(tokenizer, messages)
    messages += [{"role": "assistant", "content": answer.removesuffix("\n")}]
    messages += [{"role": "user", "content": "again <|im_end|>"}]
    assert prompts[2] == chat_prompt_ids(tokenizer, messages)
    assert len(prompts) == 3, "an empty line is no turn"


@pytest.mark.parametrize("name", ["<|im_end|>", "<end_of_turn>"])
def test_the_ends_of_texts_and_of_turns_end_an_answer(name, with_template, talk, monkeypatch):
    from llm_pretrain.model import generation

    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for file in names:
        text = (with_template / file).read_text("utf-8")
        (with_template / file).write_text(text.replace("<|im_end|>", name), "utf-8")
    tokenizer = open_tokenizer(with_template)
    ends = []

    def fake(model, given, *, stop_ids, **settings):
        ends.append(stop_ids)
        yield tokenizer.encode(["fox"])[0][:1]
        yield [max(stop_ids)]

    monkeypatch.setattr(generation, "generate", fake)
    out, err = talk(with_template, lines=["hello"])
    special = end_of_turn_id(with_template)
    assert ends == [{tokenizer.eos_token_id, special}]
    assert special not in (None, tokenizer.eos_token_id)
    assert out.strip()
    assert "<|" not in out
    assert err == ""


def test_a_base_model_continues_the_text(base, talk, prompts):
    out, err = talk(base, *OPTIONS, lines=["one", "two"])
    assert "no chat template" in err
    tokenizer = open_tokenizer(base)
    start = [tokenizer.bos_token_id]
    assert prompts[0] == start + tokenizer.encode(["one"])[0]
    first = tokenizer.decode(prompts[1][1:])
    assert first.startswith("one")
    assert first.endswith("two")
    assert out.startswith(first.removeprefix("one").removesuffix("two"))


def test_reset_quit_and_unknown_commands(base, talk, prompts):
    _, err = talk(base, *OPTIONS, lines=["one", "/reset", "/nonsense", "two", "/quit", "three"])
    tokenizer = open_tokenizer(base)
    assert [tokenizer.decode(ids) for ids in prompts] == ["one", "two"]
    assert "starts anew" in err
    assert "unknown command /nonsense" in err


def test_the_oldest_turns_are_dropped_where_positions_end(tmp_path, talk, prompts):
    folder = weights(make_tokenizer(tmp_path / "short"), positions=48)
    _, err = talk(folder, *OPTIONS, lines=["a" * 20, "b" * 20, "c" * 60, "d" * 5])
    tokenizer = open_tokenizer(folder)
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert texts[:2] == ["a" * 20, "b" * 20]
    assert "the oldest 2 turns are forgotten: the model has 48 positions" in err
    assert "too long: 61 tokens" in err
    assert texts[2].endswith("d" * 5)
    assert all(len(ids) <= 48 - 8 for ids in prompts)


def test_an_interrupt_stops_the_answer_alone(base, talk, monkeypatch):
    from llm_pretrain.model import generation

    calls = []

    def interrupted(model, given, **settings):
        calls.append(given)
        yield [ord("x")]
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    out, err = talk(base, *OPTIONS, lines=["one", "two"])
    assert "(stopped)" in err
    assert len(calls) == 2
    assert len(out.splitlines()) == 2


def test_the_same_seed_gives_the_same_conversation(base, talk):
    options = ("--max_new_tokens", "12", "--temperature", "1.5", "--seed")
    first = talk(base, *options, "1", lines=["one", "two"])
    assert first == talk(base, *options, "1", lines=["one", "two"])
    assert first != talk(base, *options, "2", lines=["one", "two"])


def test_bytes_that_are_no_text_are_named_by_line(with_template, talk):
    options = (with_template, "--max_new_tokens", "2")
    out, err = talk(*options, lines=["é", "\udcff", "b"], code=65)
    assert out.endswith("\n")
    assert err.endswith("error: standard input:2: expected UTF-8 text, found byte 0xff\n")
