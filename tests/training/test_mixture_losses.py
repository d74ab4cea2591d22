"""Losses per source: each is the mean over its own tokens, and together they are the whole loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.corpora import make_config, make_store
from support.launching import ROOT, Finished, train

from llm_pretrain.config.tree import Config, EvaluationConfig
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import evaluation_batches, global_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.collectives import OneRank
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.training.evaluation import Evaluator
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.recorder import source_metrics
from llm_pretrain.training.step import Step, StepSums, source_sums

TINY = str(ROOT / "configs" / "tiny-dense.yaml")
LABELS = ("plain", "ragged")


def options(stores: dict[str, Path], folder: Path, *more: str) -> list[str]:
    """Steps of 128 short sequences: eight of them are a block of the mixture."""
    sources = ", ".join(f"{{store: {path}, name: {name}}}" for name, path in stores.items())
    return [
        *("--config", TINY, "--data.sources", f"[{sources}]", "--run.output_dir", str(folder)),
        *("--training.sequence_length", "32", "--training.global_batch_size", "128"),
        *("--training.micro_batch_size", "128", "--training.max_steps", "18", "--schedule.warmup_steps", "2"),
        *(
            "--evaluation.eval_steps",
            "18",
            "--checkpoint.save_steps",
            "0",
            "--training.precision",
            "fp32",
            "--distributed.cpu_threads",
            "1",
        ),
        *more,
    ]


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
    """1024 samples of both, then 1280 of the second alone."""
    card = (run.folder / "weights" / "step-00000018" / "README.md").read_text()
    assert "| plain | 22.2% |" in card
    assert "| ragged | 77.8% |" in card


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
    for step in range(9, 19):
        row = run.rows[step]
        assert per_source(row, "loss_tokens") == [0, row["train/loss_tokens"]]
        none, loss = per_source(row, "loss")
        assert none is None
        assert math.isclose(loss, row["train/loss"], rel_tol=1e-6)


def test_one_source_has_no_metrics_of_its_own(stores: dict[str, Path], tmp_path: Path):
    alone = {"plain": stores["plain"]}
    assert (
        train(*options(alone, tmp_path / "run", "--training.max_steps", "2", "--data.weight_changes", "[]"))
        == 0
    )
    rows = Finished(0, "", tmp_path / "run").rows.values()
    assert not [key for row in rows for key in row if "source" in key]


def test_logging_less_often_gives_the_step_s_own_values(
    run: Finished, stores: dict[str, Path], tmp_path: Path
):
    every = ("--logging.logging_steps", "3", "--training.max_steps", "6", "--evaluation.eval_steps", "0")
    assert train(*options(stores, tmp_path / "run", *every, "--schedule.decay_steps", "16")) == 0
    rows = Finished(0, "", tmp_path / "run").rows
    assert sorted(rows) == [3, 6]
    for step, row in rows.items():
        assert per_source(row, "loss") == per_source(run.rows[step], "loss")
        assert per_source(row, "loss_tokens") == per_source(run.rows[step], "loss_tokens")


def test_a_step_without_loss_tokens_has_none(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin = Step.begin
    monkeypatch.setattr(
        Step,
        "begin",
        lambda batches, *others: begin([replace(each, num_loss_tokens=0) for each in batches], *others),
    )
    assert train(*options(stores, tmp_path / "run", "--training.max_steps", "2")) == 0
    row = Finished(0, "", tmp_path / "run").rows[1]
    assert row["train/skipped"] == "no_loss_tokens"
    assert per_source(row, "loss") == [None, None]
    assert per_source(row, "loss_tokens") == [0, 0]


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
    for changes in ("[{step: 5, weights: [0, 1]}]", "[]", "[{step: 9, weights: [1, 0]}]"):
        assert go_on(12, changes) == 78
        error = capsys.readouterr().err
        assert "data.weight_changes from sample 1024 is [1.0, 0.0] in the checkpoint" in error
    assert go_on(18, "[{step: 8, weights: [1, 0]}, {step: 16, weights: [0, 1]}]") == 0
    rows = Finished(0, "", folder).rows
    assert [per_source(rows[step], "loss_tokens")[0] for step in (17, 18)] == [0, 0]


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


def check_sums(config: Config, decoder: Decoder, sums_of: Callable[..., torch.Tensor] = source_sums) -> None:
    """Against sums that are made one sequence at a time, each as a batch of its own."""
    (batch, *_) = global_batches(config, start_step=0)
    output = decoder(**batch.model_inputs())
    found = sums_of(output, batch, 2)
    assert batch.sources is not None
    assert 0 < int(batch.sources.sum()) < len(batch.sources)
    for source in range(2):
        rows = (batch.sources == source).nonzero()[:, 0].tolist()
        by_row = {name: value for name, value in batch.model_inputs().items() if name != "document_offsets"}
        inputs = [{name: value[row : row + 1] for name, value in by_row.items()} for row in rows]
        loss = sum(decoder(**each).loss_sum.item() for each in inputs)
        assert math.isclose(float(found[0, source]), loss, rel_tol=1e-6)
        assert int(found[1, source]) == sum(int(each["loss_mask"].sum()) for each in inputs)


def test_the_sums_of_a_source_are_those_of_its_sequences(stores: dict[str, Path]):
    check_sums(*small(*stores.values()))


WRONG_SUMS: dict[str, Callable[[DecoderOutput, Batch, int], torch.Tensor]] = {
    "of the other source": lambda output, batch, count: source_sums(output, batch, count).flip(1),
    "of masked tokens too": lambda output, batch, count: source_sums(
        output, replace(batch, loss_mask=torch.ones_like(batch.loss_mask)), count
    ),
    "in another order": lambda output, batch, count: source_sums(
        output, replace(batch, sources=sources_of(batch).sort().values), count
    ),
}


def sources_of(batch: Batch) -> torch.Tensor:
    assert batch.sources is not None
    return batch.sources


@pytest.mark.parametrize("name", WRONG_SUMS)
def test_the_check_above_would_notice(stores: dict[str, Path], name: str):
    config, decoder = small(*stores.values())
    with pytest.raises(AssertionError):
        check_sums(config, decoder, WRONG_SUMS[name])


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


def warnings_of(config: Config) -> list[str]:
    store = TokenStore(Path(config.data.sources[0].store))
    labels = [source.label for source in config.data.sources]
    model = Decoder(small(store.path)[0].model)
    return evaluator_of(model, config, store, labels).unseen_sources()


def test_a_source_that_evaluation_does_not_see_is_named(
    plain_store: Path, changed_store: Path, tmp_path: Path
):
    only_train = make_store(tmp_path / "bare", documents=5, validation_fraction=0.0).path
    assert warnings_of(small(plain_store)[0]) == []
    both = small(plain_store, changed_store)[0]
    assert warnings_of(both) == []
    few = replace(both, evaluation=EvaluationConfig(max_batches=1))
    few = replace(few, training=replace(few.training, micro_batch_size=1, global_batch_size=1))
    (line,) = warnings_of(few)
    assert "evaluation.max_batches" in line
    (line,) = warnings_of(small(plain_store, only_train)[0])
    assert "source s1" in line
    assert "--validation_fraction" in line
    metrics = evaluated(*small(plain_store, only_train))
    assert metrics["eval/source/s1/loss"] is None
    assert metrics["eval/source/s1/bits_per_byte"] is None
