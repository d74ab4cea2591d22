"""What evaluations bring with them: the best weights, and samples; neither changes the run itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.finished_runs import FinishedRun
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train

from llm_pretrain.__main__ import main
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.model import generation
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.evaluation import Evaluator, Samples
from llm_pretrain.training.saving import CheckpointManager

LOSSES = {0: 1.0, 2: 5.0, 4: 4.0, 6: 3.0, 8: 3.5}
"""Evaluation losses by step; step 0 has the lowest, and does not count."""


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-dense",
        store,
        "training.sequence_length=32 training.global_batch_size=8 training.micro_batch_size=8 "
        "training.max_steps=8 schedule.warmup_steps=2 evaluation.eval_steps=2 "
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


class KilledError(Exception):
    """Stands for the end of the process: nothing runs after it but what reports it."""


def kill_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when the evaluation of `step` has done all of its work."""
    keep_best = CheckpointManager.keep_best

    def killing(self: CheckpointManager, progress, loss: float) -> None:
        keep_best(self, progress, loss)
        if progress.step == step:
            raise KilledError

    monkeypatch.setattr(CheckpointManager, "keep_best", killing)


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
    gone, other, fresh = (tmp_path / name for name in ("gone", "other", "fresh"))
    for folder in (gone, other):
        assert train(*options(plain_store, folder, *constant, "--training.max_steps", "6")) == 0
        assert best(folder)["step"] == 6
    for path in [*(gone / "weights" / "best").iterdir()]:
        path.unlink()
    assert train(*options(plain_store, gone, *constant)) == 0
    assert best(gone) == {"step": 8, "eval/loss": 3.5}
    assert train(*options(plain_store, other, *constant, "--evaluation.max_batches", "2")) == 0
    assert best(other) == {"step": 8, "eval/loss": 3.5}
    begun = ("--checkpoint.resume", str(gone / "checkpoints" / "step-00000006"))
    assert train(*options(plain_store, fresh, *constant, *begun)) == 0
    assert best(fresh) == {"step": 8, "eval/loss": 3.5}


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
    shutil.rmtree(first / "checkpoints")
    assert train(*options(plain_store, first, *quick)) == 0
    named = f"starting from scratch: {first / 'checkpoints' / 'step-00000004'}, named in status.json"
    said = capsys.readouterr().out.replace("\n", " ")
    assert named in said
    assert f"{first / 'weights'}: weights up to step 4 are from an attempt that went further than" in said
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
    monkeypatch.setattr(Evaluator, "__call__", lambda self, model: {"eval/loss": next(found)})
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


def test_a_prediction_may_change_when_a_run_resumes(plain_store: Path, tmp_path: Path):
    """And `verify` accepts its keys."""
    folder, constant = tmp_path / "run", ("--schedule.name", "constant")
    first, second = predicted((2, 9.0, 8.0, 99.0), (6, 9.0, 8.0, 99.0)), predicted((8, 0.5, 0.25, 1.0))
    assert train(*options(plain_store, folder, *constant, "--training.max_steps", "6", *first)) == 0
    assert train(*options(plain_store, folder, *constant, *second)) == 0
    rows = Finished(0, "", folder).rows
    assert len(Finished(0, "", folder).attempts) == 2
    found = {step: row.get("eval/predicted_loss") for step, row in rows.items() if "eval/loss" in row}
    assert found == {0: None, 2: 9.0, 4: 9.0, 6: 9.0, 8: 0.5}
    assert main(["verify", str(folder)]) == 0


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
    assert train(*options(plain_store, folder, *SAMPLED, "--run.seed", "3")) == 0
    steps = (0, 2, 4, 6, 8)
    expected = [
        {"step": step, "prompt": prompt, "text": CONTINUATION} for step in steps for prompt in PROMPTS
    ]
    assert sample_rows(folder) == expected
    assert capsys.readouterr().out.count(f"sample: 'one two' -> {CONTINUATION!r}") == len(steps)
    tokenizer = open_tokenizer(TokenStore(plain_store).tokenizer_folder)
    prompts = [[tokenizer.bos_token_id, *ids] for ids in tokenizer.encode(PROMPTS)]
    settings = {"vocab_size": tokenizer.vocab_size, "max_new_tokens": 5, "temperature": 0.8, "top_k": 50}
    settings |= {"seed": 3, "stop_ids": (tokenizer.eos_token_id,)}
    assert calls == [{"training": False, "prompts": prompts, **settings}] * len(steps)


def check_samples_change_nothing(store: Path, folder: Path) -> None:
    """With dropout, which a model that is left in eval mode would not have."""
    plain, sampled = folder / "plain", folder / "sampled"
    dropout = ("--model.hidden_dropout", "0.1", "--checkpoint.save_steps", "0")
    assert train(*options(store, plain, *dropout)) == 0
    assert train(*options(store, sampled, *dropout, *SAMPLED)) == 0
    assert not (plain / "samples.jsonl").exists()
    assert Finished(0, "", sampled).exact_rows() == Finished(0, "", plain).exact_rows()
    assert_same_tensors(checkpoint_tensors(sampled, 8), checkpoint_tensors(plain, 8))


def test_samples_change_nothing_in_the_run(plain_store: Path, tmp_path: Path, calls: list[dict]):
    check_samples_change_nothing(plain_store, tmp_path)


def test_the_check_above_would_notice_another_mode(
    plain_store: Path, tmp_path: Path, calls: list[dict], monkeypatch: pytest.MonkeyPatch
):
    write = Samples.write

    def leaving_eval_mode(self: Samples, model: Decoder, *arguments: Any, **options: Any) -> None:
        before = len(calls)
        write(self, model, *arguments, **options)
        if len(calls) > before:
            model.eval()

    monkeypatch.setattr(Samples, "write", leaving_eval_mode)
    with pytest.raises(AssertionError):
        check_samples_change_nothing(plain_store, tmp_path)


def test_a_resumed_run_samples_repeated_steps_again(
    plain_store: Path, tmp_path: Path, calls: list[dict], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    more = (*SAMPLED, "--evaluation.eval_steps", "1")
    with monkeypatch.context() as patch:
        kill_after(8, patch)
        with pytest.raises(KilledError):
            train(*options(plain_store, folder, *more))
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 8, "pro')
    assert train(*options(plain_store, folder, *more)) == 0
    steps = [row["step"] for row in sample_rows(folder)[:: len(PROMPTS)]]
    assert steps == [*range(8), 7, 8], "the checkpoint was of step 6"
    sizes = [row["samples_bytes"] for row in Finished(0, "", folder).attempts]
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert sizes == [0, sum(map(len, lines[: -2 * len(PROMPTS)]))], "without the torn end"


def test_a_long_prompt_keeps_its_end(plain_store: Path, tmp_path: Path, calls: list[dict]):
    text = "one two three and or not the of in is was"
    prompts = ("--evaluation.sample_prompts", json.dumps([text]), "--evaluation.sample_tokens", "12")
    room = ("--model.max_position_embeddings", "32", "--training.max_steps", "2")
    assert train(*options(plain_store, tmp_path / "run", *prompts, *room)) == 0
    (ids,) = calls[0]["prompts"]
    tokenizer = open_tokenizer(TokenStore(plain_store).tokenizer_folder)
    assert (len(ids), ids[0]) == (20, tokenizer.bos_token_id)
    assert tokenizer.decode(ids[1:]) == text[-19:]


def test_samples_that_cannot_be_written_are_a_warning(
    plain_store: Path, tmp_path: Path, calls: list[dict], capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run" / "samples.jsonl").mkdir(parents=True)
    assert train(*options(plain_store, tmp_path / "run", *SAMPLED)) == 0
    assert "samples.jsonl: cannot be written" in capsys.readouterr().err
