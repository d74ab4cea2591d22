"""Loss, perplexity and bits per byte of a model on token stores and files, outside of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.config.tree import Config, SourceConfig
from llm_pretrain.errors import DataError

if TYPE_CHECKING:
    from llm_pretrain.data.assembly import Batch
    from llm_pretrain.data.store import TokenStore
    from llm_pretrain.data.tokenizers import Tokenizer
    from llm_pretrain.model.decoder import Decoder, DecoderOutput


@dataclass(frozen=True)
class Figures:
    """The results of an evaluation.

    Args:
        loss: Mean cross-entropy of the targets, in nats.
        perplexity: e to the loss.
        bits_per_byte: Cross-entropy of the text's tokens, without special tokens, in bits per UTF-8 byte;
            None without text.
        tokens: Targets.
        bytes: UTF-8 bytes of the targets.
        zlib_bits_per_byte: Bits per byte of zlib level 9 on the text of the split or the files.
        sequence_length: Positions of a sequence.
        sequences: Number of sequences.
        available: Sequences in the data; `evaluation.max_batches` may take only the first of them.
        sources: Loss and bits per byte of each of several stores; None for a store without sequences.
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


def evaluate_stores(model: Decoder, tokenizer: Tokenizer, config: Config, split: str) -> Figures:
    """Evaluate on a split of `data.sources` with the batches and the arithmetic of a run's own evaluation.

    Raises:
        DataError: A store is damaged, has another tokenizer, or no target in this split.
    """
    from tqdm import tqdm

    from llm_pretrain.data.loader import evaluation_batches, open_stores
    from llm_pretrain.distributed.collectives import OneRank
    from llm_pretrain.distributed.mesh import Place
    from llm_pretrain.model.kernels import autocast
    from llm_pretrain.training.evaluation import Evaluator, zlib_bits_per_byte

    stores = open_stores(config)
    for store in stores:
        if store.tokenizer_hash != tokenizer.hash:
            raise DataError(
                f"{store.path}: expected a store of the model's tokenizer ({tokenizer.hash[:12]}), "
                f"found another's ({store.tokenizer_hash[:12]}); prepare it with {tokenizer.folder}"
            )
    batches = evaluation_batches(config, split=split)
    names, device = _names(config), model.lm_head.weight.device

    def forward(batch: Batch) -> DecoderOutput:
        bar.update()
        with autocast(device.type, config.training.precision):
            return model(**batch.model_inputs())

    evaluator = Evaluator(OneRank(device), Place(), forward, batches, stores[0], lambda: False, names)
    with tqdm(total=len(batches), unit="batch", disable=None, leave=False) as bar:
        metrics = evaluator(model) or {}
    loss, perplexity = metrics.get("eval/loss"), metrics.get("eval/perplexity")
    if loss is None or perplexity is None:
        raise DataError(f"{stores[0].path}: expected tokens to evaluate on in the {split} split, found none")
    on_validation = split == "validation"
    return Figures(
        loss=loss,
        perplexity=perplexity,
        bits_per_byte=metrics.get("eval/bits_per_byte"),
        tokens=evaluator.tokens,
        bytes=evaluator.text_bytes,
        zlib_bits_per_byte=zlib_bits_per_byte(stores) if on_validation else _zlib_of(stores, split),
        sequence_length=config.training.sequence_length,
        sequences=sum(batches.sequences),
        available=sum(batches.available),
        sources={
            name: {key: metrics[f"eval/source/{name}/{key}"] for key in ("loss", "bits_per_byte")}
            for name in (names if len(names) > 1 else [])
        },
    )


def _names(config: Config) -> list[str]:
    """Names of the sources, as in the run's metrics; their paths if two names are equal."""
    labels = [each.label for each in config.data.sources]
    return labels if len(set(labels)) == len(labels) else [each.store for each in config.data.sources]


def evaluate_files(model: Decoder, tokenizer: Tokenizer, config: Config, inputs: Sequence[str]) -> Figures:
    """Evaluate on all documents of files, tokenized into a temporary store by `prepare`.

    Args:
        model: On its device, in eval mode.
        tokenizer: The model's.
        config: Gives sequence length, packing, micro batch size, precision and `evaluation.max_batches`.
        inputs: Files and folders.

    Raises:
        DataError: A file is missing or damaged, or the files have no text.
    """
    from llm_pretrain.data.preparation import Preparation, prepare_store

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store"
        prepared = Preparation(inputs, tokenizer.folder, path, validation_fraction=0.0, split="all")
        prepare_store(prepared)
        data = replace(config.data, sources=[SourceConfig(str(path))])
        return evaluate_stores(model, tokenizer, replace(config, data=data), "train")


def _zlib_of(stores: Sequence[TokenStore], split: str) -> float | None:
    """Bits per byte of zlib on a split's text, decoded from its tokens; None without text."""
    from llm_pretrain.data.preparation import ZlibRate

    packed = ZlibRate()
    for store in stores:
        pieces = store.tokenizer().token_pieces()
        for ids, _ in store.split(split).iterate():
            if packed.is_full:
                break
            packed.add(b"".join(pieces[token] for token in ids.tolist()))
    return packed.bits_per_byte()
