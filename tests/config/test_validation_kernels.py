"""Kernels that other fields of a configuration, or the machine, leave no room for."""

import dataclasses

import pytest
import torch

from llm_pretrain.config import Config, tree, validate
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
    ("name", "value", "others", "words"),
    [
        ("attention", "varlen", {"precision": "fp32"}, "training.precision fp32"),
        ("attention", "varlen", {"attention_dropout": 0.1}, "model.attention_dropout 0.1"),
        ("attention", "flex", {"attention_dropout": 0.1}, "model.attention_dropout 0.1"),
        ("loss", "fused", {"precision": "fp16"}, "training.precision fp16"),
    ],
)
def test_a_kernel_that_other_fields_exclude_is_refused_by_name(name, value, others, words):
    field = f"training.{name}_implementation"
    (line,) = lines_about(field, config(**{f"{name}_implementation": value}, **others))
    assert words in line
    assert f"found {value}" in line
    assert lines_about(field, config(**others)) == []
    assert lines_about(field, config(**{f"{name}_implementation": value})) == []


def test_liger_is_refused_where_it_is_not_installed(monkeypatch):
    for spec, count in ((None, 1), (object(), 0)):
        monkeypatch.setattr(tree, "find_spec", lambda _, spec=spec: spec)
        lines = lines_about("training.loss_implementation", config(loss_implementation="liger"))
        assert len(lines) == count
    monkeypatch.undo()
    monkeypatch.setattr(tree, "find_spec", lambda _: None)
    assert "llm_pretrain[liger]" in lines_about("training.loss", config(loss_implementation="liger"))[0]


@pytest.mark.parametrize(
    ("name", "value"), [("attention", "varlen"), ("attention", "flex"), ("loss", "liger")]
)
def test_a_kernel_for_cuda_is_refused_on_a_cpu(name, value):
    asked = config(**{f"{name}_implementation": value})
    with pytest.raises(
        ConfigError, match=rf"^training\.{name}_implementation: .* found {value}, which needs CUDA$"
    ):
        build_model(asked, torch.device("cpu"))
