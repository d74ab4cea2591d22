"""The garbage collector during training: never by itself, on schedule, and as before afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from llm_pretrain.training import trainer


@pytest.fixture(autouse=True)
def nobody_froze() -> None:
    """As in a training process; the suite freezes what its own processes import."""
    gc.unfreeze()


class Ring:
    """Only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_rings_are_freed_on_schedule_and_not_before():
    with trainer.gc_schedule() as collect:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        ring = weakref.ref(Ring())
        for step in range(1, trainer.COLLECT_STEPS):
            collect(step)
            assert ring() is not None
        collect(trainer.COLLECT_STEPS)
        assert ring() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_also_after_an_error(enabled: bool):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), trainer.gc_schedule():
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_the_loop_tells_it_every_step(monkeypatch: pytest.MonkeyPatch, plain_store, tmp_path):
    from contextlib import contextmanager

    from support.launching import train_tiny

    told: list[int] = []

    @contextmanager
    def noted():
        yield told.append

    monkeypatch.setattr(trainer, "gc_schedule", noted)
    steps = ("--training.max_steps", "3", "--schedule.warmup_steps", "0")
    train_tiny(plain_store, tmp_path / "run", *steps, "--training.global_batch_size", "4")
    assert told == [1, 2, 3]
