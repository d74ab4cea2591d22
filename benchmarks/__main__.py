"""`python -m benchmarks NAME`: finds the benchmark's module and runs it. Only that one is imported."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib import import_module

from benchmarks.machine import ROOT
from benchmarks.reporting import SkippedError, begin, end
from llm_pretrain.errors import PretrainError

BENCHMARKS = {
    "whole_run": "real tokens per second of whole training loops: ours, Trainer's, LitGPT's, a bare one",
    "startup": "seconds from the start of a training process to the end of its first step",
    "loop_overhead": "what the training loop adds to forward, backward, clipping and optimizer",
    "launchers": "the Accelerate script's step against the torchrun script's",
    "data_path": "tokens per second and core of tokenizing, packing and batch assembly",
    "moe_layer": "a mixture-of-experts layer against a dense one of equal FLOPs",
    "checkpoint": "saving and restoring a run's state, against torch.save",
    "layouts": "losses of one run in eighteen layouts of processes, beside torchtitan's of the same",
    "slow_link": "bytes and seconds of a step over a slow link between two machines, and their predictions",
    "gpu": "three rounds on a GPU: contact, speed beside other loops, where a step's time goes",
    "ladder": "losses of a run with 8 times the compute of a ladder's largest, against its prediction",
}
"""Module of this package and its line of help."""

_EXIT_USAGE = 2
_EXIT_FAILED = 1


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark, or `all`, each in a process of its own; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else _EXIT_USAGE
    name, *rest = arguments
    if name == "all" and rest in ([], ["--quick"]):
        return _run_all(quick=bool(rest))
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"benchmarks: expected a name ({known}) or all, found {name!r}", file=sys.stderr)
        return _EXIT_USAGE
    options = [quick for each in rest for quick in (quick_options(name) if each == "--quick" else [each])]
    return _run(name, options)


def quick_options(name: str) -> list[str]:
    """What `--quick` stands for: a part's QUICK; nothing where its default is quick enough."""
    return list(getattr(import_module(f"benchmarks.{name}"), "QUICK", []))


def _run_all(*, quick: bool) -> int:
    """Every part in turn; one that fails does not keep the others from running."""
    failed = []
    for number, name in enumerate(BENCHMARKS, 1):
        print(f"\n== {number}/{len(BENCHMARKS)} {name}: {BENCHMARKS[name]}", flush=True)
        options, before = quick_options(name) if quick else [], time.monotonic()
        # threads, allocator and patches of one part are no business of the next
        done = subprocess.run([sys.executable, "-m", "benchmarks", name, *options], cwd=ROOT, check=False)
        print(f"took     {time.monotonic() - before:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"benchmarks: these parts failed: {', '.join(failed)}", file=sys.stderr)
    return _EXIT_FAILED if failed else 0


def _run(name: str, rest: list[str]) -> int:
    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(rest)
    begin(" ".join([name, *rest]))
    try:
        code = module.run(arguments)
    except SkippedError as skipped:
        print(f"skipped  {name}: {skipped}")
        return 0
    except PretrainError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return error.exit_code
    end()
    return code or 0


def _usage() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items()]
    more = [
        "",
        "all runs every part; --quick, after a NAME or all, takes fewer steps; each NAME has --help",
        "exit codes: 0 measured, or skipped where the machine cannot run it; 1 a part of all failed; 2 usage",
    ]
    return "\n".join(["usage: python -m benchmarks NAME|all …", "", *lines, *more])


if __name__ == "__main__":
    sys.exit(main())
