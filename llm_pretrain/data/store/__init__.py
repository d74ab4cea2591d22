"""Token stores: the on-disk format that `llm-pretrain prepare` writes and training reads."""

from llm_pretrain.data.store.token_store import StoreSplit, TokenStore

__all__ = ["StoreSplit", "TokenStore"]
