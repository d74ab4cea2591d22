"""Tokens per second and core of tokenizing and of batch assembly, by process CPU time.

The corpus is the standard library's source. Assembly includes masks, document ids, positions, labels and
the digest, and runs as in training's loop, which collects no garbage meanwhile. Goals are judged by the worse
end of the interval of interleaved repeats.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring import ENOUGH, Interval
from benchmarks.reporting import report
from llm_pretrain.config.tree import Config, DataConfig, SourceConfig, TrainingConfig
from llm_pretrain.data.encoding import Encoder
from llm_pretrain.data.loader import global_batches
from llm_pretrain.data.packing import pack
from llm_pretrain.data.preparation import BATCH_BYTES, Preparation, prepare_store
from llm_pretrain.data.readers import batch_records, read_records
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer, use_one_thread
from llm_pretrain.training.trainer import gc_schedule

GOALS = {"tokenize": 1.4, "assemble": 50.0}
"""Beginning of a case's name -> least million tokens per second and core."""


def tokenizing(tokenizer_folder: Path) -> Callable[[], int]:
    """Everything a worker of `prepare` does, with nothing known from the repeat before."""
    batches = list(batch_records(read_records(["stdlib"]), BATCH_BYTES))

    def measured() -> int:
        encoder = Encoder(open_tokenizer(tokenizer_folder), threshold=0, fail_on_error=True)
        return sum(len(encoder.encode(batch).ids) for batch in batches)

    return measured


def assembling(store: TokenStore, sequence_length: int, packing: str) -> Callable[[], int]:
    """All micro batches of a run, from the loader that training reads."""
    steps = max(1, 4_000_000 // (64 * sequence_length))
    config = Config(
        data=DataConfig(sources=[SourceConfig(str(store.path))], packing=packing),  # type: ignore[arg-type]
        training=TrainingConfig(
            sequence_length=sequence_length, micro_batch_size=8, global_batch_size=64, max_steps=steps
        ),
    )
    loader = global_batches(config, start_step=0)
    return lambda: sum(batch.input_ids.numel() for batch in loader)


def short_documents(folder: Path, tokenizer_folder: Path) -> TokenStore:
    """About 4 M tokens in lognormal documents (median 250, sigma 0.8), a third of their tokens masked."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(2, generator.lognormal(np.log(250), 0.8, 12_000)).astype(np.int64)
    with StoreWriter(folder, open_tokenizer(tokenizer_folder)) as writer:
        ids = generator.integers(4, 1000, lengths.sum())
        mask = generator.random(len(ids)) < 2 / 3
        writer.splits["train"].append(ids, lengths, mask, len(ids), np.arange(len(lengths)))
        writer.commit({"zlib_bits_per_byte": None})
    return TokenStore(folder)


def packing_documents() -> Callable[[], int]:
    """Best fit of 200,000 documents into sequences of 2048; counts their tokens."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(2, generator.lognormal(np.log(250), 0.8, 200_000)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    def measured() -> int:
        pack(offsets, 2048, "best_fit")
        return int(offsets[-1])

    return measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--vocab_size", type=int, default=6400)
    parser.add_argument("--repeats", type=int, default=ENOUGH)


def run(arguments: argparse.Namespace) -> None:
    """Prints a row per case: million tokens per second and core."""
    use_one_thread()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        cases = _cases(Path(temporary), arguments.vocab_size)
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.repeats):
            for name, measured in cases.items():
                with gc_schedule() if name.startswith("assemble") else nullcontext():
                    before = time.process_time()
                    tokens = measured()
                    rates[name].append(tokens / (time.process_time() - before) / 1e6)
    for name, found in rates.items():
        least = next((least for prefix, least in GOALS.items() if name.startswith(prefix)), None)
        report(name, Interval.of(found), unit="M tokens/s per core", digits=2, at_least=least)


def _cases(folder: Path, vocab_size: int) -> dict[str, Callable[[], int]]:
    """What is measured; trains a tokenizer and writes two stores first."""
    started = time.perf_counter()
    report = train_tokenizer(["stdlib"], folder / "tokenizer", vocab_size)
    seconds = time.perf_counter() - started
    print(
        f"tokenizer of {vocab_size} in {seconds:.1f} s, {report.bytes_per_token:.3f} bytes a token",
        flush=True,
    )
    store = prepare_store(Preparation(["stdlib"], folder / "tokenizer", folder / "store", workers=1))
    masked = short_documents(folder / "masked", folder / "tokenizer")
    cases = {"tokenize": tokenizing(folder / "tokenizer"), "pack 200,000 documents": packing_documents()}
    for length in (512, 2048):
        for packing in ("best_fit", "concat"):
            cases[f"assemble {length} {packing}"] = assembling(store, length, packing)
        name = f"assemble {length} best_fit, short masked documents"
        cases[name] = assembling(masked, length, "best_fit")
    return cases
