"""`llm-pretrain evaluate`: loss, perplexity, bits per byte on token stores or files."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llm_pretrain.api import TrainedModel, evaluation_config, figures_of, open_model
from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.config.schema import NonNegativeInt, PositiveInt
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import printable
from llm_pretrain.training.store_evaluation import Figures

EXAMPLES = """\
What is evaluated:
  --store   the run's own evaluation: the same sequences in the same order, packed as in training. On a
            checkpoint, with the run's settings (the default) and on its machine, the loss equals the run's
            eval/loss row bit for bit, on a CPU.
            Without --store and --input: on the run's own stores.
  --input   all documents of these files. Each begins with BOS (or else EOS) and ends with EOS, which is a
            target too; one longer than the sequence length is split, the pieces overlapping by one token, so
            that every token is predicted once, from its own piece.

bits per byte: cross-entropy of the text's tokens, special ones left out, per UTF-8 byte that they stand for.

examples:
  llm-pretrain evaluate runs/quickstart
  llm-pretrain evaluate runs/quickstart/weights/best --store data/stores/other --json
  llm-pretrain evaluate runs/quickstart --store data/stores/stdlib --split train --max_batches 20
  llm-pretrain evaluate WEIGHTS --input book.txt notes.jsonl --sequence_length 1024
"""


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated of a store or files, and how.

    Args:
        split: Split of the stores (default: validation).
        max_batches: Global batches to use, training.global_batch_size sequences each; 0: all (default:
            evaluation.max_batches of the run).
        sequence_length: Positions the model sees at once (default: the run's).
        micro_batch_size: Sequences computed at a time (default: the run's).
        precision: As training.precision: autocast over the weights as they are (default: the run's, or fp32).
    """

    split: Literal["validation", "train"] | None = None
    max_batches: NonNegativeInt | None = None
    sequence_length: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, open_model, positional=["source"], without=["dtype"])
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--store", nargs="+", action="extend", metavar="STORE", help="token stores of the model's tokenizer"
    )
    what.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="files and folders, as `prepare` reads them",
    )
    add_parameters(parser, Evaluated)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; returns the exit code."""
    _check(arguments)
    source = open_model(**chosen(arguments, open_model))
    config = evaluation_config(
        source,
        stores=arguments.store or (),
        has_files=arguments.input is not None,
        max_batches=arguments.max_batches,
        sequence_length=arguments.sequence_length,
        micro_batch_size=arguments.micro_batch_size,
        precision=arguments.precision,
    )
    split = arguments.split or "validation"
    figures = figures_of(source, config, arguments.input or (), split)
    stores = ", ".join(each.store for each in config.data.sources)
    what = ", ".join(arguments.input) if arguments.input else f"{stores} ({split})"
    _print_figures(source, config, what, figures, as_json=arguments.json)
    return 0


def _print_figures(
    source: TrainedModel, config: Config, what: str, figures: Figures, *, as_json: bool
) -> None:
    opened = source.opened
    facts: dict[str, Any] = {
        "source": str(opened.path),
        "kind": opened.kind,
        "step": opened.step,
        "on": what,
        "precision": config.training.precision,
        "device": str(source.device),
    } | {key: _finite(value) for key, value in asdict(figures).items()}
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    step = "" if opened.step is None else f", step {opened.step}"
    kind = f"{opened.kind}{step}, {config.training.precision} on {source.device}"
    print(f"model          {printable(opened.path)} ({kind})")
    part = f" of {figures.available:,}" if figures.sequences < figures.available else ""
    sequences = f"{figures.sequences:,}{part} sequences of {figures.sequence_length} tokens"
    print(f"on             {printable(what)}, {sequences}{' (--max_batches 0 takes all)' if part else ''}")
    print(f"loss           {figures.loss:.6f}")
    print(f"perplexity     {figures.perplexity:.4f}")
    if figures.bits_per_byte is not None:
        print(f"bits per byte  {figures.bits_per_byte:.6f}")
    if figures.zlib_bits_per_byte is not None:
        print(f"zlib -9        {figures.zlib_bits_per_byte:.6f} bits per byte of the whole text")
    for name, row in figures.sources.items():
        shown = [f"{key.replace('_', ' ')} {value:.6f}" for key, value in row.items() if value is not None]
        print(f"  {printable(name):<12} {', '.join(shown) or 'nothing drawn from it'}")
    print(f"tokens         {figures.tokens:,}")
    print(f"bytes          {figures.bytes:,}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that are out of range, or that another option makes useless."""
    problems = []
    if arguments.input and arguments.split is not None:
        problems.append(f"--split: expected no --input beside it, found --split {arguments.split}")
    folders: list[str] = []
    for store in arguments.store or []:
        folders.append(os.path.realpath(store))
        if not store or folders.count(folders[-1]) > 1:
            problems.append(f"--store: expected folders, each named once, found {store!r}")
    chosen(arguments, Evaluated, *problems)
