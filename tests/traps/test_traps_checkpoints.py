"""Traps of checkpoints: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import defined, replace_everywhere
from support.launching import ACCELERATE_SCRIPT
from support.resuming import Attempt, drift

from llm_pretrain.checkpoints import manifest, tensor_files
from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, MismatchError

Mistake = Callable[[pytest.MonkeyPatch], None]


def half_saved(patch: pytest.MonkeyPatch) -> None:
    """Parameters of any precision are saved."""
    patch.setattr(torch.Tensor, "is_floating_point", lambda tensor: False)


def substitute(name: str, other: Callable[..., Any]) -> Mistake:
    """The mistake of `other(original, *arguments)` in the place of a function of the package."""

    def mistake(patch: pytest.MonkeyPatch) -> None:
        original = defined(name)
        replace_everywhere(patch, original, lambda *a, **k: other(original, *a, **k))

    return mistake


def _in_a_thread(write: Callable[..., Any], file: Path, *arguments: Any) -> Any:
    thread = threading.Thread(target=write, args=(file, *arguments))
    thread.start()
    thread.join()
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _old_first(clean: Callable[[Path], None], parent: Path) -> None:
    clean(parent)
    for path in committed_folders(parent).values():
        shutil.rmtree(path)


def pickled_metadata(patch: pytest.MonkeyPatch) -> None:
    """A pickle beside the tensors."""
    write = CheckpointStore.write

    def written(self: CheckpointStore, *arguments: Any, **options: Any) -> Path:
        path = write(self, *arguments, **options)
        (path / ".metadata").write_bytes(pickle.dumps({}))
        return path

    patch.setattr(CheckpointStore, "write", written)


DTYPE_IGNORED = substitute(
    "state_differences", lambda compare, *a: [line for line in compare(*a) if "bfloat16" not in line]
)
UNHEARD_THREAD = substitute("write_safetensors", _in_a_thread)
NO_CHECKSUM = substitute("find_damage", lambda *_, **__: [])
IN_PLACE = substitute("temporary_folder", lambda _, parent, step, token: parent / f"step-{step:08d}")
OLD_GOES_FIRST = substitute("clean", _old_first)
NO_SCALER = substitute("scaler_state", lambda *_: None)
EMPTY_SCALER = substitute("scaler_state", lambda _, scaler: dict(scaler.state_dict()))


@contextmanager
def put_in(*mistakes: Mistake) -> Iterator[None]:
    """The mistakes for the duration of a block."""
    with pytest.MonkeyPatch.context() as patch:
        for mistake in mistakes:
            mistake(patch)
        yield


class PowerCut(BaseException):
    """Ends a save on the spot, without any of its cleaning up."""


@pytest.fixture
def small(config) -> Config:
    return config()


def resumed_drift(
    config: Config, folder: Path, *, half_weights: bool = False, moments_dropped: bool = False
) -> float:
    """Drift of a run that was stopped after three of six steps, against the same run without a stop."""
    whole = Attempt(config, folder).train(6)
    Attempt(config, folder).train(3).save()
    second = Attempt(config, folder, seed=1)
    second.restore()
    if half_weights:
        second.model.bfloat16().float()
    if moments_dropped:
        second.optimizer.state.clear()
    return drift(second.train(3).parameters(), whole.parameters())


def test_a_resumed_run_does_not_drift(small, tmp_path):
    assert resumed_drift(small, tmp_path / "ours") == 0.0
    assert resumed_drift(small, tmp_path / "half", half_weights=True) > 1e-4
    assert resumed_drift(small, tmp_path / "moments", moments_dropped=True) > 1e-3


def check_half_is_refused(config: Config, folder: Path, *mistakes: Mistake) -> None:
    """Neither is half precision saved as resume state, nor loaded into fp32."""
    low = Attempt(config, folder).train(1)
    low.model.bfloat16()
    with put_in(*mistakes), pytest.raises(CheckpointError, match="expected a parameter in float32"):
        low.save()


def check_half_is_not_loaded(config: Config, folder: Path, *mistakes: Mistake) -> None:
    """A checkpoint in half precision does not match a model in fp32."""
    low = Attempt(config, folder)
    low.model.bfloat16()
    low.train(1)
    with put_in(half_saved):
        low.save()
    with put_in(*mistakes), pytest.raises(MismatchError, match="is bfloat16"):
        Attempt(config, folder).restore()


def test_half_precision_is_no_resume_state(small, tmp_path):
    check_half_is_refused(small, tmp_path / "saved")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_half_is_refused(small, tmp_path / "saved silently", half_saved)
    check_half_is_not_loaded(small, tmp_path / "loaded")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_half_is_not_loaded(small, tmp_path / "loaded silently", DTYPE_IGNORED)


def fill_the_disk(monkeypatch) -> None:
    """The second file does not reach the disk, whichever thread writes it."""
    calls: list[int] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def check_failed_write(config: Config, folder: Path, monkeypatch, *mistakes: Mistake) -> None:
    """A write that fails fails the save, and nothing is committed."""
    attempt = Attempt(config, folder).train(1)
    with monkeypatch.context() as patch, put_in(*mistakes):
        patch.setattr(tensor_files, "BYTES_PER_FILE", 20_000)  # several files
        fill_the_disk(patch)
        with pytest.raises(CheckpointError, match="No space left"):
            attempt.save()
    assert attempt.store.committed() == []


def test_a_failed_write_is_never_a_success(small, tmp_path, monkeypatch):
    check_failed_write(small, tmp_path / "ours", monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_failed_write(small, tmp_path / "trap", monkeypatch, UNHEARD_THREAD)


def check_flipped_bit(config: Config, folder: Path, *mistakes: Mistake) -> None:
    """A checkpoint with one flipped bit is passed over, by name, for the older one."""
    attempt = Attempt(config, folder).train(1)
    attempt.save()
    file = max(attempt.train(1).save().glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with put_in(*mistakes):
        found = Attempt(config, folder).restore()
    assert found.step == 1
    assert file.name in found.warnings[0]


def test_a_flipped_bit_is_found(small, tmp_path):
    check_flipped_bit(small, tmp_path / "ours")
    with pytest.raises(AssertionError):
        check_flipped_bit(small, tmp_path / "trap", NO_CHECKSUM)


def check_cut_short(config: Config, folder: Path, monkeypatch, more_steps: int, *mistakes: Mistake) -> None:
    """After a power cut in the middle of a save, what was committed before is restored, bit by bit."""
    first = Attempt(config, folder).train(2)
    first.save()
    before = first.parameters()
    with monkeypatch.context() as patch, put_in(*mistakes):

        def cut(*_: object, **__: object) -> None:
            raise PowerCut

        second = Attempt(config, folder, seed=1).train(2 + more_steps)
        patch.setattr(manifest, "write_text", cut)  # the manifest is written last
        with pytest.raises(PowerCut):
            second.save()
    third = Attempt(config, folder, seed=2)
    assert third.store.committed() == [2]
    try:
        third.restore()
    except CheckpointError as error:
        raise AssertionError("nothing sound is left") from error
    assert drift(third.parameters(), before) == 0.0


def test_a_save_that_is_cut_short_changes_nothing(small, tmp_path, monkeypatch):
    for name, more_steps in (("same step", 0), ("later step", 1)):
        check_cut_short(small, tmp_path / name, monkeypatch, more_steps)
        for number, mistake in enumerate((IN_PLACE, OLD_GOES_FIRST)):
            with pytest.raises(AssertionError):
                check_cut_short(small, tmp_path / f"{name} {number}", monkeypatch, more_steps, mistake)


def check_own_state(source: str) -> None:
    """A script has none of its state saved or loaded by the library."""
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not attributes & {"save_state", "load_state", "register_for_checkpointing"}


def test_the_library_saves_no_state():
    check_own_state(ACCELERATE_SCRIPT.read_text())
    with pytest.raises(AssertionError):
        check_own_state("self.accelerator.save_state('state')")


def check_no_pickle(config: Config, folder: Path, monkeypatch, *mistakes: Mistake) -> None:
    """A checkpoint consists of JSON and safetensors, and is loaded although a pickle lies beside them."""
    with put_in(*mistakes):
        path = Attempt(config, folder).train(1).save()
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    (path / ".metadata").write_bytes(pickle.dumps(print))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    with monkeypatch.context() as patch:
        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
            patch.setattr(module, name, refuse)
        Attempt(config, folder).restore()


def test_nothing_is_pickled(small, tmp_path, monkeypatch):
    check_no_pickle(small, tmp_path / "ours", monkeypatch)
    with pytest.raises(AssertionError):
        check_no_pickle(small, tmp_path / "trap", monkeypatch, pickled_metadata)


def scaler(scale: float, *, enabled: bool = True) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    made.scale(torch.ones(()))  # creates the scale
    return made


def check_scaler(config: Config, folder: Path, saved: Callable, expected: float, *mistakes: Mistake) -> None:
    """A resumed fp16 run scales as before; one that continues an fp32 run starts at its own scale."""
    with put_in(*mistakes):
        Attempt(config, folder, scaler=saved()).train(1).save()
        second = Attempt(config, folder, scaler=scaler(4.0))
        try:
            second.restore()
        except Exception as error:
            raise AssertionError("the scaler did not load") from error
    assert second.scaler.get_scale() == expected


def test_the_loss_scale_survives(small, tmp_path):
    check_scaler(small, tmp_path / "ours", lambda: scaler(512.0), 512.0)
    with pytest.raises(AssertionError):
        check_scaler(small, tmp_path / "lost", lambda: scaler(512.0), 512.0, NO_SCALER)
    for name, none in (("disabled", lambda: scaler(512.0, enabled=False)), ("none", lambda: None)):
        check_scaler(small, tmp_path / name, none, 4.0)
    with pytest.raises(AssertionError, match="did not load"):
        check_scaler(small, tmp_path / "empty", lambda: scaler(512.0, enabled=False), 4.0, EMPTY_SCALER)
