"""Makes what the rounds need on a GPU machine without a network: `make gpu-pack`.

    python -m benchmarks.gpu.pack [WHEEL …] [--python 3.12] [--gpu h200]

Stores of random documents and counts of the cases go into .gpu, wheels that the machine lacks into .whl; git
ignores both. Stores and wheels that are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.documents import Documents, make_store
from benchmarks.gpu.parts import CASES, DOCUMENTS, case_options
from benchmarks.gpu.roofline import NAMES, bounds
from benchmarks.gpu.rounds import PACKED, WHEELS
from benchmarks.machine import ROOT, commit
from benchmarks.reporting import SkippedError
from llm_pretrain.hardware import CLUSTERS

MOST_BYTES = 60 << 20
"""Of the tree and both folders together."""
_SIMULATED = ["gpt2-124m", "qwen3-0.6b", "minimind3-64m", "finegrained-moe-136m", "mixture"]
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def main() -> int:
    """Pack, and say how much it is; 1 where it is too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", nargs="*", metavar="WHEEL", help="requirements, such as torchao==0.17.0")
    parser.add_argument("--python", default="3.12", help="of the GPU machine (default: 3.12)")
    parser.add_argument("--gpu", choices=CLUSTERS, default="h100", help="of that machine (default: h100)")
    arguments = parser.parse_args()
    _wheels(arguments.wheels, arguments.python)
    _stores()
    counted = PACKED / "counted.json"
    of = {"commit": commit(), "gpu": arguments.gpu}
    if not counted.exists() or not of.items() <= json.loads(counted.read_text()).items():
        found = of | {"peaks": _peaks(arguments.gpu), "bounds": _bounds(arguments.gpu)}
        counted.write_text(json.dumps(found, indent=1))
    tree, packed = _size(_tracked()), _size(path for top in (PACKED, WHEELS) for path in top.rglob("*"))
    print(f"tree {tree / 2**20:.1f} MiB, .gpu and .whl {packed / 2**20:.1f} MiB: take all of it along")
    if tree + packed > MOST_BYTES:
        print(
            f"gpu-pack: expected at most {MOST_BYTES >> 20} MiB, found {(tree + packed) / 2**20:.1f}; "
            f"remove what is large from the tree, or wheels from {WHEELS}",
            file=sys.stderr,
        )
        return 1
    print("there, in the repository's root: python3 -m benchmarks gpu 1")
    return 0


def _wheels(requirements: list[str], python: str) -> None:
    """Download wheels without what they require."""
    WHEELS.mkdir(exist_ok=True)
    wanted = [
        each
        for each in requirements
        if not any(WHEELS.glob(each.replace("==", "-").replace("-", "?") + "-*"))
    ]
    if wanted:
        platforms = [word for each in _PLATFORMS for word in ("--platform", each)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, *platforms, "--dest", str(WHEELS), *wanted]
        subprocess.run(command, check=True)


def _stores() -> None:
    for size, documents in DOCUMENTS.items():
        folder = PACKED / "stores" / str(size)
        if not (folder / "store.json").exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_store(folder, Documents.lognormal(documents, size), size)
            shutil.rmtree(folder.with_name(f"{size}-tokenizer"))
            print(f"{folder.relative_to(ROOT)}: {_size(folder.rglob('*')) / 2**20:.1f} MiB", flush=True)


def _peaks(gpu: str) -> dict[str, dict[str, int]]:
    """Bytes at the peak of each case's uncompiled step, as `llm-pretrain simulate` predicts them."""
    found = {}
    for name in _SIMULATED:
        case = CASES[name]
        options = case_options(case, Path("unused"), Path("unused"))
        command = [sys.executable, "-W", "ignore", "-m", "llm_pretrain", "simulate", *options]
        command += ["--training.compile", "off", "--gpu", gpu, "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout.startswith("{"):  # its exit code says whether the step fits
            raise SystemExit(f"gpu-pack: simulate failed for {name} with exit code {done.returncode}")
        found[name] = {"peak": json.loads(done.stdout)["peak"], "micro_batch_size": case.micro_batch_size}
        print(f"{name}: simulated peak {found[name]['peak'] / 2**30:.2f} GiB", flush=True)
    return found


def _bounds(gpu: str) -> dict[str, dict[str, Any]]:
    """Lower bounds of the cases' compiled steps; none where they cannot be counted."""
    try:
        return bounds(NAMES, CLUSTERS[gpu])
    except SkippedError as skipped:
        print(f"note: round 3 will have no bounds to compare with: {skipped}", flush=True)
        return {}


def _tracked() -> list[Path]:
    """Files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
