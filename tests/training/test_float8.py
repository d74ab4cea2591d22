"""FP8 products: which matrices have them, that names and types stay, one line where they cannot be had."""

from __future__ import annotations

import pytest
import torch

from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training import model_setup
from llm_pretrain.training.model_setup import initialize_weights

MODEL = ModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=48, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
    initializer_range=0.1,
)  # fmt: skip
ON = {"training": {"float8": True, "precision": "bf16"}}


def built(emulated: bool) -> Decoder:
    model = Decoder(MODEL)
    if emulated:
        model_setup.use_float8(model, emulate=True)
    initialize_weights(model, 0)
    return model


def test_the_layers_matrices_multiply_in_float8_and_nothing_is_renamed():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    ids = torch.randint(48, (2, 16))
    plain, low = built(False), built(True)
    left, right = plain.state_dict(), low.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(tensor.dtype == torch.float32 for tensor in right.values())
    kinds = {name: type(module).__name__ for name, module in low.named_modules()}
    converted = {name for name, kind in kinds.items() if kind == "Float8Linear"}
    assert {name.rpartition(".")[2] for name in converted} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert len(converted) == 2 * 7, "attention and the shared experts of two layers; no head, no router"
    losses = []
    for model in (plain, low):
        out = model(ids, labels=ids)
        assert out.loss_sum is not None
        out.loss_sum.backward()
        losses.append(out.loss_sum.item())
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())  # type: ignore[union-attr]  # looked at above
    assert losses[0] != losses[1], "something is rounded"
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    build_optimizer(low, Config().optimizer).step()


def test_it_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch):
    config = from_dict(ON)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^training.float8: expected false on a CPU"):
        model_setup.check_float8(config)
    model_setup.check_float8(from_dict({}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0, found true, which needs 8\.9"):
        model_setup.check_float8(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(model_setup, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="expected the package torchao, found none"):
        model_setup.check_float8(config)
    monkeypatch.setattr(model_setup, "find_spec", lambda name: name)
    model_setup.check_float8(config)


def test_a_matrix_of_an_odd_size_is_named():
    odd = ModelConfig(hidden_size=40, num_attention_heads=2, num_key_value_heads=1, vocab_size=48)
    with pytest.raises(ConfigError, match=r"16, found layers.0.self_attn.q_proj with \(40, 40\)"):
        model_setup.use_float8(Decoder(odd), emulate=True)


def test_contradictions():
    for changes, found in (
        ({"training": {"float8": True, "precision": "fp32"}}, "training.precision fp32"),
        (ON | {"distributed": {"strategy": "deepspeed"}}, "distributed.strategy deepspeed"),
        ({"training": ON["training"] | {"sequence_length": 33, "micro_batch_size": 8}}, "found 264"),
    ):
        (line,) = validate(from_dict(changes), needs_data=False)
        assert line.startswith("training.float8: ")
        assert found in line
    assert validate(from_dict(ON), needs_data=False) == []


@pytest.mark.gpu
def test_it_trains_on_a_gpu():
    """A layer's products really run, forward and backward, under autocast."""
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < model_setup.FP8_MIN_CAPABILITY:
        pytest.skip("no FP8 on this GPU")
    model = Decoder(MODEL)
    model_setup.use_float8(model)
    initialize_weights(model, 0)
    model.cuda()
    ids = torch.randint(48, (2, 16), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = model(ids, labels=ids)
    assert out.loss_sum is not None
    out.loss_sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
