"""Damage is found and passed over, failures leave the last checkpoint as it was, nothing foreign is run."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoint_helpers import Run, everything, same_bits

from llm_pretrain.checkpoints import manifest, tensor_files
from llm_pretrain.errors import CheckpointError


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
    "removed": lambda file: file.unlink(),
    "first bit": lambda file: flip(file, 0.0),
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


def failure_of(run: Run) -> CheckpointError | None:
    try:
        run.save()
    except CheckpointError as failure:
        return failure
    return None


def state_at(folder: Path) -> tuple[int, dict]:
    run = Run(folder, seed=1)
    found = run.restore()
    assert found is not None
    assert found.warnings == []
    return found.step, everything(run)


@pytest.mark.parametrize("resave", [False, True])
@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_save_that_fails_anywhere_leaves_a_sound_checkpoint(tmp_path, monkeypatch, function, resave):
    """Every call of `function` fails in turn, until a save passes; `resave` replaces an existing step 2."""
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
            full = OSError(errno.ENOSPC, "No space left on device")
            calls = failing_call(patch, function, number, full)
            failure = failure_of(run)
        if failure is not None:
            for text in (str(full), "rank 0", str(folder), "bytes"):
                assert text in str(failure)
            assert failure.shared
            assert not list(folder.glob(".step-*.tmp-*"))
        step, restored = state_at(folder)
        assert step in ((2,) if resave else (1, 2))
        assert same_bits(restored, sound[step])
        run.save()
        assert same_bits(state_at(folder)[1], sound[2])
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
        if len(calls) <= number:
            break
    else:
        pytest.fail("no save passed")
    assert number >= (2 if function == "fsync" else 1)


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


def test_a_folder_that_is_none_is_not_an_empty_one(tmp_path):
    """Training would start from scratch beside the checkpoints on a disk that comes back later."""
    run = Run(tmp_path / "checkpoints")
    run.train(1).save()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    assert run.store.committed() == []
    (tmp_path / "checkpoints").symlink_to("a-disk-that-is-not-there")
    with pytest.raises(CheckpointError, match="checkpoints: expected a folder of checkpoints, found a file"):
        run.store.committed()


def test_leftovers_are_ignored_and_cleaned(tmp_path):
    run = Run(tmp_path / "checkpoints").train(1)
    path = run.save()
    leftovers = [
        path.parent / name for name in (".step-00000009.tmp-0123abcd", ".step-00000000.old-0123abcd")
    ]
    for folder in leftovers:
        shutil.copytree(path, folder)
    assert Run(path.parent, seed=1).restore().warnings == []
    assert all(folder.exists() for folder in leftovers)
    run.train(1).save()
    assert not any(folder.exists() for folder in leftovers)
    assert run.store.committed() == [1, 2]


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [4, 5]), (4, [2, 3, 4, 5])])
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


def test_a_source_that_is_damaged_is_refused(tmp_path):
    path = Run(tmp_path / "run" / "checkpoints").train(1).save()
    flip(min(path.glob("*.safetensors")), 0.9)
    with pytest.raises(CheckpointError, match="step-00000001 is damaged"):
        Run(tmp_path / "empty").restore(source=path)
