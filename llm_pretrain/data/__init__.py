"""From corpora to batches: readers, tokenizers, token stores, packing, sample order, batches.

Names are imported when they are first used: training loads no readers, and tokenising processes no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_pretrain.data.chat.rendering import chat_prompt_ids, encode_chat
    from llm_pretrain.data.loader.assembly import Batch, padded_offsets
    from llm_pretrain.data.loader.batches import (
        EvaluationBatches,
        MicroBatches,
        MicroBatchSampler,
        data_fingerprint,
        evaluation_batches,
        global_batches,
        open_stores,
        samples_by_source,
        sequences_per_epoch,
        shard,
        shared_memory_problem,
        tokens_per_epoch,
        train_samples,
        weight_changes_fingerprint,
        worker_errors,
    )
    from llm_pretrain.data.loader.sample_order import SampleOrder
    from llm_pretrain.data.prepare.conversion import Conversion, ConversionReport, convert
    from llm_pretrain.data.prepare.preparation import Preparation, input_bytes, prepare_store
    from llm_pretrain.data.sources.inputs import saved_splits
    from llm_pretrain.data.store.inspection import Sample, inspect_store, sample_documents
    from llm_pretrain.data.store.token_store import StoreSplit, TokenStore
    from llm_pretrain.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
    from llm_pretrain.data.tokenizers.training import TOKENIZER_TYPES, TokenizerReport, train_tokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "Batch",
    "Conversion",
    "ConversionReport",
    "EvaluationBatches",
    "MicroBatchSampler",
    "MicroBatches",
    "Preparation",
    "Sample",
    "SampleOrder",
    "StoreSplit",
    "TokenStore",
    "Tokenizer",
    "TokenizerReport",
    "chat_prompt_ids",
    "convert",
    "data_fingerprint",
    "encode_chat",
    "evaluation_batches",
    "global_batches",
    "input_bytes",
    "inspect_store",
    "open_stores",
    "open_tokenizer",
    "padded_offsets",
    "prepare_store",
    "sample_documents",
    "samples_by_source",
    "saved_splits",
    "sequences_per_epoch",
    "shard",
    "shared_memory_problem",
    "tokens_per_epoch",
    "train_samples",
    "train_tokenizer",
    "weight_changes_fingerprint",
    "worker_errors",
]

_MODULES = {
    "chat.rendering": ("chat_prompt_ids", "encode_chat"),
    "loader.assembly": ("Batch", "padded_offsets"),
    "loader.sample_order": ("SampleOrder",),
    "prepare.conversion": ("Conversion", "ConversionReport", "convert"),
    "prepare.preparation": ("Preparation", "input_bytes", "prepare_store"),
    "sources.inputs": ("saved_splits",),
    "store.inspection": ("Sample", "inspect_store", "sample_documents"),
    "store.token_store": ("StoreSplit", "TokenStore"),
    "tokenizers.tokenizer": ("Tokenizer", "open_tokenizer"),
    "tokenizers.training": ("TOKENIZER_TYPES", "TokenizerReport", "train_tokenizer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'loader.batches')}"), name)
