"""A token store with stretches of garbage that a run meets at known steps: a real cause of real spikes."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from support.corpora import make_config, make_tokenizer, write_jsonl
from support.launching import run_options

from llm_pretrain.data.loader import train_samples
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore

SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE, STEPS = 32, 8, 24
POISONED = (18, 19, 22)
"""Steps, counted from 1, that train on nothing but garbage."""

DATA_OPTIONS = (
    *("--data.packing", "pad", "--training.sequence_length", str(SEQUENCE_LENGTH)),
    *("--training.global_batch_size", str(GLOBAL_BATCH_SIZE), "--training.max_steps", str(STEPS)),
)


def spike_options(store: Path, folder: Path, action: str, *more: str) -> list[str]:
    """Of a run over `poisoned_store` that notices the garbage, with a save of every fourth step."""
    return run_options(
        "tiny-moe",
        store,
        "training.micro_batch_size=8 model.router_bias_update_rate=1e-3 model.hidden_dropout=0.1 "
        "optimizer.learning_rate=3e-2 schedule.name=constant checkpoint.save_steps=4 "
        f"evaluation.eval_steps=0 logging.parameters_sha256=true training.spike_action={action}",
        *DATA_OPTIONS,
        *more,
        folder=folder,
    )


def poisoned_store(folder: Path, steps: Collection[int] = POISONED) -> Path:
    """A store of one short, regular document per sequence, those of `steps` random bytes instead."""
    count = STEPS * GLOBAL_BATCH_SIZE
    clean = _store(folder / "clean", count, ())
    config = make_config(
        clean,
        sequence_length=SEQUENCE_LENGTH,
        micro_batch_size=1,
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=STEPS,
        packing="pad",
    )
    order = train_samples(config).order
    first_samples = [(step - 1) * GLOBAL_BATCH_SIZE for step in steps]
    bad = {order[first + slot][1] for first in first_samples for slot in range(GLOBAL_BATCH_SIZE)}
    store = _store(folder / "store", count, bad)
    poisoned = replace(config, data=make_config(store, packing="pad").data)
    assert [order[n] for n in range(count)] == [train_samples(poisoned).order[n] for n in range(count)]
    return store.path


def _store(folder: Path, count: int, bad: Collection[int]) -> TokenStore:
    generator = random.Random(5)
    garbage = ["".join(chr(generator.randrange(33, 127)) for _ in range(28)) for _ in range(count)]
    texts = [
        garbage[number] if number in bad else f"{number:04d} aaaaaaaaaaaaaaaaaaaaa" for number in range(count)
    ]
    corpus = write_jsonl(folder.with_name(folder.name + "-corpus.jsonl"), [{"text": text} for text in texts])
    tokenizer = make_tokenizer(folder.with_name(folder.name + "-tokenizer"))
    return prepare_store(Preparation([str(corpus)], tokenizer, folder, validation_fraction=0.0, workers=1))
