"""Keeps a copy of a run in an object store, and brings it back on another machine.

    python examples/object_store.py save runs/smol s3://bucket/runs/smol --every 300   # beside the training
    python examples/object_store.py load s3://bucket/runs/smol runs/smol

It needs fsspec, which `datasets` brings, and the store's package (s3fs, gcsfs, adlfs). A store has no rename
that commits a folder, so the order does: rows go before the checkpoints that they lead to, and the
`manifest.json`, without which a checkpoint is none, goes after the files that it names. So a copy that ends
at any file resumes from the newest checkpoint that is whole. `weights/` is not copied: the finished run's
command writes it again.

A run's own folder belongs on a file system: on a store that is mounted (s3fs, gcsfuse) a rename copies, and
may be seen half done.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.files import MARKER
from llm_pretrain.runs.folder import RUN_FILES
from llm_pretrain.runs.record import REPLAYS_FILE
from llm_pretrain.runs.status import read_status

LAST = "manifest.json"


def save(run: Path, store: AbstractFileSystem, target: str) -> None:
    """Copy what the store lacks of a run, which may be going on; then delete what the run has deleted."""
    checkpoints = {folder.name: folder for folder in committed_folders(run / "checkpoints").values()}
    store.makedirs(target, exist_ok=True)
    for name in (MARKER, *RUN_FILES, REPLAYS_FILE):
        if (run / name).exists():
            store.put_file(str(run / name), f"{target}/{name}")
    for name, folder in checkpoints.items():
        copy = f"{target}/checkpoints/{name}"
        try:
            if store.exists(f"{copy}/{LAST}"):
                if store.cat_file(f"{copy}/{LAST}") == (folder / LAST).read_bytes():
                    continue
                store.rm_file(f"{copy}/{LAST}")  # of steps that the run has done again
            store.makedirs(copy, exist_ok=True)
            for file in sorted(folder.iterdir(), key=lambda file: file.name == LAST):
                store.put_file(str(file), f"{copy}/{file.name}")
        except FileNotFoundError:  # the run has deleted it meanwhile
            continue
    for copy in copies(store, target):
        if checkpoints and copy.rpartition("/")[2] not in checkpoints:
            if store.exists(f"{copy}/{LAST}"):
                store.rm_file(f"{copy}/{LAST}")
            store.rm(copy, recursive=True)


def load(store: AbstractFileSystem, source: str, run: Path) -> None:
    """Copy a run back into a new folder, with the checkpoints that are whole."""
    partial = run.with_name(f"{run.name}.partial")
    partial.mkdir(parents=True)
    for name in (MARKER, *RUN_FILES, REPLAYS_FILE):
        if store.exists(f"{source}/{name}"):
            store.get_file(f"{source}/{name}", str(partial / name))
    for copy in copies(store, source):
        if store.exists(f"{copy}/{LAST}"):
            folder = partial / "checkpoints" / copy.rpartition("/")[2]
            folder.mkdir(parents=True)
            for file in store.ls(copy, detail=False):
                store.get_file(file, str(folder / file.rpartition("/")[2]))
    run.mkdir(exist_ok=True)  # if it is there, it must be empty
    partial.rename(run)


def copies(store: AbstractFileSystem, target: str) -> list[str]:
    """The checkpoints' folders in the store, whole or not."""
    folder = f"{target}/checkpoints"
    return [path.rstrip("/") for path in store.ls(folder, detail=False)] if store.exists(folder) else []


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
    store, target = url_to_fs(options.target)
    while True:
        lasts = read_status(Path(options.source) / "status.json").get("state") == "running"
        save(Path(options.source), store, target.rstrip("/"))
        if options.every is None or not lasts:
            return
        time.sleep(options.every)


if __name__ == "__main__":
    main()
