"""`llm-pretrain evaluate`: loss, perplexity, bits per byte on token stores or files; lm-eval's tasks."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._source import Source, add_source_arguments, open_source
from llm_pretrain.config import Config, SourceConfig, TrainingConfig
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    import torch

    from llm_pretrain.data import Batch, TokenStore
    from llm_pretrain.model import Decoder

EXAMPLES = """\
What is evaluated:
  --store   the run's own evaluation: the same sequences in the same order, packed as in training. On a
            checkpoint, with the run's settings (the default) and on its machine, the loss equals the run's
            eval/loss row bit for bit, on a CPU.
            Without --store, --input and --tasks: on the run's own stores.
  --input   all documents of these files. Each begins with BOS (or else EOS) and ends with EOS, which is a
            target too; one longer than the sequence length is split, the pieces overlapping by one token, so
            that every token is predicted once, from its own piece. That is --windows training. With
            --windows rolling, as lm-eval's loglikelihood_rolling: the same beginning, no target at the end,
            and the last piece of a split document reaches back to full length for its context. lm-eval's own
            model `hf` agrees with add_bos_token=False; otherwise our tokenizers' BOS counts as text there.
  --tasks   tasks of lm-eval by name, its own or YAML files in --include_path; needs its package.

bits per byte: cross-entropy of the text's tokens, special ones left out, per UTF-8 byte that they stand for.

examples:
  llm-pretrain evaluate runs/quickstart
  llm-pretrain evaluate runs/quickstart/weights/best --store data/stores/other --json
  llm-pretrain evaluate runs/quickstart --store data/stores/stdlib --split train --max_batches 20
  llm-pretrain evaluate WEIGHTS --input book.txt notes.jsonl --sequence_length 1024
  llm-pretrain evaluate WEIGHTS --tasks my_task --include_path tasks/ --limit 100
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
    """Report options that are out of range or have no effect beside another."""
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
        sequences: Number of sequences, or of `rolling` windows.
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


def evaluate_files(source: Source, config: Config, inputs: Sequence[str], *, rolling: bool) -> Figures:
    """Evaluate on all documents of files, tokenised into a temporary store by `prepare`.

    Args:
        source: The model.
        config: Gives sequence length, packing, micro batch size, precision and `evaluation.max_batches`.
        inputs: Files and folders.
        rolling: lm-eval's windows (see `rolling_windows`) instead of training's packed sequences.

    Raises:
        DataError: A file is missing or damaged, or the files have no text.
    """
    from llm_pretrain.data import Preparation, prepare_store

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store"
        prepared = Preparation(inputs, source.tokenizer.folder, path, validation_fraction=0.0)
        store = prepare_store(prepared)
        if rolling:
            return _evaluate_rolling(source, config, store)
        data = replace(config.data, sources=[SourceConfig(str(path))])
        return evaluate_stores(source, replace(config, data=data), "train")


def _evaluate_rolling(source: Source, config: Config, store: TokenStore) -> Figures:
    """On lm-eval's windows: the tokens of each document without its first and its end token."""
    length, token_bytes = config.training.sequence_length, store.token_bytes()
    windows: list[tuple[list[int], list[int]]] = []
    masks: list[list[bool]] = []
    for ids, mask in store.split("train").iterate():
        stop = len(ids) - 1 if ids[-1] == store.eos_token_id else len(ids)
        prefix, targets = int(ids[0]), ids[1:stop].tolist()
        done = 1
        for context, predicted in rolling_windows(targets, prefix, length):
            windows.append((context, predicted))
            masks.append(mask[done : done + len(predicted)].tolist())
            done += len(predicted)

    def nats_of(masks: list[list[bool]]) -> float:
        """Negative log-likelihood of the targets in the masks."""
        some = [index for index, mask in enumerate(masks) if any(mask)]
        scores = score_windows(
            source.model,
            [windows[index] for index in some],
            batch_size=config.training.micro_batch_size,
            precision=config.training.precision,
            masks=[masks[index] for index in some],
        )
        return -math.fsum(score for score, _ in scores)

    kept = [
        token
        for (_, predicted), mask in zip(windows, masks, strict=True)
        for token, counts in zip(predicted, mask, strict=True)
        if counts
    ]
    if not kept:
        raise DataError(f"{', '.join(store.facts['inputs'])}: expected text to evaluate on, found none")
    size = int(token_bytes[kept].sum())
    nats = nats_of(masks)
    special = [  # which stand for no text
        [counts and not token_bytes[token] for token, counts in zip(predicted, mask, strict=True)]
        for (_, predicted), mask in zip(windows, masks, strict=True)
    ]
    loss, text_nats = nats / len(kept), nats - nats_of(special)
    return Figures(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=text_nats / (math.log(2) * size) if size else None,
        tokens=len(kept),
        bytes=size,
        zlib_bits_per_byte=_zlib_of([store], "train"),
        sequence_length=length,
        sequences=len(windows),
        available=len(windows),
    )


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
        with autocast(self.device, self._precision):
            return self.model(**batch.model_inputs())

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def model_and_optimizer(self) -> tuple[Any, None]:
        return self.model, None


def autocast(device: torch.device, precision: str) -> Any:
    """The autocast context of `training.precision`."""
    import torch

    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def rolling_windows(ids: Sequence[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, predicted ids) such that each of `ids` is predicted once, with at most `length` inputs.

    The windows of lm-eval's `loglikelihood_rolling` (context_len 1): the first has `prefix` as its context;
    each further one predicts `length` more ids after one id of context; the last is extended to the left to
    full length, which gives its ids more context. No end of text is predicted. lm-eval's `hf` model encodes
    with the tokenizer's BOS and predicts that too, unless it is told `add_bos_token=False`.
    """
    for start in range(0, len(ids), length):
        stop = min(start + length, len(ids))
        yield list(ids[stop - length - 1 : start]) if start else [prefix], list(ids[start:stop])


def score_windows(
    model: Decoder,
    windows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int,
    precision: str = "fp32",
    vocab_size: int | None = None,
    masks: Sequence[Sequence[bool]] | None = None,
) -> list[tuple[float, bool]]:
    """The log-probability of each continuation, and whether each of its ids was the most likely one.

    Args:
        model: In eval mode.
        windows: (context, continuation) in ids, with at least one id of context.
        batch_size: Windows of a batch.
        precision: As `training.precision`.
        vocab_size: The tokenizer's, among which the most likely id is searched; default: the model's rows.
        masks: Of each window, the ids of the continuation that count; default: all.
    """
    import torch

    device = next(model.parameters()).device
    order = sorted(range(len(windows)), key=lambda index: -sum(map(len, windows[index])))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        rows = [[*windows[index][0], *windows[index][1]] for index in chosen]
        padded = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
        for row, ids in enumerate(rows):
            padded[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        with torch.inference_mode(), autocast(device, precision):
            logits = model(padded.to(device)).logits
        for row, index in enumerate(chosen):
            targets = torch.tensor(list(windows[index][1]), device=device)
            if not len(targets):
                continue
            stop = len(rows[row]) - 1
            own = logits[row, stop - len(targets) : stop].float()
            scores = own.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
            if masks is not None:
                scores = scores * torch.tensor(masks[index], device=device)
            greedy = bool((own[:, :vocab_size].argmax(-1) == targets).all())
            results[index] = float(scores.sum()), greedy
    return results
