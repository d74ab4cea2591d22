"""Trains with two commits by turns and demands the same bits of both; for a change that should keep bits.

    python tests/compare_commits.py OLD [NEW] [--section.field VALUE …]

NEW defaults to the working tree, with what is not committed. A dense model and a mixture of experts train 20
steps in fp32 and bf16, on one and two ranks, with both scripts. Then NEW continues OLD's run from its
checkpoint of step 10. Rows without their times, tensors and scalars of checkpoints, and the files of the
weights must be the same. Further options are settings of all runs. Of the command's own settings, and of
the fingerprints in OLD's checkpoints, those that one of the commits does not know are left out. The exit code
is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden_rows import (
    LAUNCHERS,
    MODELS,
    STEPS,
    WORLD_SIZES,
    first_difference,
    golden_config,
    make_golden_store,
)
from support.fork_server import ROOT, ForkServer, start_server
from support.launching import TIMEOUT_SECONDS, Finished, checkpoint_tensors, script_request

from llm_pretrain.audit.comparison import tensor_difference
from llm_pretrain.checkpoints.manifest import read_manifest, write_manifest

PRECISIONS = ("fp32", "bf16")
MIDWAY = 10
"""Step of the checkpoint from which NEW continues; there is one at the end too."""

_MORE_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"hidden_dropout": 0.1},
    "checkpoint": {"save_steps": MIDWAY},
    "evaluation": {"eval_steps": MIDWAY, "max_batches": 2},
}
_KNOWN = """
import json
import llm_pretrain
from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.tree import Config
print(json.dumps([llm_pretrain.__file__, to_dict(Config())]))
"""


class Tree(NamedTuple):
    """A checkout of the project, its settings with their defaults, and a server that runs its scripts."""

    name: str
    folder: Path
    settings: dict[str, dict[str, Any]]
    server: ForkServer

    def train(
        self, launcher: str, world_size: int, folder: Path, config: Path, options: Sequence[str]
    ) -> str | None:
        """Train in a run's folder; returns what it printed if it failed."""
        output = folder.with_name(f"{folder.name}.log")
        more = {"output": str(output), "folder": str(self.folder)}
        more["before"] = [("support.fork_server:assert_imported_from", [str(self.folder)])]
        options = ["--config", str(config), *options]
        request = script_request(launcher, world_size, folder, options, **more)
        codes = self.server.run(request, TIMEOUT_SECONDS)
        return f"{self.name}: exit codes {codes}: {output.read_text()[-1000:]}" if any(codes) else None


def open_tree(name: str, folder: Path, scratch: Path) -> Tree:
    """Ask a checkout for its settings, and start its fork server."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _KNOWN]
    known = subprocess.run(
        command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
    file, settings = json.loads(known.stdout)
    assert Path(file).is_relative_to(folder), f"{name}: imported {file}, expected a file in {folder}"
    # without the safe path, the server's working directory would come before PYTHONPATH
    variables = {"PYTHONPATH": f"{folder}:{ROOT / 'tests'}", "PYTHONSAFEPATH": "1"}
    socket = scratch / "socket"
    start_server(socket, ends_with=os.getpid(), variables=variables)
    return Tree(name, folder, settings, ForkServer(socket))


def add_worktree(stack: ExitStack, commit: str, folder: Path) -> Path:
    """A worktree of a commit, removed with the stack."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    stack.callback(subprocess.run, [*git, "remove", "--force", str(folder)], check=True)
    return folder


def known_to_both(config: dict[str, dict[str, Any]], trees: Sequence[Tree]) -> dict[str, dict[str, Any]]:
    """The settings that every tree has."""
    return {
        section: {
            name: value
            for name, value in fields.items()
            if all(name in tree.settings.get(section, {}) for tree in trees)
        }
        for section, fields in config.items()
    }


def forget_settings(run: Path, settings: set[str]) -> None:
    """Take settings out of the fingerprints in a run's checkpoints; a commit without them would refuse it."""
    for folder in run.glob("checkpoints/*"):
        manifest = read_manifest(folder)
        kept = {name: text for name, text in manifest.run.fingerprints.items() if name not in settings}
        write_manifest(folder, replace(manifest, run=replace(manifest.run, fingerprints=kept)))


def compare_runs(old: Path, new: Path, first: int = 0) -> str | None:
    """The first difference of two runs' folders, in words; None where all is equal.

    Rows before step `first`, with which a `new` that has continued `old` begins, are not compared.
    """
    rows = [Finished(0, "", folder).rows for folder in (old, new)]
    if difference := first_difference({step: row for step, row in rows[0].items() if step >= first}, rows[1]):
        return difference
    for step in (MIDWAY, STEPS):
        name = f"step-{step:08d}"
        manifests = [read_manifest(folder / "checkpoints" / name) for folder in (old, new)]
        if manifests[0].scalars != manifests[1].scalars:
            return f"step {step}: the checkpoint's scalars differ"
        left, right = (checkpoint_tensors(folder, step) for folder in (old, new))
        for tensor in sorted(left.keys() | right.keys()):
            if tensor not in left or tensor not in right or not same_tensor(left[tensor], right[tensor]):
                return f"step {step}: the checkpoint's tensor {tensor} differs"
    files = {file.relative_to(folder) for folder in (old, new) for file in folder.glob("weights/*/*")}
    for file in sorted(each for each in files if each.name != "README.md"):
        if not all((folder / file).exists() for folder in (old, new)):
            return f"{file}: is missing in {'NEW' if (old / file).exists() else 'OLD'}"
        if (old / file).read_bytes() != (new / file).read_bytes():
            return f"{file}: other bytes"
    return None


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same type, shape and bits, of zeros and NaN too."""
    alike = left.dtype == right.dtype and left.shape == right.shape
    return alike and not tensor_difference(left, right)


def compare(old: Tree, new: Tree, folder: Path, options: Sequence[str]) -> bool:
    """Train, continue and compare every combination, and print a line for each; whether all are equal."""
    store = make_golden_store(folder)
    of_old, of_new = (
        {f"{section}.{name}" for section, fields in tree.settings.items() for name in fields}
        for tree in (old, new)
    )
    equal = True
    print(f"{'model':8} {'precision':9} {'ranks':>5}  {'launcher':10} {'NEW':9}  against OLD", flush=True)
    for model, precision, world_size, launcher in product(MODELS, PRECISIONS, WORLD_SIZES, LAUNCHERS):
        config = golden_config(store, model)
        for section, fields in {**_MORE_SETTINGS, "training": {"precision": precision}}.items():
            config[section] = config[section] | fields
        runs = folder / f"{model}-{precision}-{world_size}-{launcher}"
        runs.mkdir()
        file = runs / "settings.yaml"
        file.write_text(json.dumps(known_to_both(config, (old, new))))

        def train(tree: Tree, name: str) -> str | None:
            return tree.train(launcher, world_size, runs / name, file, options)  # noqa: B023

        failed = train(old, "old")
        trained = failed or train(new, "new") or compare_runs(runs / "old", runs / "new")
        later = shutil.ignore_patterns(f"step-{STEPS:08d}", "best", "metrics.jsonl")
        continued = failed
        if not failed:
            shutil.copytree(runs / "old", runs / "continued", ignore=later)
            forget_settings(runs / "continued", of_old - of_new)
            continued = train(new, "continued") or compare_runs(runs / "old", runs / "continued", MIDWAY + 1)
        for what, difference in (("trained", trained), ("continued", continued)):
            cells = f"{model:8} {precision:9} {world_size:5}  {launcher:10} {what:9}"
            print(f"{cells}  {difference or 'same bits'}", flush=True)
            equal = equal and difference is None
    return equal


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="another (default: the working tree)")
    chosen, options = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-commits-")))

        def opened(side: str, commit: str | None) -> Tree:
            (scratch / side).mkdir()
            folder = add_worktree(stack, commit, scratch / side / "tree") if commit else ROOT
            return open_tree(side, folder, scratch / side)

        equal = compare(opened("OLD", chosen.old), opened("NEW", chosen.new), scratch, options)
    new = chosen.new or "the working tree"
    print(f"{new} {'keeps the bits' if equal else 'does NOT keep the bits'} of {chosen.old}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
