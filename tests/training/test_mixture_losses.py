"""Losses per source: each is the mean over its own tokens, and together they are the whole loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.corpora import make_config, make_store
from support.launching import Finished, run_options, train

from llm_pretrain.__main__ import main
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import evaluation_batches, global_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.collectives import OneRank
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.training.evaluation import Evaluator
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.recorder import source_metrics
from llm_pretrain.training.step import StepSums, source_sums

LABELS = ("plain", "ragged")


def options(stores: dict[str, Path], folder: Path, *more: str) -> list[str]:
    """Steps of 128 short sequences: eight of them are a block of the mixture."""
    sources = ", ".join(f"{{store: {path}, name: {name}}}" for name, path in stores.items())
    return run_options(
        "tiny-dense",
        next(iter(stores.values())),
        "model.hidden_size=32 training.sequence_length=16 training.global_batch_size=128 "
        "training.micro_batch_size=128 training.max_steps=12 schedule.warmup_steps=2 "
        "evaluation.eval_steps=12 checkpoint.save_steps=0",
        *("--data.sources", f"[{sources}]"),
        *more,
        folder=folder,
    )


@pytest.fixture(scope="module")
def stores(plain_store: Path, masked_store: Path) -> dict[str, Path]:
    return dict(zip(LABELS, (plain_store, masked_store), strict=True))


@pytest.fixture(scope="module")
def run(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Both sources, then from step 8 on only the second."""
    folder = tmp_path_factory.mktemp("mixture") / "run"
    change = ("--data.weight_changes", "[{step: 5, weights: [0, 1]}]")
    assert train(*options(stores, folder, *change)) == 0
    return Finished(0, "", folder)


def test_the_model_card_gives_the_shares_that_were_drawn(run: Finished):
    """1024 samples of both, then 512 of the second alone."""
    card = (run.folder / "weights" / "step-00000012" / "README.md").read_text()
    assert "| plain | 33.3% |" in card
    assert "| ragged | 66.7% |" in card


def per_source(row: dict, name: str) -> list:
    return [row[f"train/source/{label}/{name}"] for label in LABELS]


def test_the_weighted_sum_of_the_sources_losses_is_the_whole_loss(run: Finished):
    for step in range(1, 9):
        row = run.rows[step]
        losses, tokens = per_source(row, "loss"), per_source(row, "loss_tokens")
        assert sum(tokens) == row["train/loss_tokens"]
        assert min(tokens) > 0
        total = sum(loss * count for loss, count in zip(losses, tokens, strict=True))
        assert math.isclose(total / sum(tokens), row["train/loss"], rel_tol=1e-6)
        assert losses[0] != losses[1]


def test_a_source_that_is_left_out_has_no_loss(run: Finished):
    for step in range(9, 13):
        row = run.rows[step]
        assert per_source(row, "loss_tokens") == [0, row["train/loss_tokens"]]
        none, loss = per_source(row, "loss")
        assert none is None
        assert math.isclose(loss, row["train/loss"], rel_tol=1e-6)


def test_changes_ahead_may_be_changed_on_a_resume_those_drawn_with_may_not(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Steps 0 to 7 draw from the first block, so a change at step 5 begins with step 8."""
    folder = tmp_path / "run"

    def go_on(max_steps: int, changes: str) -> int:
        quick = ("--evaluation.eval_steps", "0", "--schedule.name", "constant")
        return train(
            *options(stores, folder, *quick, "--data.weight_changes", changes),
            *("--training.max_steps", str(max_steps)),
        )

    assert go_on(6, "[{step: 5, weights: [0, 1]}]") == 0
    capsys.readouterr()
    assert go_on(10, "[{step: 7, weights: [1, 0]}]") == 0
    assert "changed since the attempt before: data.weight_changes" in capsys.readouterr().err
    rows = Finished(0, "", folder).rows
    assert [min(per_source(rows[step], "loss_tokens")) > 0 for step in range(1, 11)] == [True] * 8 + [
        False
    ] * 2
    assert go_on(12, "[{step: 9, weights: [1, 0]}]") == 78
    error = capsys.readouterr().err
    assert "data.weight_changes from sample 1024 is [1.0, 0.0] in the checkpoint" in error


def small(*stores: Path) -> tuple[Config, Decoder]:
    """A configuration over stores that are called s0, s1, and an untrained model."""
    config = make_config(*map(TokenStore, stores), micro_batch_size=8, sequence_length=32)
    sources = [replace(source, name=f"s{k}") for k, source in enumerate(config.data.sources)]
    model = replace(
        config.model,
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    decoder = Decoder(model)
    initialize_weights(decoder, 0)
    return replace(config, model=model, data=replace(config.data, sources=sources)), decoder


def test_the_sums_of_a_source_are_those_of_its_sequences(stores: dict[str, Path]):
    """Against sums that are made one sequence at a time, each as a batch of its own."""
    config, decoder = small(*stores.values())
    (batch, *_) = global_batches(config, start_step=0)
    output = decoder(**batch.model_inputs())
    found = source_sums(output, batch, 2)
    assert batch.sources is not None
    assert 0 < int(batch.sources.sum()) < len(batch.sources)
    for source in range(2):
        rows = (batch.sources == source).nonzero()[:, 0].tolist()
        by_row = {name: value for name, value in batch.model_inputs().items() if name != "document_offsets"}
        inputs = [{name: value[row : row + 1] for name, value in by_row.items()} for row in rows]
        loss = sum(decoder(**each).loss_sum.item() for each in inputs)
        assert math.isclose(float(found[0, source]), loss, rel_tol=1e-6)
        assert int(found[1, source]) == sum(int(each["loss_mask"].sum()) for each in inputs)


def test_a_loss_that_is_not_finite_stays_its_source_s_own(stores: dict[str, Path]):
    config, decoder = small(*stores.values())
    (batch, *_) = global_batches(config, start_step=0)
    output: DecoderOutput = decoder(**batch.model_inputs())
    assert output.token_losses is not None
    assert batch.sources is not None
    losses = output.token_losses.clone()
    losses[batch.sources == 1] = math.nan
    sums = StepSums(config, torch.device("cpu"))
    sums.add(output._replace(token_losses=losses), batch)
    metrics = source_metrics(sums, config)
    losses_of = [float(str(metrics[f"train/source/{label}/loss"])) for label in ("s0", "s1")]
    assert [math.isfinite(loss) for loss in losses_of] == [True, False]


def evaluator_of(model: Decoder, config: Config, store: TokenStore, labels: list[str]) -> Evaluator:
    """An evaluation by one process."""

    def forward(batch: Batch) -> DecoderOutput:
        return model(**batch.model_inputs())

    batches = evaluation_batches(config)
    return Evaluator(OneRank(), Place(), forward, batches, store, lambda: False, labels)


def evaluated(config: Config, decoder: Decoder) -> dict[str, float | None]:
    labels = [source.label for source in config.data.sources]
    store = TokenStore(Path(config.data.sources[0].store))
    evaluator = evaluator_of(decoder, config, store, labels)
    metrics = evaluator(decoder)
    assert metrics is not None
    return metrics


def test_evaluation_of_a_source_is_that_of_its_store_alone(plain_store: Path, changed_store: Path):
    config, decoder = small(plain_store, changed_store)
    metrics = evaluated(config, decoder)
    for name, store in (("s0", plain_store), ("s1", changed_store)):
        alone = evaluated(small(store)[0], decoder)
        for key in ("loss", "bits_per_byte"):
            value, expected = metrics[f"eval/source/{name}/{key}"], alone[f"eval/{key}"]
            assert value is not None
            assert expected is not None
            assert math.isclose(value, expected, rel_tol=1e-6)
    assert metrics["eval/source/s0/loss"] != metrics["eval/source/s1/loss"]
    without = {key: value for key, value in metrics.items() if "source" not in key}
    unnamed = evaluator_of(decoder, config, TokenStore(plain_store), [])
    assert unnamed(decoder) == without, "the whole is what it is without its parts, to the last bit"


def test_a_source_that_evaluation_does_not_see_is_named(plain_store: Path, tmp_path: Path):
    only_train = make_store(tmp_path / "bare", documents=5, validation_fraction=0.0).path
    config, decoder = small(plain_store, only_train)
    (line,) = evaluator_of(decoder, config, TokenStore(plain_store), ["s0", "s1"]).unseen_sources()
    assert "source s1" in line
    assert "--validation_fraction" in line
    metrics = evaluated(config, decoder)
    assert metrics["eval/source/s1/loss"] is None
    assert metrics["eval/source/s1/bits_per_byte"] is None


def test_a_source_of_weight_0_is_evaluated_and_can_decide_which_weights_are_the_best(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
):
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    plain, ragged = stores["plain"], stores["ragged"]
    assert train(*options({"plain": plain}, alone)) == 0
    sources = f"[{{store: {plain}, name: plain}}, {{store: {ragged}, name: watched, weight: 0}}]"
    settings = ("--data.sources", sources, "--checkpoint.best_metric", "eval/source/watched/loss")
    assert train(*options({"plain": plain}, watched, *settings)) == 0
    shown = capsys.readouterr()
    rows = [Finished(0, "", folder).rows for folder in (alone, watched)]
    names = ("train/loss", "train/grad_norm", "train/loss_tokens")
    trained = [
        [[row[name] for name in names] for row in each.values() if "train/loss" in row] for each in rows
    ]
    assert trained[0] == trained[1]
    assert rows[1][12]["train/source/watched/loss_tokens"] == 0
    loss = rows[1][12]["eval/source/watched/loss"]
    best = json.loads((watched / "weights/best/best.json").read_text())
    assert best == {"step": 12, "eval/source/watched/loss": loss}
    assert f"watched {loss:.4f}" in shown.out
    assert main(["verify", str(watched)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        ("--checkpoint.best_metric", "eval/source/plain/loss"),
        ("--checkpoint.best_metric", "train/loss"),
    ],
)
def test_what_no_evaluation_gives_is_refused(stores: dict[str, Path], tmp_path: Path, settings, capsys):
    assert train(*options({"plain": stores["plain"]}, tmp_path, *settings)) == 2
    assert f"{settings[0][2:]}: expected" in capsys.readouterr().err
