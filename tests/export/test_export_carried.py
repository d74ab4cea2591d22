"""A field of the model that a target has no word for is refused by name, and one that is off is not."""

from dataclasses import dataclass, replace

import pytest

from llm_pretrain.checkpoints.manifest import fingerprint_differences, model_fingerprint
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.export.config_json import CARRIED, check_carried, huggingface_config

IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}


@dataclass(frozen=True)
class WiderConfig(ModelConfig):
    """As the configuration would be with one more field, which no export knows."""

    sliding_window: int | None = None


def wider(window: int | None) -> WiderConfig:
    return WiderConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, sliding_window=window)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_a_field_that_is_off_changes_no_export(qk_norm: bool, num_experts: int):
    changes = {"qk_norm": qk_norm, "num_experts": num_experts}
    plain = ModelConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, **changes)
    expected = huggingface_config(plain, dtype="bf16", **IDS)
    assert huggingface_config(replace(wider(None), **changes), dtype="bf16", **IDS) == expected


@pytest.mark.parametrize("num_experts", [0, 4])
def test_a_field_that_is_on_is_refused_by_name(num_experts: int):
    model = replace(wider(8), num_experts=num_experts)
    with pytest.raises(ConfigError, match=r"model\.sliding_window: .* expected None, found 8"):
        huggingface_config(model, dtype="bf16", **IDS)
    with pytest.raises(ConfigError, match=r"model\.sliding_window: GGUF cannot express it"):
        check_carried(model, "GGUF")


def test_every_field_of_today_is_declared():
    """A new one is not, until somebody has decided how it is exported."""
    assert set(vars(ModelConfig())) == CARRIED


@pytest.mark.parametrize(("name", "other"), [("n_shared_experts", "2"), ("hidden_act", "relu2")])
def test_a_checkpoint_without_a_field_has_its_neutral_value(name: str, other: str):
    expected = model_fingerprint(ModelConfig(vocab_size=64))
    earlier = {key: text for key, text in expected.items() if key != f"model.{name}"}
    assert earlier != expected
    assert fingerprint_differences(earlier, expected) == []
    assert fingerprint_differences(expected, earlier) == []
    changed = expected | {f"model.{name}": other}
    for saved, wanted in ((earlier, changed), (changed, earlier)):
        (line,) = fingerprint_differences(saved, wanted)
        assert line.startswith(f"model.{name} is ")


def test_a_missing_key_of_something_else_is_a_difference():
    (line,) = fingerprint_differences({}, {"data.tokenizer": "1"})
    assert line == "data.tokenizer is absent in the checkpoint, 1 here"
