"""Checks of steps in one process: what they find, what they leave behind, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.corruption_plan import ALWAYS, MATRIX, activation, checked, flip, gradient
from support.engines import run_engine, small_config
from support.faults import WAITING, Fault, Patch, after
from support.stepping import Driven

from llm_pretrain.config.loading import validate
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, CorruptionError
from llm_pretrain.runs.record import fault_lines
from llm_pretrain.runs.status import Status, read_status
from llm_pretrain.training import corruption, model_setup

EXPERTS = {"router_bias_update_rate": 0.125, "hidden_dropout": 0.1}


def driven(store: Path, path: str, every: int, *faults: Fault, **changes: Any) -> Driven:
    return run_engine(path, small_config(store, **checked(every, **changes)), *faults)


@cache
def unchecked(store: Path, path: str) -> Driven:
    return driven(store, path, 0)


@pytest.mark.parametrize(
    ("path", "flips", "name"),
    [
        ("torchrun", activation, "output of model.layers.1"),
        ("accelerate", gradient, f"gradient of {MATRIX}"),
    ],
)
def test_one_process(masked_store: Path, path: str, flips: Any, name: str):
    with pytest.raises(CorruptionError) as found:
        driven(masked_store, path, 2, flips(3, ALWAYS))
    assert "silent data corruption at step 4, rank 0 (cpu of " in str(found.value)
    assert f": {name} differs when computed again; " in str(found.value)
    once = driven(masked_store, path, 2, flips(2, 1))
    assert once.checks == [None, "transient", None, "passed"]
    assert once.hashes == unchecked(masked_store, path).hashes
    if path == "torchrun":
        applied = driven(masked_store, path, 0, flips(2, 1))
        assert applied.hashes != once.hashes


@pytest.mark.parametrize("faults", [(), (WAITING,)], ids=["at once", "read late"])
def test_no_bit_changes(masked_store: Path, faults: tuple[Fault, ...]):
    """With a check of every second step, and of the last one."""
    training = {"max_steps": 3}
    with_checks = driven(masked_store, "torchrun", 2, *faults, model=EXPERTS, training=training)
    without = driven(masked_store, "torchrun", 0, *faults, model=EXPERTS, training=training)
    assert with_checks.checks == [None, "passed", "passed"]
    assert without.checks == [None] * 3
    for name in ("losses", "sums", "grad_norms", "skipped", "hashes", "updates", "scaler"):
        assert getattr(with_checks, name) == getattr(without, name), name


def test_a_loss_scale_that_overflows_is_halved_once(masked_store: Path):
    def huge(self: Any, config: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    fp16 = {"precision": "fp16"}
    runs = [
        driven(masked_store, "torchrun", every, after("__init__", huge), training=fp16) for every in (1, 0)
    ]
    assert runs[0].skipped[0] == "overflow"
    assert runs[0].checks[0] == "passed"
    assert runs[0].skipped == runs[1].skipped
    assert runs[0].scaler == runs[1].scaler
    assert runs[0].hashes == runs[1].hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_flipped_bit_changes_a_digest(dtype: torch.dtype):
    torch.manual_seed(0)
    tensor = torch.randn(7, 5).to(dtype)
    digest = corruption.bits_sum(tensor)
    content = tensor.view(-1).view(torch.uint8)
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert corruption.bits_sum(tensor) != digest
            content[place] ^= 1 << bit
    assert corruption.bits_sum(tensor) == digest


def test_a_flip_in_an_earlier_micro_batch_shows():
    first, second = corruption.Computation(), corruption.Computation()
    batches = [torch.randn(4) for _ in range(3)]
    for computation in (first, second):
        for number, tensor in enumerate(batches):
            own = tensor.clone()
            if computation is second and number == 0:
                flip(own, 3)
            computation.add(corruption.Moment(0, 1), "output", own)
        computation.read()
    assert first.first_difference(second) == (corruption.Moment(0, 1), "output")
    assert first.first_difference(first) is None


def test_where_it_is_refused():
    config = Config(training=replace(Config().training, check_every=5))
    distributed = replace(config.distributed, strategy="deepspeed")
    problems = list(validate(replace(config, distributed=distributed), 2))
    assert any(
        "training.check_every: expected 0 with distributed.strategy deepspeed" in each for each in problems
    )
    model_setup.check_repeatable(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"set training\.deterministic true"):
        model_setup.check_repeatable(config, torch.device("cuda", 0))
    deterministic = replace(config, training=replace(config.training, deterministic=True))
    model_setup.check_repeatable(deterministic, torch.device("cuda", 0))


def test_a_later_attempt_keeps_what_was_found(tmp_path: Path):
    file = tmp_path / "status.json"
    options: Any = {"rank": 0, "world_size": 1, "launcher": "torchrun"}
    Status(file, **options).started()
    assert "faults" not in read_status(file)
    status = Status(file, **options)
    status.started()
    status.checked = 5
    fault = corruption.Fault(5, [0], ["cpu of here"], "gradient of w differs when computed again", True)
    status.add_fault(vars(fault))
    later = Status(file, **options)
    later.ended(9, 0, None)
    assert later.checked == 5
    assert read_status(file)["faults"] == [vars(fault)]
    assert str(fault) == "step 5, rank 0 (cpu of here): gradient of w differs when computed again"


def test_steps_that_are_computed_again(tmp_path: Path):
    """They are no longer checked, and a fault of theirs that ended an attempt is undone."""
    file = tmp_path / "status.json"
    options: Any = {"rank": 0, "world_size": 1, "launcher": "torchrun"}
    status = Status(file, **options)
    status.checked = 5
    for step, transient in ((2, False), (3, True), (6, False)):
        status.add_fault(vars(corruption.Fault(step, [0], ["cpu of here"], "w differs", transient)))
    status.running(1, None)
    assert status.checked == 5
    later = Status(file, **options)
    later.resumed(2, None)
    content = read_status(file)
    assert content["checked"] == later.checked == 2
    assert [fault.get("undone", False) for fault in content["faults"]] == [False, False, True]
    assert fault_lines(content, undone=False) == [
        "step 2, rank 0: w differs",
        "step 3, rank 0: w differs, once",
    ]
    (line,) = fault_lines(content, undone=True)
    assert line == "step 6, rank 0: w differs; computed again by a later attempt"
    assert fault_lines(content)[2] == line
    later.resumed(0, None)
    assert read_status(file)["checked"] is None


def test_each_computation_has_the_time_of_a_step(masked_store: Path, monkeypatch: Patch):
    beats: list[str | None] = []
    monkeypatch.setattr(corruption, "heartbeat", beats.append)
    driven(masked_store, "torchrun", 4, gradient(4, 1))
    assert beats == ["checking step 4"] * 3


def test_the_step_of_a_checkpoint_is_checked_too():
    check: Any = object.__new__(corruption.CorruptionCheck)
    training = SimpleNamespace(check_every=10, max_steps=45)
    check.config = SimpleNamespace(training=training)
    check.checkpoints = SimpleNamespace(is_due=lambda step: step % 15 == 0)
    assert [step for step in range(1, 46) if check.is_due(step)] == [10, 15, 20, 30, 40, 45]
