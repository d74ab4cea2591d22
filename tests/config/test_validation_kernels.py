"""Kernels that other fields of a configuration, or the machine, leave no room for."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.loading import validate
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.training.model_setup import build_model


def config(attention_dropout: float = 0.0, **training) -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        training=dataclasses.replace(base.training, **{"precision": "bf16"} | training),
        model=dataclasses.replace(base.model, attention_dropout=attention_dropout, vocab_size=64),
    )


def lines_about(name: str, found: Config) -> list[str]:
    return [line for line in validate(found, needs_data=False) if line.startswith(name)]


@pytest.mark.parametrize(
    ("value", "others", "words"),
    [
        ("varlen", {"precision": "fp32"}, "training.precision fp32"),
        ("varlen", {"attention_dropout": 0.1}, "model.attention_dropout 0.1"),
        ("flex", {"attention_dropout": 0.1}, "model.attention_dropout 0.1"),
    ],
)
def test_a_kernel_that_other_fields_exclude_is_refused_by_name(value, others, words):
    field = "training.attention_implementation"
    (line,) = lines_about(field, config(attention_implementation=value, **others))
    assert words in line
    assert f"found {value}" in line
    assert lines_about(field, config(**others)) == []
    assert lines_about(field, config(attention_implementation=value)) == []


@pytest.mark.parametrize("value", ["varlen", "flex"])
def test_a_kernel_for_cuda_is_refused_on_a_cpu(value):
    asked = config(attention_implementation=value)
    with pytest.raises(
        ConfigError, match=rf"^training\.attention_implementation: .* found {value}, which needs CUDA$"
    ):
        build_model(asked, torch.device("cpu"))
