"""Loss, perplexity and bits per byte of an opened model, on token stores as training does, or on files.

On a store these are the batches, the arithmetic and the code of a run's own evaluation. Files are tokenised
into a store that lives as long as the evaluation, so that every input format of `prepare` is read.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands._scoring import autocast, rolling_windows, score_windows
from llm_pretrain.config import Config, SourceConfig
from llm_pretrain.errors import DataError

if TYPE_CHECKING:
    from llm_pretrain.commands._source import Source
    from llm_pretrain.data import Batch, TokenStore

ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this much of the text, from its beginning."""


@dataclass(frozen=True)
class Figures:
    """What an evaluation found.

    Args:
        loss: Mean cross-entropy of the targets, in nats.
        perplexity: e to the loss.
        bits_per_byte: Cross-entropy of the text's tokens, special ones left out, per UTF-8 byte of them; None
            without text.
        tokens: Targets.
        bytes: UTF-8 bytes of the targets.
        zlib_bits_per_byte: What zlib at level 9 needs for the split's or the files' text.
        sequence_length: Positions that the model saw at once.
        sequences: How many of them; of `rolling` its windows.
        sources: Of each of several stores its loss and bits per byte; None where nothing was drawn from it.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    zlib_bits_per_byte: float | None
    sequence_length: int
    sequences: int
    sources: dict[str, dict[str, float | None]] = field(default_factory=dict)


def evaluate_stores(source: Source, config: Config, split: str) -> Figures:
    """Evaluate on a split of `data.sources`, packed and ordered as `config` says.

    Raises:
        DataError: a store is broken, has another tokenizer, or no target in this split.
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
        sources={
            name: {key: metrics[f"eval/source/{name}/{key}"] for key in ("loss", "bits_per_byte")}
            for name in (names if len(names) > 1 else [])
        },
    )


def _names(config: Config) -> list[str]:
    """What the sources are called, as in the run's metrics; two of one name by their paths."""
    labels = [each.label for each in config.data.sources]
    return labels if len(set(labels)) == len(labels) else [each.store for each in config.data.sources]


def evaluate_files(source: Source, config: Config, inputs: Sequence[str], *, rolling: bool) -> Figures:
    """Evaluate on files of any format that `prepare` reads, all of their documents.

    Args:
        source: The model.
        config: Gives sequence length, packing, micro batch size, precision and `evaluation.max_batches`.
        inputs: Files and folders.
        rolling: lm-eval's windows (see `rolling_windows`) instead of training's packed sequences.

    Raises:
        DataError: a file is missing or broken, or there is no text in them.
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
    """Over lm-eval's windows: the document's own tokens after its first, without the end token."""
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
    scores = score_windows(
        source.model,
        windows,
        batch_size=config.training.micro_batch_size,
        precision=config.training.precision,
        masks=masks,
    )
    kept = [
        token
        for (_, predicted), mask in zip(windows, masks, strict=True)
        for token, counts in zip(predicted, mask, strict=True)
        if counts
    ]
    if not kept:
        raise DataError(f"{', '.join(store.facts['inputs'])}: expected text to evaluate on, found none")
    size = int(token_bytes[kept].sum())
    nats = -math.fsum(score for score, _ in scores)
    loss = nats / len(kept)
    return Figures(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=nats / (math.log(2) * size) if size else None,
        tokens=len(kept),
        bytes=size,
        zlib_bits_per_byte=_zlib_of([store], "train"),
        sequence_length=length,
        sequences=len(windows),
    )


def _zlib_of(stores: Sequence[TokenStore], split: str) -> float | None:
    """zlib's bits per byte of a split's text, put together from its tokens; None without text."""
    compressor = zlib.compressobj(9)
    taken = written = 0
    for store in stores:
        pieces = store.tokenizer().token_pieces()
        for ids, _ in store.split(split).iterate():
            if taken >= ZLIB_LIMIT:
                break
            text = b"".join(pieces[token] for token in ids.tolist())
            taken += len(text)
            written += len(compressor.compress(text))
    return 8 * (written + len(compressor.flush())) / taken if taken else None


class _Counted(Sequence["Batch"]):
    """Batches that are counted as they are taken, each of them once, with a bar on a terminal."""

    def __init__(self, batches: Sequence[Batch], token_bytes: Any):
        from tqdm import tqdm

        self._batches, self._token_bytes = batches, token_bytes
        self._bar = tqdm(total=len(batches), unit="batch", disable=None, leave=False)
        self.tokens = self.bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # no slices: taken one by one
        batch = self._batches[index]
        labels = batch.labels[batch.loss_mask]
        self.tokens += batch.num_loss_tokens
        self.bytes += int(self._token_bytes[labels.numpy()].sum())
        self._bar.update()
        return batch

    def close(self) -> None:
        self._bar.close()


class _OneProcess:
    """What the evaluation asks of an engine, for a single process that trains nothing."""

    rank, world_size = 0, 1

    def __init__(self, source: Source, precision: str):
        self.model, self.device, self._precision = source.model, source.device, precision

    def forward(self, batch: Batch) -> Any:
        with autocast(self.device, self._precision):
            return self.model(**batch.model_inputs())

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def model_and_optimizer(self) -> tuple[Any, None]:
        return self.model, None
