"""What evaluations bring with them: the best weights, and samples; neither changes the run itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.corpora import make_store
from support.finished_runs import FinishedRun
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train

from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.model import generation
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.evaluation import Evaluator
from llm_pretrain.training.saving import CheckpointManager

LOSSES = {0: 1.0, 2: 5.0, 4: 4.0, 6: 3.0, 8: 3.0}
"""Evaluation losses by step. Step 0 has the lowest, and does not count; of equal ones the earlier counts."""


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-dense",
        store,
        "model.hidden_size=32 training.sequence_length=32 training.global_batch_size=8 "
        "training.micro_batch_size=8 training.max_steps=8 schedule.warmup_steps=2 evaluation.eval_steps=2 "
        "evaluation.max_batches=1 checkpoint.save_steps=3",
        *more,
        folder=folder,
    )


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What evaluations find instead, by step."""
    planned: dict[int, float] = dict(LOSSES)
    keep_best = CheckpointManager.keep_best
    monkeypatch.setattr(
        CheckpointManager,
        "keep_best",
        lambda self, progress, loss: keep_best(self, progress, planned[progress.step]),
    )
    return planned


def best(folder: Path) -> dict:
    return json.loads((folder / "weights" / "best" / "best.json").read_text())


def test_the_lowest_loss_after_a_step_is_kept(plain_store: Path, tmp_path: Path, losses: dict[int, float]):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "--checkpoint.keep_last", "9")) == 0
    assert best(folder) == {"step": 6, "eval/loss": 3.0}
    best_weights, same = (
        folder / "weights" / name / "model.safetensors" for name in ("best", "step-00000006")
    )
    assert best_weights.read_bytes() == same.read_bytes()
    assert not same.with_name("best.json").exists()


def test_its_loss_is_that_of_the_row(finished_run: Callable[[str], FinishedRun]):
    run = finished_run("dense")
    rows = {step: row for step, row in run.rows.items() if step and "eval/loss" in row}
    step = min(rows, key=lambda each: rows[each]["eval/loss"])
    assert best(run.folder) == {"step": step, "eval/loss": rows[step]["eval/loss"]}


def test_a_loss_that_is_no_number_is_never_the_best(
    plain_store: Path, tmp_path: Path, losses: dict[int, float]
):
    losses |= {2: float("-inf"), 4: float("nan"), 6: 4.0, 8: float("inf")}
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder)) == 0
    assert best(folder) == {"step": 6, "eval/loss": 4.0}


@pytest.mark.parametrize("more", [("--evaluation.eval_steps", "0"), ("--checkpoint.keep_best", "false")])
def test_without_evaluation_or_on_request_there_is_none(plain_store: Path, tmp_path: Path, more: tuple):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, *more)) == 0
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["step-00000006", "step-00000008"]


def test_a_best_that_is_gone_or_over_other_batches_is_found_anew(
    plain_store: Path, tmp_path: Path, losses: dict[int, float]
):
    constant = ("--schedule.name", "constant")
    gone, other = tmp_path / "gone", tmp_path / "other"
    assert train(*options(plain_store, gone, *constant, "--training.max_steps", "6")) == 0
    assert best(gone)["step"] == 6
    shutil.copytree(gone, other)
    shutil.rmtree(gone / "weights" / "best")
    for folder, more in ((gone, ()), (other, ("--evaluation.max_batches", "2"))):
        assert train(*options(plain_store, folder, *constant, *more)) == 0
        assert best(folder) == {"step": 8, "eval/loss": 3.0}


@pytest.mark.parametrize("eval_steps", [1, 0])
def test_validation_documents_that_a_source_trains_on_are_named(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], eval_steps: int
):
    all_trained = make_store(tmp_path / "all", validation_fraction=0.0).path  # the documents of plain_store
    sources = json.dumps([{"store": str(store)} for store in (plain_store, all_trained)])
    settings = f"--data.sources|{sources}|--training.max_steps|2|--evaluation.eval_steps|{eval_steps}"
    assert train(*options(plain_store, tmp_path / "run", *settings.split("|"))) == 0
    line = f"are trained on in all; prepare {all_trained} again with --exclude {plain_store}"
    assert (line in capsys.readouterr().err) == (eval_steps > 0)


def test_a_path_to_resume_from_that_is_not_used_is_said(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second = tmp_path / "first", tmp_path / "second"
    quick = ("--evaluation.eval_steps", "0", "--training.max_steps", "4", "--schedule.name", "constant")
    assert train(*options(plain_store, first, *quick)) == 0
    begun = ("--checkpoint.resume", str(first / "checkpoints" / "step-00000003"))
    capsys.readouterr()
    assert train(*options(plain_store, second, *quick, *begun)) == 0
    assert "checkpoint.resume" not in capsys.readouterr().out
    assert train(*options(plain_store, second, *quick, *begun)) == 0
    said = capsys.readouterr().out
    assert f"checkpoint.resume: {first / 'checkpoints' / 'step-00000003'} is not used" in said
    shutil.rmtree(first)  # or the other run has gone on, and keeps its last two only
    assert train(*options(plain_store, second, *quick, *begun)) == 0
    assert train(*options(plain_store, tmp_path / "third", *quick, *begun)) == 2


def predicted(*entries: tuple[int, float, float, float]) -> tuple[str, str]:
    """The option of a prediction of these steps, losses and intervals."""
    names = ("step", "loss", "low", "high")
    return "--evaluation.prediction", json.dumps([dict(zip(names, each, strict=True)) for each in entries])


def test_a_run_is_held_against_its_prediction(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every leaving of the interval is said once; nothing before the first step of the prediction, or after
    its last."""
    found = iter([9.0, 9.0, 5.0, 4.9, 3.5, 9.0, 2.0, 9.0, 9.0])
    monkeypatch.setattr(Evaluator, "__call__", lambda self, model, show: {"eval/loss": next(found)})
    curve, folder = predicted((2, 4.0, 3.5, 4.5), (6, 3.0, 2.5, 3.5)), tmp_path / "run"
    assert train(*options(plain_store, folder, *curve, "--evaluation.eval_steps", "1")) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "predicted" in line] == [
        "warning: step 2: evaluation loss 5.0000 is above the predicted 3.5000 to 4.5000",
        "warning: step 5: evaluation loss 9.0000 is above the predicted 2.7500 to 3.7500",
        "warning: step 6: evaluation loss 2.0000 is below the predicted 2.5000 to 3.5000",
    ]
    keys = [f"eval/predicted_{name}" for name in ("loss", "low", "high")]
    rows = Finished(0, "", folder).rows
    assert {step: [row[key] for key in keys] for step, row in rows.items() if {*keys} & {*row}} == {
        2: [4.0, 3.5, 4.5], 3: [3.75, 3.25, 4.25], 4: [3.5, 3.0, 4.0],
        5: [3.25, 2.75, 3.75], 6: [3.0, 2.5, 3.5],
    }  # fmt: skip


PROMPTS = ["one two", "", "über 你好"]
SAMPLED = ("--evaluation.sample_prompts", json.dumps(PROMPTS), "--evaluation.sample_tokens", "5")
CONTINUATION = " and über"


@pytest.fixture
def calls(plain_store: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Stands where sampling is: notes how it is called, and continues every prompt with one text."""
    noted: list[dict] = []
    (ids,) = open_tokenizer(TokenStore(plain_store).tokenizer_folder).encode([CONTINUATION])

    def continue_each(model: Decoder, prompts: list[list[int]], **settings: object) -> Iterator[list]:
        noted.append({"training": model.training, "prompts": prompts, **settings})
        assert not torch.is_grad_enabled()
        for token in [*ids, None]:
            yield [token] * len(prompts)

    monkeypatch.setattr(generation, "generate", continue_each, raising=False)
    return noted


def sample_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_every_prompt_is_continued_at_every_evaluation(
    plain_store: Path, tmp_path: Path, calls: list[dict], capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    more = ("--run.seed", "3", "--training.max_steps", "2")
    assert train(*options(plain_store, folder, *SAMPLED, *more)) == 0
    steps = (0, 2)
    expected = [
        {"step": step, "prompt": prompt, "text": CONTINUATION} for step in steps for prompt in PROMPTS
    ]
    assert sample_rows(folder) == expected
    assert capsys.readouterr().out.count(f"sample: 'one two' -> {CONTINUATION!r}") == len(steps)
    tokenizer = open_tokenizer(TokenStore(plain_store).tokenizer_folder)
    prompts = [[tokenizer.bos_token_id, *ids] for ids in tokenizer.encode(PROMPTS)]
    settings = {"vocab_size": tokenizer.vocab_size, "max_new_tokens": 5, "temperature": 0.8, "top_k": 50}
    settings["top_p"] = 1.0
    settings |= {"seed": 3, "stop_ids": (tokenizer.eos_token_id,)}
    assert calls == [{"training": False, "prompts": prompts, **settings}] * len(steps)


def test_samples_change_nothing_in_the_run(plain_store: Path, tmp_path: Path, calls: list[dict]):
    """With dropout, which a model that is left in eval mode would not have."""
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    quick = ("--model.hidden_dropout", "0.1", "--checkpoint.save_steps", "0", "--training.max_steps", "4")
    assert train(*options(plain_store, plain, *quick)) == 0
    assert train(*options(plain_store, sampled, *quick, *SAMPLED)) == 0
    assert not (plain / "samples.jsonl").exists()
    assert Finished(0, "", sampled).exact_rows() == Finished(0, "", plain).exact_rows()
    assert_same_tensors(checkpoint_tensors(sampled, 4), checkpoint_tensors(plain, 4))


def test_samples_that_cannot_be_written_are_a_warning(
    plain_store: Path, tmp_path: Path, calls: list[dict], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run" / "samples.jsonl").mkdir(parents=True)
    assert train(*options(plain_store, tmp_path / "run", *SAMPLED, "--training.max_steps", "2")) == 0
    assert "samples.jsonl: cannot be written" in capsys.readouterr().err
