"""Corpora and foreign token files turned into token stores."""

from llm_pretrain.data.prepare.preparation import Preparation, input_bytes, prepare_store

__all__ = ["Preparation", "input_bytes", "prepare_store"]
