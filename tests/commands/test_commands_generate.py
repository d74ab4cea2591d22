"""`llm-pretrain generate` and `chat`: what they print follows from the model, the prompts and the options."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support.corpora import make_tokenizer
from support.launching import ROOT, train_tiny

from llm_pretrain.__main__ import main
from llm_pretrain.commands import generate
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.chat import chat_prompt_ids
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.export.config_json import huggingface_config
from llm_pretrain.export.huggingface import end_of_turn_id, load_pretrained, to_huggingface
from llm_pretrain.model import generation
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def weights(folder: Path, vocab_size: int, positions: int, bos: int | None, eos: int | None) -> Path:
    config = ModelConfig(
        **{"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": positions},
        initializer_range=0.3,
    )
    model = Decoder(config)
    initialize_weights(model, 0)
    if eos == 1:  # never the likeliest: no early end
        model.model.embed_tokens.weight.data[1] = 0
    save_file(to_huggingface(model.state_dict(), config, torch.float32), folder / "model.safetensors")
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(huggingface_config(config, **ids, dtype="fp32")))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Letters are tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return weights(tmp_path, 64, 64, 0, 1)


def run(capsys, *argv: str) -> str:
    assert main(["generate", *argv]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def recomputed(folder, prompt: str, count: int) -> str:
    """The likeliest continuation, by whole forward passes."""
    model = load_pretrained(folder).eval()
    ids = [0, *(LETTERS.index(letter) + 2 for letter in prompt)]
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, : len(LETTERS) + 2].argmax()))
    return "".join(LETTERS[token - 2] for token in ids[1:])


def test_prints_the_prompt_and_the_likeliest_continuation(folder, capsys):
    text = run(capsys, str(folder), "--prompt", "hello", "--max_new_tokens", "30", "--temperature", "0")
    assert text == recomputed(folder, "hello", 30)


def test_a_text_ends_with_the_models_positions_and_says_so(folder, capsys):
    argv = [str(folder), "--prompt", "hello", "--max_new_tokens", "500", "--temperature", "0"]
    assert main(["generate", *argv]) == 0
    out, err = capsys.readouterr()
    assert out == recomputed(folder, "hello", 64 - 6) + "\n"
    assert err == "note: ended at the model's 64 positions (max_position_embeddings)\n"


def test_a_tokenizer_that_is_not_the_models_is_said(folder, capsys):
    other = folder / "other"
    other.mkdir()
    text = (folder / "tokenizer.json").read_text()
    argv = [str(folder), "--prompt", "hello", "--max_new_tokens", "1", "--tokenizer", str(other)]
    for changed, warning in (
        (text, ""),
        (text.replace('"a"', '"A"'), f"warning: {other} is not the tokenizer beside the model, {folder}\n"),
    ):
        (other / "tokenizer.json").write_text(changed)
        assert main(["generate", *argv]) == 0
        assert capsys.readouterr().err == warning


def test_the_seed_decides(folder, capsys):
    options = (str(folder), "--prompt", "a", "--temperature", "3", "--top_k", "0", "--max_new_tokens", "12")
    first, again = run(capsys, *options, "--seed", "1"), run(capsys, *options, "--seed", "1")
    assert first == again != run(capsys, *options, "--seed", "2")


def test_top_1_and_a_tiny_top_p_are_the_likeliest(folder, capsys):
    options = (str(folder), "--prompt", "ab", "--max_new_tokens", "8")
    greedy = run(capsys, *options, "--temperature", "0")
    assert greedy == run(capsys, *options, "--top_k", "1") == run(capsys, *options, "--top_p", "0.0001")


def test_streaming_changes_no_character(folder, capsys, monkeypatch):
    options = (str(folder), "--prompt", "ab", "--max_new_tokens", "8")
    whole = run(capsys, *options, "--no_stream")
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    run(capsys, *options)
    assert written[0] == "ab"
    assert len(written) == 1 + 8 + 1
    assert "".join(written) == whole + "\n"


def test_each_text_of_a_batch_is_what_it_is_alone(folder, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("from a file\n")
    options = ("--max_new_tokens", "10", "--temperature", "2", "--num_samples", "2", "--seed", "3")
    prompts = ("--prompt", "abc", "--prompt", "", "--prompt_file", str(tmp_path / "prompt.txt"))
    lines = run(capsys, str(folder), *prompts, *options).split("\n")
    assert lines[::2] == [f"--- prompt {p}, sample {s} ---" for p in (1, 2, 3) for s in (1, 2)]
    alone = [
        run(capsys, str(folder), "--prompt", prompt, *options[:4], "--seed", seed)
        for prompt in ("abc", "", "from a file")
        for seed in ("3", "4")
    ]
    assert lines[1::2] == alone


def test_an_end_token_ends_it(folder, capsys):
    first = LETTERS.index(run(capsys, str(folder), "--prompt", "a", "--temperature", "0")[1]) + 2
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": first}))
    assert run(capsys, str(folder), "--prompt", "a", "--temperature", "0") == "a"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, first]}))
    assert run(capsys, str(folder), "--prompt", "a", "--temperature", "0") == "a"


def test_a_run_a_checkpoint_and_weights_can_be_named(trained_run, capsys):
    folder = trained_run.folder
    options = ("--prompt", "one two", "--temperature", "0", "--max_new_tokens", "12")
    texts = {
        name: run(capsys, str(folder / name), *options)
        for name in ("", "checkpoints", "checkpoints/step-00000004", "weights", "weights/step-00000002")
    }
    assert texts[""] == texts["checkpoints"] == texts["checkpoints/step-00000004"]
    assert all(text.startswith("one two") for text in texts.values())
    assert run(capsys, str(folder), *options, "--dtype", "bf16").startswith("one two")


def test_what_the_model_lacks_is_named(folder, trained_run, capsys):
    def refused(code: int, *argv: str) -> str:
        assert main(["generate", str(folder), *argv]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        return err

    assert "prompt 1: expected 1 to 63 tokens" in refused(2, "--prompt", "a" * 63)
    other = trained_run.folder / "weights" / "step-00000004"
    assert "another model's tokenizer" in refused(74, "--prompt", "a", "--tokenizer", str(other))
    file = folder / "config.json"
    config = file.read_text()
    file.write_text(json.dumps(json.loads(config) | {"bos_token_id": None, "eos_token_id": None}))
    assert "no start token" in refused(2, "--prompt", "")
    file.write_text(config)
    (folder / "tokenizer.json").rename(folder / "moved.json")
    assert "tokenizer.json: expected the tokenizer beside the weights" in refused(74, "--prompt", "a")
    (folder / "moved.json").rename(folder / "tokenizer.json")
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(100)
    assert "model.safetensors: expected a safetensors file" in refused(74, "--prompt", "a")


def test_texts_are_drawn_as_they_are_printed_not_listed_before(folder, monkeypatch):
    printed = []

    def stop_after_two(text: str) -> None:
        printed.append(text)
        if len(printed) == 2:
            raise BrokenPipeError

    monkeypatch.setattr(generate, "write_out", stop_after_two)
    many = [str(folder), "--prompt", "a", "--num_samples", str(10**12), "--max_new_tokens", "1"]
    assert main(["generate", *many]) == 141
    assert len(printed) == 2


def test_a_terminal_without_the_characters_gets_question_marks(trained_run, capsys, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    options = ("--max_new_tokens", "3", "--temperature", "0")
    assert main(["generate", str(trained_run.folder), "--prompt", "über", *options]) == 0
    assert terminal.buffer.getvalue().startswith(b"?ber")


@pytest.mark.slow
@pytest.mark.parametrize("source", [".", "weights"])
def test_generation_imports_no_compiler(source, plain_store, tmp_path):
    """Each of these takes one to two CPU seconds, of four in all."""
    train_tiny(plain_store, tmp_path / "run", "--training.max_steps", "1", "--schedule.warmup_steps", "0")
    arguments = ["generate", str(tmp_path / "run" / source), "--prompt", "a"]
    slow = {"torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"}
    code = (
        f"import sys\nfrom llm_pretrain.__main__ import main\nassert main({arguments}) == 0\n"
        f"print('found', *({slow} & set(sys.modules)))\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert printed.stdout.splitlines()[-1].split() == [b"found"]


# --- chat --------------------------------------------------------------------------------------


def with_weights(folder: Path, *, positions: int = 512) -> Path:
    """A model beside the tokenizer that is in `folder`."""
    tokenizer = open_tokenizer(folder)
    return weights(folder, 384, positions, tokenizer.bos_token_id, tokenizer.eos_token_id)


@pytest.fixture
def with_template(tmp_path) -> Path:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox and so on and on\n" * 40)
    train_tokenizer([str(corpus)], tmp_path / "tokenizer", 320)
    return with_weights(tmp_path / "tokenizer")


@pytest.fixture
def base(tmp_path) -> Path:
    return with_weights(make_tokenizer(tmp_path / "base"))


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
    folder = with_weights(make_tokenizer(tmp_path / "short"), positions=48)
    _, err = talk(folder, *OPTIONS, lines=["a" * 20, "b" * 20, "c" * 60, "d" * 5])
    tokenizer = open_tokenizer(folder)
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert texts[:2] == ["a" * 20, "b" * 20]
    assert "the oldest 2 turns are forgotten: the model has 48 positions" in err
    assert "too long: 61 tokens" in err
    assert texts[2].endswith("d" * 5)
    assert all(len(ids) <= 48 - 8 for ids in prompts)


def test_an_interrupt_stops_the_answer_alone(base, talk, monkeypatch):
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
