"""`verify --packing`: packed documents do not influence each other, and every leak is detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.corpora import make_store

from llm_pretrain.__main__ import main
from llm_pretrain.commands import _verify_data
from llm_pretrain.commands._verify_data import FLOAT64_BOUND, QUANTITIES
from llm_pretrain.data import Batch
from llm_pretrain.model import Decoder

MODEL = """
model:
  {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}
"""
MOE = """
model: {num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 24, n_shared_experts: 1}
"""
DENSE_CHECKS = {*QUANTITIES, "gradient into it", "changed document"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents: several fit into a sequence of 128."""
    return make_store(tmp_path_factory.mktemp("packing") / "store", documents=60, longest=8, masked=True).path


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Options for a dense model and for a mixture of experts."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "dense.yaml").write_text(MODEL)
    (folder / "moe.yaml").write_text(MOE)
    (folder / "pad.yaml").write_text("data: {packing: pad}\n")
    (folder / "seeing.yaml").write_text("data: {isolate_documents: false}\n")
    dense = ["--config", str(folder / "dense.yaml")]
    moe = [*dense, "--config", str(folder / "moe.yaml")]
    alone = [*dense, "--config", str(folder / "pad.yaml")]
    return {
        "dense": dense,
        "moe": moe,
        "pad": alone,
        "seeing": [*dense, "--config", str(folder / "seeing.yaml")],
    }


def verify(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict]]:
    """Exit code, and the outcomes by name."""
    capsys.readouterr()
    short = ("--sequence_length", "128", "--sequences", "2", "--documents", "3", "--json")
    code = main(["verify", "--packing", str(store), *short, *options])
    return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def failed(outcomes: dict[str, dict]) -> set[str]:
    return {name.partition(":")[0] for name, check in outcomes.items() if check["result"] == "failed"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_documents_are_alone_bit_for_bit_in_a_dense_model(
    store: Path, configs: dict[str, list[str]], precision: str, capsys: pytest.CaptureFixture[str]
):
    code, outcomes = verify(store, capsys, *configs["dense"], "--precision", precision)
    assert code == 0
    assert "6 documents changed one at a time, in 2 of " in outcomes["sequences"]["looked_at"]
    assert outcomes.keys() - {"sequences"} == {f"{name}: {precision}" for name in DENSE_CHECKS}
    for name in QUANTITIES:
        assert outcomes[f"{name}: {precision}"]["looked_at"].endswith("unchanged, bit for bit")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_documents_are_alone_in_a_mixture_of_experts(
    store: Path, configs: dict[str, list[str]], precision: str, capsys: pytest.CaptureFixture[str]
):
    code, outcomes = verify(store, capsys, *configs["moe"], "--precision", precision, "--sequences", "1")
    assert code == 0
    for name in QUANTITIES:
        exact = outcomes[f"{name}: {precision}, experts by definition"]
        assert exact["looked_at"].endswith("unchanged, bit for bit")
        rounded = outcomes[f"{name}: float64, experts' kernel"]
        assert f"up to {FLOAT64_BOUND:g} is rounding" in rounded["looked_at"]


def test_the_balance_loss_is_said_to_be_left_out(store: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--sequence_length", "128", "--sequences", "1", "--documents", "1"]
    assert main(["verify", "--packing", str(store), *options]) == 0
    assert "not the balance loss, which couples" in capsys.readouterr().out


def test_documents_that_may_see_each_other_are_said_to(
    store: Path, configs: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    code, outcomes = verify(store, capsys, *configs["seeing"])
    assert code == 0
    said = outcomes["not isolated: fp32"]["looked_at"]
    assert "isolate_documents: false" in said
    assert all(name in said for name in QUANTITIES)


def attention_crosses_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward
    names = ("input_ids", "position_ids", "document_ids")

    def leaking(self, *arguments, **options):
        inputs = dict(zip(names, arguments, strict=False)) | options | {"document_offsets": None}
        return forward(self, **inputs | {"document_ids": torch.zeros_like(inputs["document_ids"])})

    monkeypatch.setattr(Decoder, "forward", leaking)


def two_documents_have_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    model_inputs = Batch.model_inputs

    def merged(self):
        inputs = model_inputs(self)
        ids = inputs["document_ids"]
        return inputs | {"document_ids": ids.clamp(min=int(ids.min()) + 1), "document_offsets": None}

    monkeypatch.setattr(Batch, "model_inputs", merged)


def change_inputs(
    monkeypatch: pytest.MonkeyPatch, module: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Change the first input of all modules of a class, except where `forward` is replaced."""

    def hook(called, inputs):
        if type(called).__name__ == module and "forward" not in vars(called):
            return (change(inputs[0]), *inputs[1:])
        return None

    call = torch.nn.Module.__call__

    def changed(self, *inputs, **named):
        return call(self, *(hook(self, inputs) or inputs), **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", changed)


LEAKS = {
    "attention crosses documents": ("dense", attention_crosses_documents),
    "attention crosses documents in experts": ("moe", attention_crosses_documents),
    "two documents have one id": ("dense", two_documents_have_one_id),
    "the router sees the mean of the sequence": (
        "moe",
        lambda patch: change_inputs(patch, "Router", lambda hidden: hidden + hidden.mean(1, keepdim=True)),
    ),
    "the experts' kernel adds the previous token": (
        "moe",
        lambda patch: change_inputs(patch, "Experts", lambda hidden: hidden + 1e-3 * hidden.roll(1, -2)),
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_document_that_sees_another_is_detected(
    leak: str,
    store: Path,
    configs: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    kind, inject = LEAKS[leak]
    inject(monkeypatch)
    code, outcomes = verify(store, capsys, *configs[kind], "--sequences", "1")
    assert code == 74
    assert failed(outcomes) == {*QUANTITIES, "gradient into it"}
    assert any("see each other" in line for check in outcomes.values() for line in check["problems"])


def test_a_change_without_effect_fails(
    store: Path,
    configs: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(_verify_data, "_changed", lambda batch, *_: batch)
    code, outcomes = verify(store, capsys, *configs["dense"])
    assert code == 74
    assert "changed document" in failed(outcomes)


def test_a_store_without_several_documents_in_a_sequence(
    store: Path, configs: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    code, outcomes = verify(store, capsys, *configs["pad"])
    assert code == 74
    assert "--sequence_length" in outcomes["sequences"]["problems"][0]
    assert main(["verify", "--packing", str(store.parent / "nothing")]) == 65
    assert "store.json" in capsys.readouterr().err
