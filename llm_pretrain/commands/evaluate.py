"""`llm-pretrain evaluate`: loss, perplexity, bits per byte on token stores or files."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._source import Source, add_source_arguments, open_source
from llm_pretrain.config import Config, SourceConfig, TrainingConfig
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from llm_pretrain.data import Batch, TokenStore

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

ZLIB_LIMIT = 64 << 20
"""Bytes of the text, from its beginning, on which zlib's bits per byte are measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_source_arguments(parser, dtype=False)
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
    parser.add_argument(
        "--split", choices=["validation", "train"], help="of the stores (default: validation)"
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; returns the exit code."""
    _check(arguments)
    source = open_source(arguments)
    config = _settings(source, arguments)
    _use_threads_of_the_run(source, config)
    if arguments.input is not None:
        figures = evaluate_files(source, config, arguments.input)
        what = ", ".join(arguments.input)
    else:
        split = arguments.split or "validation"
        figures = evaluate_stores(source, config, split)
        what = ", ".join(each.store for each in config.data.sources) + f" ({split})"
    _print_figures(source, config, what, figures, as_json=arguments.json)
    return 0


def _settings(source: Source, arguments: argparse.Namespace) -> Config:
    """The run's configuration, or the defaults outside of a run, overridden by the options."""
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
    elif not sources and arguments.input is None:
        raise ConfigError("--store: expected a store, since SOURCE is in no run; name --store or --input")
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
    """Set the number of threads of one process of the run; another number changes the order of summation."""
    import torch

    from llm_pretrain.distributed.process import default_threads

    threads = config.distributed.cpu_threads
    if threads is None and source.opened.world_size:
        threads = default_threads(source.opened.world_size)
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
    """Report options that are out of range or have no effect beside another."""
    problems = [
        f"--{name}: expected {least} or more, found {getattr(arguments, name)}"
        for name, least in (("max_batches", 0), ("sequence_length", 1), ("micro_batch_size", 1))
        if getattr(arguments, name) is not None and getattr(arguments, name) < least
    ]
    if arguments.input and arguments.split is not None:
        problems.append(f"--split: expected no --input beside it, found --split {arguments.split}")
    folders: list[str] = []
    for store in arguments.store or []:
        folders.append(os.path.realpath(store))
        if not store or folders.count(folders[-1]) > 1:
            problems.append(f"--store: expected folders, each named once, found {store!r}")
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True)
class Figures:
    """The results of an evaluation.

    Args:
        loss: Mean cross-entropy of the targets, in nats.
        perplexity: e to the loss.
        bits_per_byte: Cross-entropy of the text's tokens, special ones left out, per UTF-8 byte of them; None
            without text.
        tokens: Targets.
        bytes: UTF-8 bytes of the targets.
        zlib_bits_per_byte: zlib's at level 9 on the text of the split or the files.
        sequence_length: Positions of a sequence.
        sequences: Number of sequences.
        available: Sequences there are, of which `evaluation.max_batches` may take the first.
        sources: Loss and bits per byte of each of several stores; None where no sequence was drawn from it.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    zlib_bits_per_byte: float | None
    sequence_length: int
    sequences: int
    available: int
    sources: dict[str, dict[str, float | None]] = field(default_factory=dict)


def evaluate_stores(source: Source, config: Config, split: str) -> Figures:
    """Evaluate on a split of `data.sources` with the batches and the arithmetic of a run's own evaluation.

    Raises:
        DataError: A store is damaged, has another tokenizer, or no target in this split.
    """
    from llm_pretrain.data import evaluation_batches, open_stores
    from llm_pretrain.training import Evaluator, zlib_bits_per_byte

    stores = open_stores(config)
    for store in stores:
        if store.tokenizer_hash != source.tokenizer.hash:
            raise DataError(
                f"{store.path}: expected a store of the model's tokenizer ({source.tokenizer.hash[:12]}), "
                f"found another's ({store.tokenizer_hash[:12]}); prepare it with {source.tokenizer.folder}"
            )
    evaluated = evaluation_batches(config, split=split)
    batches = _Counted(evaluated, stores[0].token_bytes())
    engine: Any = _OneProcess(source, config.training.precision)
    names = _names(config)
    with closing(batches):
        metrics = Evaluator(engine, batches, stores[0], lambda: False, names)() or {}
    loss, perplexity = metrics.get("eval/loss"), metrics.get("eval/perplexity")
    if loss is None or perplexity is None:
        raise DataError(f"{stores[0].path}: expected tokens to evaluate on in the {split} split, found none")
    on_validation = split == "validation"
    return Figures(
        loss=loss,
        perplexity=perplexity,
        bits_per_byte=metrics.get("eval/bits_per_byte"),
        tokens=batches.tokens,
        bytes=batches.bytes,
        zlib_bits_per_byte=zlib_bits_per_byte(stores) if on_validation else _zlib_of(stores, split),
        sequence_length=config.training.sequence_length,
        sequences=sum(evaluated.sequences),
        available=sum(evaluated.available),
        sources={
            name: {key: metrics[f"eval/source/{name}/{key}"] for key in ("loss", "bits_per_byte")}
            for name in (names if len(names) > 1 else [])
        },
    )


def _names(config: Config) -> list[str]:
    """Names of the sources, as in the run's metrics; their paths if two names are equal."""
    labels = [each.label for each in config.data.sources]
    return labels if len(set(labels)) == len(labels) else [each.store for each in config.data.sources]


def evaluate_files(source: Source, config: Config, inputs: Sequence[str]) -> Figures:
    """Evaluate on all documents of files, tokenised into a temporary store by `prepare`.

    Args:
        source: The model.
        config: Gives sequence length, packing, micro batch size, precision and `evaluation.max_batches`.
        inputs: Files and folders.

    Raises:
        DataError: A file is missing or damaged, or the files have no text.
    """
    from llm_pretrain.data import Preparation, prepare_store

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store"
        prepared = Preparation(inputs, source.tokenizer.folder, path, validation_fraction=0.0)
        prepare_store(prepared)
        data = replace(config.data, sources=[SourceConfig(str(path))])
        return evaluate_stores(source, replace(config, data=data), "train")


def _zlib_of(stores: Sequence[TokenStore], split: str) -> float | None:
    """zlib's bits per byte of a split's text, decoded from its tokens; None without text."""
    compressor = zlib.compressobj(9)
    size = written = 0
    for store in stores:
        pieces = store.tokenizer().token_pieces()
        for ids, _ in store.split(split).iterate():
            if size >= ZLIB_LIMIT:
                break
            text = b"".join(pieces[token] for token in ids.tolist())
            size += len(text)
            written += len(compressor.compress(text))
    return 8 * (written + len(compressor.flush())) / size if size else None


class _Counted(Sequence["Batch"]):
    """Batches that count their targets when they are read, each of them once, with a progress bar."""

    def __init__(self, batches: Sequence[Batch], token_bytes: Any):
        from tqdm import tqdm

        self._batches, self._token_bytes = batches, token_bytes
        self._bar = tqdm(total=len(batches), unit="batch", disable=None, leave=False)
        self.tokens = self.bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # no slices: the evaluation reads one batch after another
        batch = self._batches[index]
        labels = batch.labels[batch.loss_mask]
        self.tokens += batch.num_loss_tokens
        self.bytes += int(self._token_bytes[labels.numpy()].sum())
        self._bar.update()
        return batch

    def close(self) -> None:
        self._bar.close()


class _OneProcess:
    """The methods of an engine that the evaluation calls, for one process without training."""

    rank, world_size, place = 0, 1, Place()

    def __init__(self, source: Source, precision: str):
        self.model, self.device, self._precision = source.model, source.device, precision

    def forward(self, batch: Batch) -> Any:
        import torch

        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self._precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.model(**batch.model_inputs())

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def model_and_optimizer(self) -> tuple[Any, None]:
        return self.model, None
