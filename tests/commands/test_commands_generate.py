"""`llm-pretrain generate`: what it prints is a function of weights, prompt and options."""

import argparse
import json

import pytest
import torch
from safetensors.torch import save_file

from llm_pretrain.commands import generate
from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export import huggingface_config, to_huggingface
from llm_pretrain.model import Decoder, initialize_weights

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    initializer_range=0.3,
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = Decoder(CONFIG)
    initialize_weights(model, 0)
    model.model.embed_tokens.weight.data[1] = 0  # never the likeliest: no early end
    save_file(to_huggingface(model.state_dict(), CONFIG, torch.float32), tmp_path / "model.safetensors")
    config = huggingface_config(CONFIG, bos_token_id=0, eos_token_id=1, pad_token_id=None, dtype="fp32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(capsys, *argv: str) -> str:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert generate.run(parser.parse_args(argv)) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_prints_the_prompt_and_so_many_tokens_of_the_tokenizer(folder, capsys):
    text = run(capsys, str(folder), "--prompt", "hello", "--max_new_tokens", "30", "--temperature", "0")
    assert text.startswith("hello")
    assert len(text) == 35  # beyond max_position_embeddings; ids past the tokenizer's never drawn
    assert set(text) <= set(LETTERS)


def test_the_seed_decides(folder, capsys):
    options = (str(folder), "--prompt", "a", "--temperature", "3", "--top_k", "0", "--max_new_tokens", "12")
    first, again = run(capsys, *options, "--seed", "1"), run(capsys, *options, "--seed", "1")
    assert first == again != run(capsys, *options, "--seed", "2")


def test_top_1_is_the_likeliest(folder, capsys):
    greedy = run(capsys, str(folder), "--prompt", "ab", "--temperature", "0", "--max_new_tokens", "8")
    assert greedy == run(capsys, str(folder), "--prompt", "ab", "--top_k", "1", "--max_new_tokens", "8")


def test_an_end_token_ends_it(folder, capsys):
    model = generate_model(folder)
    first = next(
        generate.sample(model, [0, 2], vocab_size=29, max_new_tokens=1, temperature=0, top_k=0, seed=0)
    )
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": first}
    (folder / "config.json").write_text(json.dumps(config))
    assert run(capsys, str(folder), "--prompt", "a", "--temperature", "0") == "a"


def generate_model(folder) -> Decoder:
    from llm_pretrain.export import load_pretrained

    return load_pretrained(folder).eval()


def test_wrong_input_is_named(folder, tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json"):
        run(capsys, str(tmp_path / "nowhere"), "--prompt", "a")
    with pytest.raises(ConfigError, match="--top_k"):
        run(capsys, str(folder), "--prompt", "a", "--top_k", "-1")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        run(capsys, str(folder), "--prompt", "a")


def test_help_ends_in_examples():
    parser = argparse.ArgumentParser(prog="llm-pretrain generate")
    generate.add_arguments(parser)
    assert parser.format_help().rstrip().splitlines()[-1].startswith("  llm-pretrain generate")


def test_a_folder_without_weights_is_told_what_is_expected(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"config\.json: .*name a folder such as RUN/weights/step-"):
            run(capsys, str(folder), "--prompt", "a")
