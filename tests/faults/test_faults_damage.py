"""Files that are damaged, missing, strange or hostile, in a run's folder and beside it.

| fault | what comes of it |
|---|---|
| a file of the newest checkpoint cut, emptied, removed, one bit flipped | named; the next older is taken |
| all checkpoints damaged | 74, every one named; nothing is overwritten, never from the start |
| temporary folders, junk, links of any kind | ignored |
| a pickle where a reader may look | never run |

Whole runs of the script, in forks; the hostile ones through the public commands too.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.corpora import make_store
from support.crash_checks import LAST, Scenario, exact_rows, make_scenarios, small_options, tensor_digests
from support.faulty_io import Fault, read_tree, write_tree
from support.launching import Finished

from llm_pretrain.__main__ import main

NEWEST = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store."""
    return make_store(tmp_path_factory.mktemp("small") / "store", documents=60, masked=True).path


@pytest.fixture(scope="module")
def scenario(probe, store, tmp_path_factory) -> Scenario:
    """A run that was killed with two sound checkpoints, and what it must come to."""
    folder = tmp_path_factory.mktemp("damage")
    fresh, _ = make_scenarios(probe, folder, small_options(store), world_size=1)
    fault = Fault("before", 0, only=f"mkdir:weights/.step-{LAST:08d}")
    (end,) = probe.train(folder / "sound", fresh.options, faults={0: fault})
    assert end.exit_code == -9, end.output
    fresh.start = read_tree(folder / "sound")
    return fresh


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file: os.truncate(file, 0),
    "removed": lambda file: file.unlink(),
    "one bit": flip,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link to nothing": lambda file: (file.unlink(), file.symlink_to("nothing")),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


def check_end(scenario: Scenario, folder: Path) -> None:
    """The run is at its end as if nothing had happened."""
    assert exact_rows(folder) == scenario.rows
    assert tensor_digests(folder / f"checkpoints/step-{LAST:08d}") == scenario.checkpoints[LAST]
    assert Finished(0, "", folder).status["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_older_one_taken(scenario, probe, tmp_path, damage):
    names = [name for name in scenario.start if name.startswith(f"{NEWEST}/")]
    assert len(names) == 2
    for number, name in enumerate(names):
        folder = write_tree(scenario.start, tmp_path / str(number))
        DAMAGES[damage](folder / name)
        (end,) = probe.train(folder, scenario.options)
        assert end.exit_code == 0, end.output
        (warning,) = [line for line in end.output.splitlines() if "damaged" in line]
        assert f"{folder / NEWEST} is damaged: {Path(name).name}: " in warning
        assert "passed over for an older one" in warning
        assert Finished(0, "", folder).attempts[-1]["step"] == 1
        check_end(scenario, folder)


def test_when_all_are_damaged_nothing_is_overwritten(scenario, probe, tmp_path):
    folder = write_tree(scenario.start, tmp_path / "run")
    flip(next((folder / NEWEST).glob("shard-*")))
    (folder / "checkpoints/step-00000001/manifest.json").unlink()
    before = read_tree(folder)
    for _ in range(2):
        (end,) = probe.train(folder, scenario.options)
        assert end.exit_code == 74, end.output
        (error,) = [line for line in end.output.splitlines() if line.startswith("error: ")]
        assert "step-00000001 is damaged: manifest.json: expected a file, found none" in error
        assert "step-00000002 is damaged: shard-" in error
        assert "no sound checkpoint is left" in error
        after = read_tree(folder)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert changed <= {"status.json", ".lock"}, changed
        assert Finished(0, "", folder).status["exit_code"] == 74


def test_what_lies_beside_checkpoints_is_ignored(scenario, probe, tmp_path):
    """Leftovers, junk, and links by the name of a later step, also dangling and in a circle."""
    folder = write_tree(scenario.start, tmp_path / "run")
    for parent in (folder / "checkpoints", folder / "weights"):
        (parent / "step-00000099").symlink_to(parent / "step-00000002")
        (parent / "step-00000098").symlink_to("nothing")
        (parent / "step-00000097").symlink_to("step-00000097")
        (parent / "step-00000096").write_bytes(b"a file")
        (parent / "step-95").mkdir()
        (parent / "best.old").mkdir()
        (parent / ".DS_Store").write_bytes(b"\0")
        shutil.copytree(parent / "step-00000002", parent / ".step-00000094.tmp-0123abcd")
        shutil.copytree(parent / "step-00000002", parent / ".step-00000093.old-0123abcd")
        os.mkfifo(parent / "step-00000092")
    (folder / "checkpoints" / "notes").write_text("mine")
    (end,) = probe.train(folder, scenario.options)
    assert end.exit_code == 0, end.output
    assert "damaged" not in end.output
    assert Finished(0, "", folder).attempts[-1]["step"] == 2
    check_end(scenario, folder)
    for parent in ("checkpoints", "weights"):
        left = {path.name for path in (folder / parent).iterdir()}
        assert not {name for name in left if ".tmp-" in name or ".old-" in name}
        assert {f"step-000000{number}" for number in (92, 96, 97, 98, 99)} <= left


def test_a_checkpoint_folder_that_is_a_link_is_refused(scenario, probe, tmp_path):
    """A link in somebody's folder may lead to folders of other checkpoints, which a save would delete."""
    folder = write_tree(scenario.start, tmp_path / "run")
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = read_tree(tmp_path / "elsewhere")
    (end,) = probe.train(folder, scenario.options)
    assert end.exit_code == 73, end.output
    assert f"{folder / 'checkpoints'}: expected a file or folder of the run, found a link" in end.output
    assert read_tree(tmp_path / "elsewhere") == before


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


BAIT = (
    *(".metadata", "__0_0.distcp", "optimizer.pt", "scheduler.bin", "training_args.bin"),
    *("pytorch_model.bin", "rng_state.pth", "arrays.npy", "added.pkl", "model.pt"),
)
"""Names under which other programs keep pickles."""


def plant(folder: Path, exploded: Path) -> None:
    """Leave pickles, plain and in torch's archive, under every such name in `folder` and in those below."""
    plain, archive = pickle.dumps(Bomb(exploded)), io.BytesIO()
    torch.save(Bomb(exploded), archive)
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for number, name in enumerate(BAIT):
            if not (each / name).exists():
                (each / name).write_bytes(archive.getvalue() if number % 2 else plain)


@pytest.mark.slow
def test_pickles_are_never_run(scenario, probe, store, tmp_path):
    """Training that goes on, and each command that reads weights: with bait beside what they read."""
    shutil.copytree(store, tmp_path / "store")
    folder, exploded = write_tree(scenario.start, tmp_path / "run"), tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(tmp_path / "works")))
    assert (tmp_path / "works").exists()
    for planted in (folder, tmp_path / "store"):
        plant(planted, exploded)
    options = [text.replace(str(store), str(tmp_path / "store")) for text in scenario.options]
    (end,) = probe.train(folder, options)
    assert end.exit_code == 0, end.output
    assert Finished(0, "", folder).attempts[-1]["step"] == 2
    check_end(scenario, folder)
    plant(folder, exploded)
    weights, exported = folder / "weights/step-00000003", tmp_path / "exported"
    readers = (
        ["generate", str(folder), "--prompt", "one", "--max_new_tokens", "4"],
        ["evaluate", str(folder), "--store", str(tmp_path / "store"), "--max_batches", "1"],
        ["export", str(weights), "--to", "huggingface", "--output", str(exported)],
        ["verify", str(folder)],
    )
    for arguments in readers:
        assert main(arguments) == 0, arguments
    pickled, archive = pickle.dumps(Bomb(exploded)), io.BytesIO()
    torch.save(Bomb(exploded), archive)
    for file, content in (
        (weights / "model.safetensors", archive.getvalue()),
        (weights / "tokenizer.json", pickled),
        (tmp_path / "store/train/tokens-00000.bin", pickled),
        (tmp_path / "store/store.json", archive.getvalue()),
    ):
        file.write_bytes(content)
        for arguments in readers:
            shutil.rmtree(exported, ignore_errors=True)
            main(arguments)
    assert not exploded.exists()
