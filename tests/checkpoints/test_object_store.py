"""The example that keeps a run in an object store: its order, on a local store that fails at any file."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.launching import ROOT, train

from llm_pretrain.files import MARKER

TARGET = "/bucket/runs/smol"


def example():
    spec = importlib.util.spec_from_file_location("object_store", ROOT / "examples/object_store.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # the file exists
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class Bucket(MemoryFileSystem):
    """A store that accepts so many files."""

    cachable = False

    def __init__(self, accepted: int = 1000):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.accepted, self.names = accepted, list[str]()

    def put_file(self, lpath: str, rpath: str, **options: object) -> None:
        if len(self.names) == self.accepted:
            raise OSError("the connection was closed")
        super().put_file(lpath, rpath, **options)
        self.names.append(rpath.removeprefix(f"{TARGET}/"))


def whole(copy: Path, run: Path) -> list[str]:
    """Names of the copy's checkpoints, each of which is as in the run."""
    folders = sorted((copy / "checkpoints").glob("*"))
    for folder in folders:
        files = [
            {file.name: file.read_bytes() for file in each.iterdir()}
            for each in (folder, run / "checkpoints" / folder.name)
        ]
        assert files[0] == files[1]
    return [folder.name for folder in folders]


def test_a_copy_that_ends_at_any_file_resumes_from_a_whole_checkpoint(finished_run, tmp_path):
    run, module, bucket = finished_run("dense"), example(), Bucket()
    module.save(run.folder, bucket, TARGET)
    last = [number for number, name in enumerate(bucket.names) if name.endswith("manifest.json")]
    assert len(last) == 2
    assert [name for name in bucket.names if name.endswith(MARKER)][-1] == bucket.names[-1], "of weights/best"
    for accepted in range(1, len(bucket.names)):
        broken, copy = Bucket(accepted), tmp_path / str(accepted)
        with pytest.raises(OSError, match="closed"):
            module.save(run.folder, broken, TARGET)
        module.load(broken, TARGET, copy)
        assert len(whole(copy, run.folder)) == sum(number < accepted for number in last)
        broken.accepted = 1000
        module.save(run.folder, broken, TARGET)
        assert sorted(broken.store) == sorted(bucket.store)
    back = tmp_path / "back"
    module.load(bucket, TARGET, back)
    assert whole(back, run.folder) == ["step-00000002", "step-00000004"]
    best = [
        {file.name: file.read_bytes() for file in (each / "weights/best").iterdir()}
        for each in (back, run.folder)
    ]
    assert best[0] == best[1]
    options = [*run.options, "--training.max_steps", "6"]
    runs = [replace(run, folder=back), run.copy(tmp_path / "run")]
    for each in runs:
        assert train(*options, "--run.output_dir", str(each.folder)) == 0
    assert runs[0].exact_rows() == runs[1].exact_rows()
    assert max(runs[0].exact_rows()) == 6


def test_what_the_run_has_deleted_or_done_again_is_so_in_the_store(finished_run, tmp_path):
    run, module, bucket = finished_run("dense").copy(tmp_path / "run").folder, example(), Bucket()
    module.save(run, bucket, TARGET)
    shutil.rmtree(run / "checkpoints/step-00000002")
    manifest = run / "checkpoints/step-00000004/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    bucket.names.clear()
    module.save(run, bucket, TARGET)
    assert bucket.names[-1] == "checkpoints/step-00000004/manifest.json"
    module.load(bucket, TARGET, tmp_path / "copy")
    assert whole(tmp_path / "copy", run) == ["step-00000004"]
    with pytest.raises(OSError, match="not empty"):
        module.load(bucket, TARGET, tmp_path / "copy")


def test_the_store_keeps_a_whole_checkpoint_while_the_run_deletes_what_is_copied(finished_run, tmp_path):
    run, module, bucket = finished_run("dense").copy(tmp_path / "run").folder, example(), Bucket()
    last, kept = run / "checkpoints/step-00000004", tmp_path / "kept"
    last.rename(kept)
    module.save(run, bucket, TARGET)
    kept.rename(last)
    put_file = bucket.put_file

    def put_what_is_replaced(local: str, there: str) -> None:
        if "step-00000004" in local and last.exists():
            shutil.rmtree(run / "checkpoints/step-00000002")
            last.rename(run / "checkpoints/step-00000006")
        put_file(local, there)

    bucket.put_file = put_what_is_replaced  # type: ignore[method-assign]
    module.save(run, bucket, TARGET)
    module.load(bucket, TARGET, tmp_path / "copy")
    assert [folder.name for folder in (tmp_path / "copy/checkpoints").iterdir()] == ["step-00000002"]
    module.save(run, bucket, TARGET)
    module.load(bucket, TARGET, tmp_path / "later")
    assert whole(tmp_path / "later", run) == ["step-00000006"]


def test_what_is_not_there_is_one_line(tmp_path):
    for words, expected in (
        (("save", tmp_path / "none", f"file://{tmp_path}/store"), "expected a run's folder"),
        (("load", f"file://{tmp_path}/none", tmp_path / "run"), "expected a run that `save` has copied"),
    ):
        command = [sys.executable, ROOT / "examples/object_store.py", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert expected in line
    assert not (tmp_path / "run").exists()
