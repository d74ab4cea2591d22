"""Three rounds that check and measure training on a GPU machine: `python -m benchmarks gpu`."""

from benchmarks.gpu.rounds import add_arguments, run

__all__ = ["add_arguments", "run"]
