"""Traps of checkpoints: each check passes on our code and fails with the mistake put in.

| trap | check |
|---|---|
| half-precision weights as resume source; moments dropped because the optimizer had no state yet | no drift |
| half loaded into fp32, or saved from half, without a word | refused |
| a writing thread fails, and the save reports success | the save fails |
| no checksums: a flipped bit loads silently | passed over for the older one |
| overwriting by default, and no mark of completion | a save cut short changes nothing |
| the old checkpoint deleted before the new one is written | a failed save leaves it |
| Accelerate's own `save_state`, which does that, and pickles | not used |
| metadata that is a pickle | JSON and safetensors only, nothing is unpickled |
| the loss scaler's state lost; a disabled scaler's empty state does not load into an enabled one | restored |
"""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.mutation import Edit, edited, mutated
from support.resuming import Attempt, drift

from llm_pretrain.checkpoints import tensor_files
from llm_pretrain.config import Config
from llm_pretrain.errors import CheckpointError, MismatchError

ACCELERATE = "train_pretrain_accelerate.py"
STORE, STATE = "llm_pretrain/checkpoints/store.py", "llm_pretrain/checkpoints/state.py"
MANIFEST, DIFFERENCES = "llm_pretrain/checkpoints/manifest.py", "llm_pretrain/checkpoints/differences.py"
FILES = "llm_pretrain/checkpoints/tensor_files.py"
WRITING = "llm_pretrain/checkpoints/writing.py"

HALF_WEIGHTS = [
    Edit(
        STORE,
        "own_pieces(current.tensors, ",
        "own_pieces({name: tensor if name.startswith('optimizer.') else tensor.bfloat16().float()"
        " for name, tensor in current.tensors.items()}, ",
    )
]
MOMENTS_DROPPED = [
    Edit(STATE, "if set(names.values()) <= set(without_state):", "if True:"),
    Edit(STORE, "if differences := state_differences(content, target):", "if differences := []:"),
    Edit(STORE, "target.set_scalar(name, ", "name in target.places and target.set_scalar(name, "),
]
HALF_SAVED = Edit(STATE, "parameter.dtype.itemsize < 4", "False")
DTYPE_IGNORED = Edit(DIFFERENCES, "f\"{tensor['dtype']}{tensor['shape']}\"", "f\"{tensor['shape']}\"")
UNHEARD_THREAD = Edit(
    FILES,
    "        written[name] = _write_file(folder / name, content)\n",
    "        import threading\n"
    "        write = lambda: written.update({name: _write_file(folder / name, content)})\n"
    "        thread = threading.Thread(target=write)\n"
    "        thread.start()\n"
    "        thread.join()\n",
)
NO_CHECKSUM = Edit(
    MANIFEST,
    'elif (found := file_digest(folder / name)["sha256"]) != expected["sha256"]:',
    "elif found := None:",
)
IN_PLACE = Edit(
    WRITING,
    "folders.temporary_folder(parent, staged.content.run.step, token)",
    "parent / folders.folder_name(staged.content.run.step)",
)
OLD_GOES_FIRST = Edit(
    WRITING,
    "    folders.clean(parent)\n",
    "    folders.clean(parent)\n"
    "    for path in folders.committed_folders(parent).values():\n"
    "        folders.discard(path)\n",
)
PICKLED_METADATA = Edit(
    FILES,
    "    return written\n",
    "    (folder / '.metadata').write_bytes(__import__('pickle').dumps(written))\n    return written\n",
)
LIBRARY_STATE = Edit(
    ACCELERATE,
    "        del self.model, self.unwrapped_model, self.optimizer\n",
    "        self.accelerator.save_state('state')\n",
)
NO_SCALER = Edit(STORE, "scaler=state.scaler_state(scaler)", "scaler=None")
EMPTY_SCALER = Edit(
    STATE,
    "return dict(scaler.state_dict()) if _is_enabled(scaler) else None",
    "return dict(scaler.state_dict())",
)


class PowerCut(BaseException):
    """Ends a save on the spot, without any of its cleaning up."""


@pytest.fixture
def small(config) -> Config:
    return config()


def resumed_drift(config: Config, folder: Path, *edits: Edit) -> float:
    """Drift of a run that was stopped after three of six steps, against the same run without a stop."""
    whole = Attempt(config, folder).train(6)
    with mutated(*edits):
        Attempt(config, folder).train(3).save()
        second = Attempt(config, folder, seed=1)
        second.restore()
    return drift(second.train(3).parameters(), whole.parameters())


def test_a_resumed_run_does_not_drift(small, tmp_path):
    assert resumed_drift(small, tmp_path / "ours") == 0.0
    assert resumed_drift(small, tmp_path / "half", *HALF_WEIGHTS) > 1e-4
    assert resumed_drift(small, tmp_path / "moments", *MOMENTS_DROPPED) > 1e-3


def check_half_is_refused(config: Config, folder: Path, *edits: Edit) -> None:
    """Neither is half precision saved as resume state, nor loaded into fp32."""
    low = Attempt(config, folder).train(1)
    low.model.bfloat16()
    with mutated(*edits), pytest.raises(CheckpointError, match="expected a parameter in float32"):
        low.save()


def check_half_is_not_loaded(config: Config, folder: Path, *edits: Edit) -> None:
    """A checkpoint in half precision does not match a model in fp32."""
    with mutated(HALF_SAVED):
        low = Attempt(config, folder)
        low.model.bfloat16()
        low.train(1).save()
    with mutated(*edits), pytest.raises(MismatchError, match="is bfloat16"):
        Attempt(config, folder).restore()


def test_half_precision_is_no_resume_state(small, tmp_path):
    check_half_is_refused(small, tmp_path / "saved")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_half_is_refused(small, tmp_path / "saved silently", HALF_SAVED)
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


def check_failed_write(config: Config, folder: Path, monkeypatch, *edits: Edit) -> None:
    """A write that fails fails the save, and nothing is committed."""
    attempt = Attempt(config, folder).train(1)
    with monkeypatch.context() as patch, mutated(*edits):
        patch.setattr(tensor_files, "BYTES_PER_FILE", 20_000)  # several files
        fill_the_disk(patch)
        with pytest.raises(CheckpointError, match="No space left"):
            attempt.save()
    assert attempt.store.committed() == []


def test_a_failed_write_is_never_a_success(small, tmp_path, monkeypatch):
    check_failed_write(small, tmp_path / "ours", monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_failed_write(small, tmp_path / "trap", monkeypatch, UNHEARD_THREAD)


def check_flipped_bit(config: Config, folder: Path, *edits: Edit) -> None:
    """A checkpoint with one flipped bit is passed over, by name, for the older one."""
    attempt = Attempt(config, folder).train(1)
    attempt.save()
    file = max(attempt.train(1).save().glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with mutated(*edits):
        found = Attempt(config, folder).restore()
    assert found.step == 1
    assert file.name in found.warnings[0]


def test_a_flipped_bit_is_found(small, tmp_path):
    check_flipped_bit(small, tmp_path / "ours")
    with pytest.raises(AssertionError):
        check_flipped_bit(small, tmp_path / "trap", NO_CHECKSUM)


def check_cut_short(config: Config, folder: Path, monkeypatch, more_steps: int, *edits: Edit) -> None:
    """After a power cut in the middle of a save, what was committed before is restored, bit by bit."""
    first = Attempt(config, folder).train(2)
    first.save()
    before = first.parameters()
    with monkeypatch.context() as patch, mutated(*edits):

        def cut(*_: object, **__: object) -> None:
            raise PowerCut

        second = Attempt(config, folder, seed=1).train(2 + more_steps)
        patch.setattr(json, "dump", cut)  # the manifest is written last
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
        for number, edit in enumerate((IN_PLACE, OLD_GOES_FIRST)):
            with pytest.raises(AssertionError):
                check_cut_short(small, tmp_path / f"{name} {number}", monkeypatch, more_steps, edit)


def check_own_state(source: str) -> None:
    """A script has none of its state saved or loaded by the library."""
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not attributes & {"save_state", "load_state", "register_for_checkpointing"}


def test_the_library_saves_no_state(tmp_path, monkeypatch):
    check_own_state(edited(ACCELERATE, []))
    with pytest.raises(AssertionError):
        check_own_state(edited(ACCELERATE, [LIBRARY_STATE]))
    import accelerate

    settings = accelerate.utils.ProjectConfiguration(
        str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = accelerate.Accelerator(cpu=True, project_config=settings)
    accelerator.prepare(torch.nn.Linear(1, 1))
    first = Path(accelerator.save_state())
    assert any(file.suffix == ".pkl" for file in first.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(accelerate.accelerator, "save_accelerator_state", full)
    with pytest.raises(OSError, match="No space left"):
        accelerator.save_state()
    assert not first.exists(), "the trap is gone: a failed save leaves the one before"


def check_no_pickle(config: Config, folder: Path, monkeypatch, *edits: Edit) -> None:
    """A checkpoint consists of JSON and safetensors, and is loaded although a pickle lies beside them."""
    with mutated(*edits):
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
        check_no_pickle(small, tmp_path / "trap", monkeypatch, PICKLED_METADATA)


def scaler(scale: float, *, enabled: bool = True) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    made.scale(torch.ones(()))  # creates the scale
    return made


def check_scaler(config: Config, folder: Path, saved: Callable, expected: float, *edits: Edit) -> None:
    """A resumed fp16 run scales as before; one that continues an fp32 run starts at its own scale."""
    with mutated(*edits):
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
