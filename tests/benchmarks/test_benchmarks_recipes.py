"""The comparisons of recipes compare what they say: same data, same shape, a peer as published."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import char_recipe, time_to_loss
from benchmarks.training_runs import preset_config
from llm_pretrain.config import Config
from llm_pretrain.data import TokenStore
from llm_pretrain.ladder import budget, family, planning
from llm_pretrain.tracking import read_metrics


@pytest.mark.parametrize(
    ("first", "best", "expected"),
    [((1.0, 2.0, 4.0), 2.0, [1.0, 2.0, 4.0]), ((1.0, 2.0, 4.0), 8.0, [1.0, 2.0, 4.0, 8.0, 16.0]),
     ((1.0, 2.0, 4.0), 0.5, [0.25, 0.5, 1.0, 2.0, 4.0])],
)  # fmt: skip
def test_the_grid_grows_until_the_best_rate_has_worse_neighbours(
    first: tuple[float, ...], best: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
):
    tried = set()

    def loss(self: time_to_loss.Runs, rate: float, decay: str, seed: int = 0) -> float:
        tried.add(rate)
        return abs(rate / best - 1) + (rate > best)

    monkeypatch.setattr(time_to_loss.Runs, "adamw", loss)
    runs = time_to_loss.Runs(Path("store"), 10, 0.6, "fp32")
    assert runs.best_rate("linear", first) == best
    assert sorted(tried) == expected


def test_both_sides_differ_in_nothing_but_the_recipe(plain_store: Path, tmp_path: Path):
    """Same shape, same batches, same objective; AdamW's side has nothing that is the recipe's."""

    def loaded(options: list[str]) -> Config:
        return preset_config(time_to_loss.PRESET, plain_store, tmp_path, options)

    recipe, adamw = loaded([]), loaded(time_to_loss.adamw_options(2e-3, "cosine"))
    assert recipe.optimizer.name == "muon"
    assert adamw.optimizer.name == "adamw"
    assert adamw.optimizer.learning_rate == 2e-3
    assert not adamw.optimizer.ema_decay
    assert not adamw.model.zero_init_residual
    assert (adamw.schedule.name, adamw.schedule.min_learning_rate) == ("cosine", 0.0)
    assert dataclasses.replace(recipe.model, zero_init_residual=False) == adamw.model
    assert recipe.training == adamw.training
    assert recipe.data == adamw.data


@pytest.fixture(scope="module")
def text_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    text = "".join(f"line {number}: naïve, {number * number}\n" for number in range(400))
    return text, char_recipe.prepare_text(text, tmp_path_factory.mktemp("text"))


def test_the_last_tenth_of_a_text_is_what_is_evaluated(text_store: tuple[str, Path]):
    text, folder = text_store
    store = TokenStore(folder)
    decoded = {}
    for name in ("train", "validation"):
        split = store.split(name)
        assert split.documents == 1
        decoded[name] = store.tokenizer().decode(split.document(0)[0].tolist())
    cut = len(decoded["train"])
    assert decoded["train"] + decoded["validation"] == text
    assert cut == round(0.9 * len(text))


def test_the_peer_has_a_row_for_each_character_and_no_more():
    tokens = [torch.tensor([7, 300, 7]), torch.tensor([[41, -100], [300, 41]])]
    own_ids, vocab_size = char_recipe.own_vocabulary(tokens)
    assert vocab_size == 3
    assert own_ids[torch.tensor([7, 41, 300])].tolist() == [0, 1, 2]


def test_the_peers_rate_is_nanogpts():
    assert char_recipe.peer_learning_rate(99, 2000) == pytest.approx(1e-3 * 100 / 101)
    assert char_recipe.peer_learning_rate(100, 2000) == 1e-3
    assert char_recipe.peer_learning_rate(1050, 2000) == pytest.approx(5.5e-4)
    assert char_recipe.peer_learning_rate(2000, 2000) == pytest.approx(1e-4)


def test_the_peer_learns_without_biases(text_store: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    """Four layers of 128: 12 · 128² a layer, positions, norms; what stands as a bias stays zero."""
    made = []
    build = char_recipe._gpt2
    monkeypatch.setattr(char_recipe, "_gpt2", lambda size: made.append((build(size), size)) or made[-1][0])
    untrained = char_recipe.train_peer(text_store[1], 0, 0).final_loss
    trained = char_recipe.train_peer(text_store[1], 12, 0).final_loss
    model, vocab_size = made[-1]
    learned = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert learned == 4 * (12 * 128**2 + 2 * 128) + 128 + (64 + vocab_size) * 128
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    assert trained < untrained - 0.1


@pytest.mark.slow
def test_a_ladders_prediction_is_held_against_a_run_of_each_seed(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in (("MIN_TOKENS", 1), ("MIN_STEPS", 10), ("MAX_EPOCHS", 1000.0)):
        monkeypatch.setattr(budget, name, value)
    monkeypatch.setattr(planning, "MAX_EPOCHS", 1000.0)
    monkeypatch.setattr(family, "MIN_HEADS", 1)
    base = tmp_path / "base.yaml"
    base.write_text(
        "model: {hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 8}\n"
        "training: {sequence_length: 32, micro_batch_size: 8, global_batch_size: 8, precision: fp32}\n"
    )
    words = ["ladder", "--store", str(plain_store), "--budget", "4e9", "--times", "2", "--seeds", "2"]
    words += ["--folder", str(tmp_path / "kept"), "--", "--config", str(base)]
    for attempt in range(2):
        assert program.main(words) == 0
        output = capsys.readouterr().out
        folders = [tmp_path / "kept" / f"seed-{seed}" for seed in range(2)]
        losses = [read_metrics(folder / "metrics.jsonl")[-1]["eval/loss"] for folder in folders]
        assert losses[0] != losses[1]
        assert f": {losses[0]:.4f}, {losses[1]:.4f}; " in output
        assert re.search(r"runs inside the interval: [012] of 2", output)
        assert ("continuing" in output) == (attempt > 0)
        attempts = [(folder / "attempts.jsonl").read_text().splitlines() for folder in folders]
        assert list(map(len, attempts)) == [1, 1], "a finished run is not started again"
