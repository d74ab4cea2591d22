"""Traps of half-precision weights: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from safetensors.torch import load_file, save_file
from support.faults import Patch, replace_everywhere
from support.launching import ROOT

import llm_pretrain.checkpoints.weights as checkpoints
import llm_pretrain.export.huggingface as export
from llm_pretrain.checkpoints.state import raw_module
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import CheckpointConfig
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import CheckpointError
from llm_pretrain.export import huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHAPE = ModelConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 7e4), ("bf16", 3.4e38)])
def test_an_overflow_is_refused(dtype, value):
    def check() -> None:
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
            export.to_huggingface({"model.norm.weight": torch.tensor([1.0, value])}, SHAPE, DTYPES[dtype])

    check()
    with Patch.context() as patch:
        patch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            check()


def test_small_values_survive_the_default_precision():
    def check(chosen: str) -> None:
        dtype = DTYPES[chosen]
        written = export.to_huggingface({"model.norm.weight": torch.tensor([1e-8])}, SHAPE, dtype)
        assert written["model.norm.weight"].item() == pytest.approx(1e-8, rel=0.01)

    check(CheckpointConfig().weights_dtype)
    with pytest.raises(AssertionError):
        check("fp16")


@pytest.mark.parametrize("value", [torch.tensor([2**20 + 1]), torch.tensor([1 + 2j])], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_what_is_no_real_number_stays(value):
    def check() -> None:
        written = export.to_huggingface({"counter": value}, SHAPE, torch.bfloat16)["counter"]
        assert torch.equal(written.to(value.dtype), value)

    check()
    with Patch.context() as patch:
        patch.setattr(torch.Tensor, "is_floating_point", lambda tensor: True)
        with pytest.raises(AssertionError):
            check()


def saved_weights(
    folder: Path, store_folder: Path, model: torch.nn.Module, shape: ModelConfig = SHAPE
) -> Path:
    store = TokenStore(store_folder)
    return checkpoints.save_weights(
        folder,
        1,
        model,  # type: ignore[arg-type]  # also as DDP or torch.compile hand it out
        shape,
        dtype="bf16",
        tokenizer_folder=store.tokenizer_folder,
        token_ids={"eos_token_id": store.eos_token_id},
        keep_last=2,
        sequence_length=8,
    )


def decoder() -> Decoder:
    model = Decoder(SHAPE)
    initialize_weights(model, 0)
    return model


def test_a_tied_head_is_written_once(tmp_path, store_folder):
    def check(folder: Path, shape: ModelConfig = SHAPE) -> None:
        tensors = load_file(saved_weights(folder, store_folder, decoder(), shape) / "model.safetensors")
        embeddings = [name for name, tensor in tensors.items() if tensor.shape[0] == SHAPE.vocab_size]
        assert embeddings == ["model.embed_tokens.weight"]

    check(tmp_path / "ours")
    with pytest.raises(AssertionError):
        check(tmp_path / "trap", replace(SHAPE, tie_word_embeddings=False))
    state = decoder().state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(state, tmp_path / "raw")


class Compiled(torch.nn.Module):
    """Names a model's parameters as `torch.compile` does, without its seconds of import."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._orig_mod = model


class DataParallel(torch.nn.Module):
    """Names a model's parameters as `DistributedDataParallel` does, without a process group."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


def check_opens_again(folder: Path, store_folder: Path) -> None:
    """What was written from a wrapped compiled model opens with the same tensors, or not at all."""
    model = decoder()
    path = saved_weights(folder, store_folder, DataParallel(Compiled(model)))
    again = export.load_pretrained(path).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(
        torch.equal(again[name], tensor.bfloat16().float()) for name, tensor in model.state_dict().items()
    )


def test_a_compiled_model_is_saved_by_its_plain_names(tmp_path, store_folder):
    check_opens_again(tmp_path / "ours", store_folder)
    with Patch.context() as patch:
        replace_everywhere(patch, raw_module, lambda model: model.module)  # still inside `Compiled`
        with pytest.raises(CheckpointError, match="_orig_mod"):
            check_opens_again(tmp_path / "strict", store_folder)
        patch.setattr(huggingface, "_check_tensors", lambda *_: None)
        patch.setattr(huggingface.TensorFiles, "check_size", lambda *_: None)
        load = torch.nn.Module.load_state_dict
        patch.setattr(
            torch.nn.Module, "load_state_dict", lambda self, state, **_: load(self, state, strict=False)
        )
        with pytest.raises(AssertionError):
            check_opens_again(tmp_path / "lenient", store_folder)


def check_torch_floor(project: str) -> None:
    """No version of torch below 2.10 satisfies the project's requirement."""
    lines = re.findall(r'^\s*"(torch\b[^"]*)"', project, re.MULTILINE)
    assert len(lines) == 1
    allowed = Requirement(lines[0]).specifier
    assert not any(Version(f"2.{minor}.9") in allowed for minor in range(10))
    assert Version("2.11.0") in allowed


def test_old_versions_of_torch_are_not_installable():
    check_torch_floor((ROOT / "pyproject.toml").read_text())
    with pytest.raises(AssertionError):
        check_torch_floor('"torch>=2.4"')
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(pinned[1]) >= Version("2.10")
