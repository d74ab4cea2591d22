"""Damage is found and passed over, failures leave the last checkpoint as it was, nothing foreign is run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_helpers import FINGERPRINTS, Run, everything, same_bits

from llm_pretrain.checkpoints import folders, manifest, tensor_files
from llm_pretrain.errors import CheckpointError, MismatchError


class PowerCut(BaseException):
    """Ends a save on the spot, without any of its cleaning up."""


def two_checkpoints(folder: Path, monkeypatch) -> tuple[dict, dict]:
    """Steps 1 and 2, in several files each; returns the state at each."""
    monkeypatch.setattr(tensor_files, "BYTES_PER_FILE", 3000)
    run = Run(folder).train(1)
    run.save()
    first = everything(run)
    run.train(1).save()
    return first, everything(run)


def flip(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "halved": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "extended": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "removed": lambda file: file.unlink(),
    "first bit": lambda file: flip(file, 0.0),
    "middle bit": lambda file: flip(file, 0.5),
    "last bit": lambda file: flip(file, 0.99),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_file_is_named_and_passed_over(tmp_path, monkeypatch, damage):
    first, _ = two_checkpoints(tmp_path / "original", monkeypatch)
    names = [file.name for file in (tmp_path / "original" / "step-00000002").iterdir()]
    assert len(names) > 2
    for name in names:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "original", folder)
        DAMAGES[damage](folder / "step-00000002" / name)
        run = Run(folder, seed=1)
        found = run.restore()
        assert found is not None
        assert found.step == 1
        assert same_bits(everything(run), first)
        assert len(found.warnings) == 1
        assert str(folder / "step-00000002") in found.warnings[0]
        assert f"{name}: expected" in found.warnings[0]
        assert "found" in found.warnings[0]


def test_a_wrong_size_is_told_in_bytes(tmp_path, monkeypatch):
    two_checkpoints(tmp_path, monkeypatch)
    file = min((tmp_path / "step-00000002").glob("*.safetensors"))
    size = file.stat().st_size
    os.truncate(file, 7)
    found = Run(tmp_path).restore()
    assert f"{file.name}: expected {size} bytes, found 7" in found.warnings[0]


def test_a_number_changed_in_the_manifest_is_damage(tmp_path, monkeypatch):
    first, _ = two_checkpoints(tmp_path, monkeypatch)
    file = tmp_path / "step-00000002" / "manifest.json"
    text = file.read_text()
    assert '"value": 2.0' in text
    file.write_text(text.replace('"value": 2.0', '"value": 3.0'))
    run = Run(tmp_path, seed=1)
    assert run.restore().step == 1
    assert same_bits(everything(run), first)


def test_when_all_are_damaged_the_run_stops(tmp_path, monkeypatch):
    two_checkpoints(tmp_path, monkeypatch)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    victim = min((tmp_path / "step-00000002").glob("*.safetensors"))
    flip(victim, 0.5)
    run = Run(tmp_path, seed=1)
    before = everything(run)
    with pytest.raises(CheckpointError) as caught:
        run.restore()
    for text in ("step-00000001 is damaged: manifest.json: expected a file", victim.name, "step-00000002"):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same_bits(everything(run), before)


def test_a_folder_under_another_steps_name_is_damage(tmp_path, monkeypatch):
    two_checkpoints(tmp_path, monkeypatch)
    os.rename(tmp_path / "step-00000002", tmp_path / "step-00000005")
    found = Run(tmp_path).restore()
    assert found.step == 1
    assert "expected step 5, found 2" in found.warnings[0]


def test_a_newer_format_is_not_passed_over(tmp_path, monkeypatch):
    Run(tmp_path).train(1).save()
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    Run(tmp_path).train(2).save()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format_version is 2, this version of llm_pretrain reads 1"):
        Run(tmp_path).restore()


@pytest.mark.parametrize("function", ["read_json", "file_digest"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(tmp_path, monkeypatch, function):
    two_checkpoints(tmp_path, monkeypatch)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(manifest, function, refused)
    with pytest.raises(CheckpointError, match=r"step-00000002/.*user may read, found: Permission denied"):
        Run(tmp_path).restore()


def test_a_mismatch_does_not_fall_back(tmp_path, monkeypatch):
    two_checkpoints(tmp_path, monkeypatch)
    with pytest.raises(MismatchError, match="step-00000002"):
        Run(tmp_path).restore(expected={**FINGERPRINTS, "model.hidden_size": "9"})


def failing_call(monkeypatch, function: str, number: int, error: BaseException) -> list[int]:
    """Make call `number` (from 0) of `os.function` raise; returns the growing list of calls."""
    calls: list[int] = []
    original = getattr(os, function)

    def wrapped(*arguments, **options):
        calls.append(len(calls))
        if calls[-1] == number:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(os, function, wrapped)
    return calls


def failure_of(run: Run) -> BaseException | None:
    try:
        run.save()
    except (CheckpointError, PowerCut) as failure:
        return failure
    return None


def state_at(folder: Path) -> tuple[int, dict]:
    run = Run(folder, seed=1)
    found = run.restore()
    assert found is not None
    assert found.warnings == []
    return found.step, everything(run)


@pytest.mark.parametrize("resave", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PowerCut()])
@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_save_that_fails_anywhere_leaves_a_sound_checkpoint(tmp_path, monkeypatch, function, error, resave):
    """Every call of `function` fails in turn, until a save passes; `resave` replaces an existing step 2."""
    completed = False
    for number in range(30):
        folder = tmp_path / str(number)
        run = Run(folder).train(1)
        run.save()
        sound = {1: everything(run)}
        run.train(1)
        if resave:
            run.save()
        sound[2] = everything(run)
        with monkeypatch.context() as patch:
            calls = failing_call(patch, function, number, error)
            failure = failure_of(run)
        if isinstance(failure, CheckpointError):
            for text in (str(error) or "PowerCut", "rank 0", str(folder)):
                assert text in str(failure)
            assert failure.shared
            assert not list(folder.glob(".step-*.tmp-*"))
        if failure is not None and max(run.store.committed()) == 2 and not resave:
            assert function == "fsync"  # of the folder, after the rename
        step, restored = state_at(folder)
        assert step in ((2,) if resave else (1, 2))
        assert same_bits(restored, sound[step])
        run.save()
        assert same_bits(state_at(folder)[1], sound[2])
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
        if len(calls) <= number:
            completed = True
            break
    assert completed
    assert number >= (2 if function == "fsync" else 1)


def test_a_failed_write_names_file_system_and_rank(tmp_path, monkeypatch):
    run = Run(tmp_path).train(1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError,
        match=r"of \d{4} bytes failed on rank 0: .* No space left on device: '.*safetensors' \(\d+ bytes f",
    ):
        run.save()
    assert list(tmp_path.iterdir()) == []


def test_failing_to_delete_an_old_one_is_no_failure_to_save(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path)
    for _ in range(2):
        run.train(1).save()
    failing_call(monkeypatch, "rename", 1, OSError(errno.EACCES, "Permission denied"))
    run.train(1).save()
    assert run.store.committed() == [1, 2, 3]
    assert "step-00000001 could not be deleted" in caplog.text
    failing_call(monkeypatch, "scandir", 2, OSError(errno.EIO, "Input/output error"))
    run.train(1).save()
    assert run.store.committed() == [1, 2, 3, 4]
    assert "old folders are not deleted: [Errno 5] Input/output error" in caplog.text


def link_to_nowhere(folder: Path) -> None:
    folder.symlink_to("a-disk-that-is-not-there")


def file_in_its_place(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("replace", [link_to_nowhere, file_in_its_place])
def test_a_folder_that_is_none_is_not_an_empty_one(tmp_path, replace):
    """Training would start from scratch beside the checkpoints on a disk that comes back later."""
    run = Run(tmp_path / "checkpoints")
    run.train(1).save()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    assert run.store.committed() == []
    replace(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints: expected a folder of checkpoints, found a file"):
        run.store.committed()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_planted_files_are_neither_run_nor_read(tmp_path):
    run = Run(tmp_path / "checkpoints").train(1)
    path = run.save()
    for name in (".metadata", "__0.metadata", "optimizer.pt", "scheduler.bin", "data.pkl"):
        (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    save_file({"experts": torch.zeros(3, 8, 8)}, path / "zzz.safetensors")
    (path / "._shard.safetensors").write_bytes(b"\0\5\x16\7")
    resumed = Run(tmp_path / "checkpoints", seed=1)
    resumed.restore()
    assert not (tmp_path / "exploded").exists()
    assert same_bits(everything(resumed), everything(run))


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    path = Run(tmp_path).train(1).save()
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for file in path.glob("*.safetensors"):
        header_size = int.from_bytes(file.read_bytes()[:8], "little")
        json.loads(file.read_bytes()[8 : 8 + header_size])


def test_leftovers_and_junk_are_ignored_and_leftovers_cleaned(tmp_path):
    run = Run(tmp_path / "checkpoints").train(1)
    path = run.save()
    parent = path.parent
    stale = parent / ".step-00000009.tmp-0123abcd"
    shutil.copytree(path, stale)
    retired = parent / ".step-00000000.old-0123abcd"
    shutil.copytree(path, retired)
    (parent / "step-00000007").symlink_to(path)
    (parent / "step-00000008").write_text("a file")
    (parent / "step-9").mkdir()
    (parent / "step-000000010").mkdir()
    (parent / "notes").mkdir()
    assert run.store.committed() == [1]
    resumed = Run(parent, seed=1)
    assert resumed.restore().warnings == []
    assert stale.exists()
    run.train(1).save()
    assert not stale.exists()
    assert not retired.exists()
    assert run.store.committed() == [1, 2]
    assert (parent / "notes").exists()


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [4, 5]), (1, [4, 5]), (2, [4, 5]), (4, [2, 3, 4, 5])])
def test_retention_keeps_the_newest_and_never_fewer_than_two(tmp_path, keep_last, kept):
    run = Run(tmp_path, keep_last=keep_last)
    for _ in range(5):
        run.train(1).save()
    assert run.store.committed() == kept
    assert max(run.store.committed()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in kept]


def test_the_last_sound_one_is_not_retired_in_favour_of_a_damaged_one(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        run.train(1).save()
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    resumed = Run(tmp_path)
    assert resumed.restore().step == 1
    resumed.train(2).save()
    assert resumed.store.committed() == [1, 3]


def test_going_past_a_damaged_step_again_replaces_it(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        run.train(1).save()
    expected = everything(run)
    flip(min((tmp_path / "step-00000002").glob("*.safetensors")), 0.9)
    resumed = Run(tmp_path)
    resumed.restore()
    resumed.train(1).save()
    assert resumed.store.committed() == [1, 2]
    step, restored = state_at(tmp_path)
    assert step == 2
    assert same_bits(restored, expected)


def test_checkpoints_of_a_later_step_are_left_alone_until_passed(tmp_path):
    run = Run(tmp_path, keep_last=2)
    for _ in range(4):
        run.train(1).save()
    again = Run(tmp_path, keep_last=2)
    again.train(1).save()
    assert again.store.committed() == [1, 3, 4]


def test_source_names_one_checkpoint(tmp_path):
    run = Run(tmp_path / "a").train(1)
    path = run.save()
    expected = everything(run)
    run.train(1).save()
    other = Run(tmp_path / "b", seed=1)
    found = other.restore(source=path)
    assert found is not None
    assert found.step == 1
    assert same_bits(everything(other), expected)


def test_source_must_be_a_sound_checkpoint(tmp_path):
    run = Run(tmp_path / "run" / "checkpoints").train(1)
    path = run.save()
    with pytest.raises(
        CheckpointError, match=r"nothing: expected a checkpoint with a manifest.json, found none"
    ):
        run.restore(source=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"did you mean .*step-00000001\?"):
        run.restore(source=tmp_path / "run")
    flip(min(path.glob("*.safetensors")), 0.9)
    with pytest.raises(CheckpointError, match="step-00000001 is damaged"):
        Run(tmp_path / "empty").restore(source=path)


def test_file_names_in_a_manifest_stay_in_their_folder(tmp_path, monkeypatch):
    path = Run(tmp_path).train(1).save()
    content = manifest.read_manifest(path)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"")
    content.files["../outside.safetensors"] = manifest.file_digest(outside)
    manifest.write_manifest(path, content)
    with pytest.raises(CheckpointError, match="expected plain file names"):
        Run(tmp_path).restore()


def test_an_interrupted_replacement_still_counts(tmp_path):
    run = Run(tmp_path).train(1)
    path = run.save()
    os.rename(path, tmp_path / ".step-00000001.replaced-0abc")
    assert folders.committed_folders(tmp_path) == {1: tmp_path / ".step-00000001.replaced-0abc"}
    assert state_at(tmp_path)[0] == 1
    run.train(1).save()
    assert run.store.committed() == [1, 2]
    assert path.is_dir()


def test_everything_is_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    run = Run(tmp_path).train(1)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recorded_rename(source, target):
        names = [file.name for file in Path(source).iterdir()]
        synced = {Path(event).name for event in events}
        assert set(names) <= synced, "a file was not synced before the rename"
        assert str(source) == events[-1], "the folder was not synced last"
        assert Path(events[-2]).name == "manifest.json", "the manifest was not written last"
        events.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    run.save()
    assert events.count("renamed") == 1
    assert events[-2:] == ["renamed", str(tmp_path)]
