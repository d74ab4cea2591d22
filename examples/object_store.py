"""Keeps a copy of a run in an object store, and brings it back on another machine.

    python examples/object_store.py save runs/smol s3://bucket/runs/smol --every 300   # beside the training
    python examples/object_store.py load s3://bucket/runs/smol runs/smol

It needs fsspec, which `datasets` brings, and the store's package (s3fs, gcsfs, adlfs). A store has no rename
that commits a folder, so the order does: rows go before the checkpoints that they lead to, and the file
without which a folder is none goes after those that it names. A copy that ends at any file thus resumes from
the newest checkpoint that is whole. Of the weights only `weights/best` is copied, since the run's command
writes the others again.

A run's own folder belongs on a file system: on a store that is mounted (s3fs, gcsfuse) a rename copies, and
may be seen half done.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from llm_pretrain.checkpoints.folders import committed_folders, folder_name
from llm_pretrain.errors import PretrainError
from llm_pretrain.files import MARKER
from llm_pretrain.runs.folder import RUN_FILES
from llm_pretrain.runs.record import REPLAYS_FILE, check_run_folder, is_run_folder, read_run

LAST = {"checkpoints": "manifest.json", "weights": MARKER}
"""By parent folder, the file that makes a folder in it whole."""


def save(run: Path, store: AbstractFileSystem, target: str) -> None:
    """Copy what the store lacks of a run, which may be going on; then delete what the run has deleted."""
    checkpoints = committed_folders(run / "checkpoints")
    folders = {f"checkpoints/{folder_name(step)}": checkpoints[step] for step in reversed(checkpoints)}
    store.makedirs(target, exist_ok=True)
    for name in (MARKER, *RUN_FILES, REPLAYS_FILE):
        if (run / name).exists():
            store.put_file(str(run / name), f"{target}/{name}")
    if (best := run / "weights/best").is_dir():
        folders["weights/best"] = best
    try:
        for name, folder in folders.items():  # the newest first, since a run deletes the oldest
            save_folder(folder, store, f"{target}/{name}")
    except FileNotFoundError:
        return  # the run has deleted it meanwhile; what the store has stays until the next call
    for copy in copies(store, f"{target}/checkpoints"):
        if checkpoints and copy.removeprefix(f"{target}/") not in folders:
            delete(store, copy)


def save_folder(folder: Path, store: AbstractFileSystem, copy: str) -> None:
    """Copy a folder unless the store has it, its last file last."""
    last = LAST[folder.parent.name]
    content = (folder / last).read_bytes()
    if store.exists(f"{copy}/{last}"):
        if store.cat_file(f"{copy}/{last}") == content:
            return
        delete(store, copy)  # of steps that the run has done again, or an earlier best
    store.makedirs(copy, exist_ok=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name == last):
        store.put_file(str(file), f"{copy}/{file.name}")


def delete(store: AbstractFileSystem, copy: str) -> None:
    """Delete a folder of the store, its last file first."""
    for last in LAST.values():
        if store.exists(f"{copy}/{last}"):
            store.rm_file(f"{copy}/{last}")
    store.rm(copy, recursive=True)


def load(store: AbstractFileSystem, source: str, run: Path) -> None:
    """Copy a run back into a new folder, with the folders that are whole."""
    if not store.exists(f"{source}/{MARKER}"):
        raise FileNotFoundError(f"{source}: expected a run that `save` has copied, found none")
    partial = run.with_name(f"{run.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was interrupted
    partial.mkdir(parents=True)
    for name in (MARKER, *RUN_FILES, REPLAYS_FILE):
        if store.exists(f"{source}/{name}"):
            store.get_file(f"{source}/{name}", str(partial / name))
    for parent, last in LAST.items():
        for copy in copies(store, f"{source}/{parent}"):
            if store.exists(f"{copy}/{last}"):
                folder = partial / parent / copy.rpartition("/")[2]
                folder.mkdir(parents=True)
                for file in store.ls(copy, detail=False):
                    store.get_file(file, str(folder / file.rpartition("/")[2]))
    run.mkdir(exist_ok=True)  # if it is there, it must be empty
    partial.rename(run)


def copies(store: AbstractFileSystem, folder: str) -> list[str]:
    """The folders in a folder of the store, whole or not."""
    found = store.ls(folder, detail=False) if store.exists(folder) else []
    return [path for path in (each.rstrip("/") for each in found) if not path.endswith(folder)]


def main() -> None:
    """Read the command line and copy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("source", help="the run's folder to save, or the address to load from")
    parser.add_argument("target", help="the address to save to, or the new run's folder")
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", help="save again and again while the run lasts"
    )
    options = parser.parse_args()
    if options.action == "load":
        store, source = url_to_fs(options.source)
        load(store, source.rstrip("/"), Path(options.target))
        return
    run, (store, target) = Path(options.source), url_to_fs(options.target)
    if options.every is None:
        check_run_folder(run)
        save(run, store, target.rstrip("/"))
        return
    was_running = is_running = False
    while is_running or not was_running:  # the copy may start before the run
        is_running = is_run_folder(run) and read_run(run, metrics=False).state == "running"
        was_running |= is_running
        try:
            if is_run_folder(run):
                save(run, store, target.rstrip("/"))
            else:
                print(f"waiting for a run in {run}", file=sys.stderr)
        except OSError as error:
            print(f"not copied, trying again: {error}", file=sys.stderr)
        if is_running or not was_running:
            time.sleep(options.every)


if __name__ == "__main__":
    try:
        main()
    except (OSError, PretrainError) as problem:
        sys.exit(f"error: {problem}")
