"""`python -m benchmarks NAME`: finds the benchmark's module and runs it. Only that one is imported."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from llm_pretrain.errors import PretrainError

BENCHMARKS = {
    "startup": "seconds from the start of a training process to the end of its first step",
    "loop_overhead": "what the training loop adds to forward, backward, clipping and optimizer",
    "launchers": "the Accelerate script's step against the torchrun script's",
    "data_path": "tokens per second and core of tokenising, packing and batch assembly",
    "normalisation": "gradient errors of other ways to normalise, and the exact balance loss's cost",
    "moe_layer": "a mixture-of-experts layer against a dense one of equal FLOPs",
    "async_save": "what the loop loses by a save in the background, against one that it waits for",
    "gpu_step": "tokens per second and MFU of minimind-26m on one GPU",
}
"""Module of this package and its line of help."""

_EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark, or `all` with their default options; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else _EXIT_USAGE
    name, *rest = arguments
    if name == "all" and not rest:
        return max(_run(each, []) for each in BENCHMARKS)
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"benchmarks: expected a name ({known}) or all, found {name!r}", file=sys.stderr)
        return _EXIT_USAGE
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    from benchmarks.measuring import header

    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(rest)
    print(header(" ".join([name, *rest])), flush=True)
    try:
        module.run(arguments)
    except PretrainError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _usage() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items()]
    return "\n".join(["usage: python -m benchmarks NAME|all …", "", *lines, "", "each NAME has --help"])


if __name__ == "__main__":
    sys.exit(main())
