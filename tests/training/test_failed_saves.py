"""Training outlives a failed save; three in a row, the last one, and a row that cannot be written end it."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.launching import Finished, assert_same_tensors, checkpoint_tensors, run_options, train

import train_pretrain

MODES = pytest.mark.parametrize("mode", ["false", "true"], ids=["sync", "async"])
MANIFEST = r"checkpoints/\.step-0000000[{}].*/manifest\.json$"
"""Opened last for a checkpoint of these steps."""


def options(store: Path, folder: Path, mode: str, *more: str) -> list[str]:
    """Five steps, each saved."""
    return run_options(
        "tiny-moe",
        store,
        "model.hidden_size=32 training.sequence_length=32 training.global_batch_size=8 "
        "training.micro_batch_size=8 training.max_steps=5 schedule.warmup_steps=1 evaluation.eval_steps=0 "
        f"checkpoint.save_steps=1 checkpoint.async_save={mode}",
        *more,
        folder=folder,
    )


_WATCHED: dict[str, Callable[[str], None]] = {}


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    for pattern in list(_WATCHED) if event == "open" else ():
        if re.search(pattern, str(arguments[0])):
            _WATCHED[pattern](str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def watching() -> None:
    """Python tells of every file that it opens, and opens none where that raises; until the process ends."""
    sys.addaudithook(_on_event)


@pytest.fixture(autouse=True)
def watched() -> Any:
    """Pattern -> what is called before a file of such a path is opened."""
    yield _WATCHED
    _WATCHED.clear()


def full(path: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", path)


def saved_steps(folder: Path, kind: str = "checkpoints") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / kind).glob("step-*"))


class Case(NamedTuple):
    """What cannot be opened, and what comes of it."""

    pattern: str
    checkpoints: list[int]
    weights: list[int]
    warnings: list[str]
    """Start of each, and the failures in a row that it counts."""
    reason: str = ""
    """Of a run that ends with 74; it goes on to its end once there is room."""
    more: tuple[str, ...] = ()


LOST = "warning: not saved, step {}: {} of 3"
WEIGHTS = "warning: not saved, the weights of step {}: {} of 3"
CASES = {
    "never three in a row": Case(
        MANIFEST.format("124"),
        [3, 5],
        [3, 5],
        [LOST.format(1, 1), LOST.format(2, 2), LOST.format(4, 1)],
    ),
    "three in a row": Case(
        MANIFEST.format("234"),
        [1],
        [1],
        [LOST.format(2, 1), LOST.format(3, 2)],
        "failed saves in a row: 3 of 3",
        ("--training.max_steps", "6"),
    ),
    "the last": Case(MANIFEST.format("5"), [3, 4], [3, 4], [], "its last save must not fail"),
    "weights alone": Case(
        r"weights/\.step-0000000[23].*/config\.json$",
        [1, 2, 3, 4, 5],
        [1, 4, 5],
        [WEIGHTS.format(2, 1), WEIGHTS.format(3, 2)],
        more=("--checkpoint.keep_last", "9"),
    ),
}


@pytest.fixture(scope="module")
def reference(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert train(*options(plain_store, folder, "false")) == 0
    return Finished(0, "", folder)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "true") for name in CASES), ("never three in a row", "false"), ("the last", "false")],
)
def test_a_failed_save(name, mode, plain_store, reference, tmp_path, watched, capsys):
    case, folder = CASES[name], tmp_path / "run"
    watched[case.pattern] = full
    command = options(plain_store, folder, mode, *case.more)
    run = Finished(train(*command), "", folder)
    assert run.exit_code == (74 if case.reason else 0)
    assert (saved_steps(folder), saved_steps(folder, "weights")) == (case.checkpoints, case.weights)
    assert run.status["checkpoint"].endswith(f"step-{case.checkpoints[-1]:08d}")
    assert not list((folder / "checkpoints").glob(".step-*"))
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    told = [line for line in errors.splitlines() if "not saved, " in line]
    counts = [re.search(r"failed saves in a row: (. of 3)", line) for line in told]
    assert [
        f"{line.partition(': /')[0]}: {count[1]}" for line, count in zip(told, counts, strict=True) if count
    ] == case.warnings
    for line in told:
        for part in (str(folder), "No space left on device"):
            assert part in line
    if case.reason:
        assert (run.status["state"], run.status["exit_code"]) == ("failed", 74)
        assert case.reason in run.status["reason"]
        watched.clear()
        assert train(*command) == 0
    if not case.more:
        assert run.exact_rows() == reference.exact_rows()
        assert_same_tensors(checkpoint_tensors(folder, 5), checkpoint_tensors(reference.folder, 5))


def test_best_weights_that_cannot_be_written_stop_nothing(plain_store, tmp_path, watched, capsys):
    watched[r"weights/\.step-0000000[12].*/best\.json$"] = full
    folder = tmp_path / "run"
    more = ("--evaluation.eval_steps", "1", "--evaluation.max_batches", "1")
    assert train(*options(plain_store, folder, "true", *more)) == 0
    assert json.loads((folder / "weights" / "best" / "best.json").read_text())["step"] >= 3
    assert "No space left on device" in capsys.readouterr().err


def test_a_store_that_is_replaced_gives_its_tokenizer_to_no_weights(plain_store, tmp_path, watched):
    moved, folder = tmp_path / "store", tmp_path / "run"
    shutil.copytree(plain_store, moved)
    tokenizer = moved / "tokenizer" / "tokenizer.json"
    watched[MANIFEST.format("2")] = lambda path: tokenizer.write_text('{"another": "tokenizer"}')
    assert train(*options(moved, folder, "true")) == 74
    assert saved_steps(folder, "weights") == [1]
    reason = Finished(74, "", folder).status["reason"]
    assert "tokenizer.json: expected the tokenizer that the run began with" in reason


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Any], None]) -> None:
    steps = train_pretrain.TorchrunEngine.train_step

    def train_step(self: Any, taken: Any) -> None:
        steps(self, taken)
        if taken.micro_batches[0].step + 1 == step:
            act(self)

    monkeypatch.setattr(train_pretrain.TorchrunEngine, "train_step", train_step)


@MODES
def test_what_is_not_finite_ends_the_run(plain_store, tmp_path, monkeypatch, mode):
    """Something broke the state after a step: no checkpoint has it, and the run says which tensor."""

    def poison(engine: Any) -> None:
        with torch.no_grad():
            engine.unwrapped_model.model.norm.weight[3] = float("nan")

    after_step(monkeypatch, 3, poison)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, mode)) == 70
    status = Finished(70, "", folder).status
    assert status["state"] == "diverged"
    assert "model.norm.weight" in status["reason"]
    assert saved_steps(folder) == [1, 2]


def test_an_error_in_the_loop_lets_the_save_in_the_background_commit(
    plain_store, tmp_path, monkeypatch, watched
):
    """The save of step 2 is held until the loop has failed at step 3."""
    failed = threading.Event()

    def fail(engine: Any) -> None:
        failed.set()
        raise torch.OutOfMemoryError("not enough")

    watched[MANIFEST.format("2")] = lambda path: failed.wait(60)
    after_step(monkeypatch, 3, fail)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder, "true")) == 71
    assert failed.is_set()
    assert saved_steps(folder) == [1, 2]
    assert Finished(71, "", folder).status["checkpoint"].endswith("step-00000002")


def test_one_save_is_in_flight_and_the_next_waits_for_it(plain_store, tmp_path, watched):
    folder, unfinished = tmp_path / "run", []

    def slow(path: str) -> None:
        time.sleep(0.1)
        unfinished.append(len(list((folder / "checkpoints").glob(".step-*"))))

    watched[MANIFEST.format("12345")] = slow
    assert train(*options(plain_store, folder, "true")) == 0
    assert unfinished == [1] * 5
