"""Files of other programs: launch files of Accelerate, configurations of transformers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzed
from support.launching import ROOT
from support.mutating import damaged_bytes, damaged_json, dumped

from llm_pretrain.__main__ import main as run_command
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import check_accelerate_settings

HUGGINGFACE = {
    "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


def command_or_refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that warns, succeeds, or says what is wrong in lines of its own."""
    capsys.readouterr()
    code = run_command(arguments)
    error = capsys.readouterr().err
    assert code in (0, 1, 2, 65, 74), error
    assert "Traceback" not in error
    assert bool(error) == (code > 1)


@pytest.mark.fuzz
def test_a_foreign_config_json_is_read_or_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    @given(content=damaged_json(HUGGINGFACE).map(dumped) | damaged_bytes(dumped(HUGGINGFACE)))
    @fuzzed(12)
    def check(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        (tmp_path / "ours.yaml").unlink(missing_ok=True)
        command_or_refusal(["configs", "--from_pretrained", str(tmp_path), "--output", "ours.yaml"], capsys)

    check()


@pytest.mark.fuzz
def test_a_launch_file_of_accelerate_is_looked_through_or_refused(tmp_path, capsys):
    trees = [read_yaml(file.read_text()) for file in ACCELERATE]
    config = str(ROOT / "configs" / "tiny-dense.yaml")
    contents = st.sampled_from(trees).flatmap(damaged_json).map(dumped)
    contents |= st.sampled_from([file.read_bytes() for file in ACCELERATE]).flatmap(damaged_bytes)

    @given(content=contents)
    @fuzzed(8)
    def check(content: bytes) -> None:
        (tmp_path / "theirs.yaml").write_bytes(content)
        command_or_refusal(
            ["doctor", "--config", config, "--accelerate_config", str(tmp_path / "theirs.yaml")], capsys
        )

    check()


VARIABLES = [
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_USE_FSDP"),
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_CPU", "FSDP_OFFLOAD_PARAMS"),
    *("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING"),
]


@pytest.mark.fuzz
def test_what_accelerate_hands_over_agrees_or_is_refused(monkeypatch):
    texts = st.sampled_from(["", "no", "1", "true", "TRUE", "bf16", "auto", "3", "nan", "x y", "é", "1e400"])

    @given(variables=st.dictionaries(st.sampled_from(VARIABLES), texts, max_size=5))
    @fuzzed(100)
    def check(variables: dict[str, str]) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        problems: tuple[str, ...] = ()
        try:
            check_accelerate_settings(Config(), 8)
        except ConfigError as error:
            problems = error.problems
        assert not [line for line in problems if "\n" in line]

    check()


def test_the_file_that_is_damaged_is_sound(tmp_path, monkeypatch, capsys):
    """Otherwise everything would be refused for one reason."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUGGINGFACE))
    code = run_command(["configs", "--from_pretrained", str(tmp_path), "--output", "ours.yaml"])
    assert code == 0, capsys.readouterr()
