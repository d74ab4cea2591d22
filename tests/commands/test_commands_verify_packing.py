"""`verify --packing`: documents of one sequence are alone, and one that sees another is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.corpora import make_store
from support.mutation import Edit, mutated

from llm_pretrain.__main__ import main
from llm_pretrain.commands._verification.isolation import FLOAT64_BOUND, QUANTITIES

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
    code, outcomes = verify(store, capsys, *configs["moe"], "--precision", precision)
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


GATHERING, LAYOUT = "llm_pretrain/data/gathering.py", "llm_pretrain/model/document_layout.py"
ROUTER, EXPERTS = "llm_pretrain/model/router.py", "llm_pretrain/model/experts_streamed.py"

LEAKS = {
    "attention crosses documents": (
        "dense",
        Edit(
            LAYOUT,
            'if document_ids.device.type == "cpu":',
            "if True:\n        return DocumentLayout()\n    if False:",
        ),
        {*QUANTITIES, "gradient into it"},
    ),
    "attention crosses documents in experts": (
        "moe",
        Edit(
            LAYOUT,
            'if document_ids.device.type == "cpu":',
            "if True:\n        return DocumentLayout()\n    if False:",
        ),
        {*QUANTITIES, "gradient into it"},
    ),
    "two documents are taken for one": (
        "dense",
        Edit(
            GATHERING,
            "rest = self._length - sum(sizes)",
            "begin[:2], sizes[:2] = begin[:1], [sum(sizes[:2])]\n            rest = self._length - sum(sizes)",
        ),
        {*QUANTITIES, "gradient into it"},
    ),
    "the router looks at the sequence's mean": (
        "moe",
        Edit(
            ROUTER,
            "log_scores = F.logsigmoid",
            "logits = logits + logits.mean(1, keepdim=True)\n            log_scores = F.logsigmoid",
        ),
        {*QUANTITIES, "gradient into it"},
    ),
    "the experts' kernel adds a token's neighbour": (
        "moe",
        Edit(
            EXPERTS,
            "x_low = x.to(dtype)\n        weight_P",
            "x_low = (x + 1e-3 * x.roll(1, 0)).to(dtype)\n        weight_P",
        ),
        {"logits", "token losses", "parameter gradients", "input gradients"},
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_document_that_sees_another_is_noticed(
    leak: str,
    store: Path,
    configs: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
):
    kind, edit, expected = LEAKS[leak]
    with mutated(edit):
        code, outcomes = verify(store, capsys, *configs[kind], "--sequences", "1")
    assert code == 74
    assert failed(outcomes) == expected
    assert any("see each other" in line for check in outcomes.values() for line in check["problems"])


def test_a_change_that_changes_nothing_is_no_check(
    store: Path, configs: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    edit = Edit("llm_pretrain/commands/_verification/isolation.py", " + shift) %", " + 0 * shift) %")
    with mutated(edit):
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
