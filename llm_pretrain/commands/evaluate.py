"""`llm-pretrain evaluate`: loss, perplexity, bits per byte on a token store or on files; lm-eval's tasks."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._source import Source, add_source_arguments, open_source
from llm_pretrain.config import Config, SourceConfig, TrainingConfig
from llm_pretrain.errors import ConfigError

if TYPE_CHECKING:
    from llm_pretrain.commands._evaluation import Figures

HELP = "loss, perplexity and bits per byte on a token store, on files, or lm-eval's tasks"

_EPILOG = """\
What is evaluated:
  --store   the run's own evaluation: the same sequences in the same order, packed as in training. On a
            checkpoint, with the run's settings (the default) and on its machine, the loss is the run's
            eval/loss row to the last bit. Without --store, --input and --tasks: on the run's own stores.
  --input   all documents of these files. Each begins with BOS (or else EOS) and ends with EOS, which is a
            target too; one longer than the sequence length is split, the pieces overlapping by one token, so
            that every token is predicted once, from its own piece. That is --windows training. With
            --windows rolling, as lm-eval's loglikelihood_rolling: the same beginning, no target at the end,
            and the last piece of a split document reaches back to full length for its context.
  --tasks   tasks of lm-eval by name, its own or YAML files in --include_path; needs its package.

bits per byte: cross-entropy of the text's tokens, special ones left out, per UTF-8 byte that they stand for.

examples:
  llm-pretrain evaluate runs/quickstart
  llm-pretrain evaluate runs/quickstart/weights/best --store data/stores/other --json
  llm-pretrain evaluate runs/quickstart --store data/stores/stdlib --split train --max_batches 20
  llm-pretrain evaluate WEIGHTS --input book.txt notes.jsonl --sequence_length 1024
  llm-pretrain evaluate WEIGHTS --tasks my_task --include_path tasks/ --limit 100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_source_arguments(parser, dtype=False)
    parser.epilog = _EPILOG
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--store", nargs="+", metavar="STORE", help="token stores of the model's tokenizer")
    what.add_argument("--input", nargs="+", metavar="FILE", help="files and folders, as `prepare` reads them")
    what.add_argument("--tasks", metavar="TASK[,TASK]", help="tasks of lm-eval, separated by commas")
    parser.add_argument(
        "--split", choices=["validation", "train"], help="of the stores (default: validation)"
    )
    parser.add_argument(
        "--windows", choices=["training", "rolling"], help="how --input is cut (default: training)"
    )
    parser.add_argument(
        "--max_batches",
        type=int,
        metavar="N",
        help="global batches to use, training.global_batch_size sequences each; 0: all (default: "
        "evaluation.max_batches of the run)",
    )
    parser.add_argument(
        "--sequence_length",
        type=int,
        metavar="N",
        help="positions the model sees at once (default: the run's)",
    )
    parser.add_argument(
        "--micro_batch_size", type=int, metavar="N", help="sequences computed at a time (default: the run's)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="as training.precision: autocast over the weights as they are (default: the run's, or fp32)",
    )
    parser.add_argument("--include_path", metavar="FOLDER", help="folder with task files of your own")
    parser.add_argument("--limit", type=int, metavar="N", help="examples of each task to use")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="solved examples before each question")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; returns the exit code."""
    _check(arguments)
    if arguments.tasks is not None:
        from llm_pretrain.commands._lm_eval import evaluate_tasks, require_lm_eval

        require_lm_eval()
        source = open_source(arguments)
        results = evaluate_tasks(source, _settings(source, arguments), arguments)
        _print_tasks(results, as_json=arguments.json)
        return 0
    from llm_pretrain.commands._evaluation import evaluate_files, evaluate_stores

    source = open_source(arguments)
    config = _settings(source, arguments)
    _use_threads_of_the_run(source, config)
    if arguments.input is not None:
        rolling = arguments.windows == "rolling"
        figures = evaluate_files(source, config, arguments.input, rolling=rolling)
        what = ", ".join(arguments.input)
    else:
        split = arguments.split or "validation"
        figures = evaluate_stores(source, config, split)
        what = ", ".join(each.store for each in config.data.sources) + f" ({split})"
    _print_figures(source, config, what, figures, as_json=arguments.json)
    return 0


def _settings(source: Source, arguments: argparse.Namespace) -> Config:
    """The run's configuration, or the defaults outside of a run, with what the options change."""
    run, limit = source.opened.run, source.model.config.max_position_embeddings
    config = run or Config(training=TrainingConfig(precision="fp32"))
    length = arguments.sequence_length or config.training.sequence_length
    if run is None and arguments.sequence_length is None:
        length = min(length, limit)
    if length > limit:
        raise ConfigError(
            f"--sequence_length: expected at most the model's {limit} positions (max_position_embeddings), "
            f"found {length}"
        )
    sources = config.data.sources
    if arguments.store:
        sources = [SourceConfig(store) for store in arguments.store]
    elif not sources and arguments.input is None and arguments.tasks is None:
        raise ConfigError(
            "--store: expected a store, since SOURCE is in no run; name --store, --input or --tasks"
        )
    max_batches = config.evaluation.max_batches if arguments.input is None else None
    if arguments.max_batches is not None:
        max_batches = arguments.max_batches or None
    training = replace(
        config.training,
        sequence_length=length,
        micro_batch_size=arguments.micro_batch_size or config.training.micro_batch_size,
        precision=arguments.precision or config.training.precision,
    )
    return replace(
        config,
        data=replace(config.data, sources=sources),
        training=training,
        evaluation=replace(config.evaluation, max_batches=max_batches),
    )


def _use_threads_of_the_run(source: Source, config: Config) -> None:
    """Those of each of the run's processes, as on this machine: another number sums in another order."""
    import torch

    threads = config.distributed.cpu_threads
    if threads is None and source.opened.world_size:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, usable // source.opened.world_size)
    if threads:
        torch.set_num_threads(threads)


def _print_figures(source: Source, config: Config, what: str, figures: Figures, *, as_json: bool) -> None:
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
    print(
        f"model          {opened.path} ({opened.kind}{step}, {config.training.precision} on {source.device})"
    )
    print(f"on             {what}, {figures.sequences:,} sequences of {figures.sequence_length} tokens")
    print(f"loss           {figures.loss:.6f}")
    print(f"perplexity     {figures.perplexity:.4f}")
    if figures.bits_per_byte is not None:
        print(f"bits per byte  {figures.bits_per_byte:.6f}")
    if figures.zlib_bits_per_byte is not None:
        print(f"zlib -9        {figures.zlib_bits_per_byte:.6f} bits per byte of the text")
    for name, row in figures.sources.items():
        shown = [f"{key.replace('_', ' ')} {value:.6f}" for key, value in row.items() if value is not None]
        print(f"  {name:<12} {', '.join(shown) or 'nothing drawn from it'}")
    print(f"tokens         {figures.tokens:,}")
    print(f"bytes          {figures.bytes:,}")


def _print_tasks(results: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    """`results`: task, metric, value."""
    if as_json:
        finite = {task: {key: _finite(value) for key, value in row.items()} for task, row in results.items()}
        print(json.dumps(finite, ensure_ascii=False))
        return
    width = max((len(task) for task in results), default=0)
    for task, metrics in results.items():
        for name, value in metrics.items():
            shown = f"{value:.6g}" if isinstance(value, int | float) else value
            print(f"{task:<{width}}  {name:<28} {shown}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(arguments: argparse.Namespace) -> None:
    """Options out of their range, and those that another makes meaningless."""
    problems = [
        f"--{name}: expected {least} or more, found {getattr(arguments, name)}"
        for name, least in (
            *(("max_batches", 0), ("sequence_length", 1), ("micro_batch_size", 1)),
            *(("limit", 1), ("num_fewshot", 0)),
        )
        if getattr(arguments, name) is not None and getattr(arguments, name) < least
    ]
    needed = {
        "split": "no --input and no --tasks" if arguments.input or arguments.tasks else None,
        "windows": None if arguments.input else "--input",
        "max_batches": "no --tasks and no rolling --windows"
        if arguments.tasks or arguments.windows == "rolling"
        else None,
        "include_path": None if arguments.tasks else "--tasks",
        "limit": None if arguments.tasks else "--tasks",
        "num_fewshot": None if arguments.tasks else "--tasks",
    }
    problems += [
        f"--{name}: expected {wanted} beside it, found --{name} {getattr(arguments, name)}"
        for name, wanted in needed.items()
        if wanted and getattr(arguments, name) is not None
    ]
    if problems:
        raise ConfigError(*problems)
