"""From corpora to batches: documents, tokenizers, token stores, packing, sample order, batches.

What needs torch is imported when it is asked for, so that the processes that tokenise start quickly.
"""

from typing import TYPE_CHECKING, Any

from llm_pretrain.data.token_store import StoreSplit, TokenStore
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from llm_pretrain.data.assembly import Batch
    from llm_pretrain.data.batches import (
        EvaluationBatches,
        MicroBatches,
        MicroBatchSampler,
        data_fingerprint,
        evaluation_batches,
        global_batches,
        open_stores,
        sequences_per_epoch,
        shard,
        tokens_per_epoch,
        train_samples,
        weight_changes_fingerprint,
    )
    from llm_pretrain.data.chat import chat_prompt_ids, encode_chat
    from llm_pretrain.data.conversion import FORMATS, Conversion, ConversionReport, convert
    from llm_pretrain.data.inspection import Sample, inspect_store, sample_documents
    from llm_pretrain.data.prepare import Preparation, input_bytes, prepare_store
    from llm_pretrain.data.sample_order import SampleOrder
    from llm_pretrain.data.tokenizer_training import TOKENIZER_TYPES, TokenizerReport, train_tokenizer

__all__ = [
    "FORMATS",
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
    "prepare_store",
    "sample_documents",
    "sequences_per_epoch",
    "shard",
    "tokens_per_epoch",
    "train_samples",
    "train_tokenizer",
    "weight_changes_fingerprint",
]

_MODULES = {
    "Batch": "assembly",
    "FORMATS": "conversion",
    "Conversion": "conversion",
    "ConversionReport": "conversion",
    "convert": "conversion",
    "Sample": "inspection",
    "inspect_store": "inspection",
    "sample_documents": "inspection",
    "SampleOrder": "sample_order",
    "Preparation": "prepare",
    "chat_prompt_ids": "chat",
    "encode_chat": "chat",
    "input_bytes": "prepare",
    "prepare_store": "prepare",
    "TOKENIZER_TYPES": "tokenizer_training",
    "TokenizerReport": "tokenizer_training",
    "train_tokenizer": "tokenizer_training",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'batches')}"), name)
