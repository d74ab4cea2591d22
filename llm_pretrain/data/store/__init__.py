"""Token stores: the on-disk format that `llm-pretrain prepare` writes and training reads."""

from llm_pretrain.data.store.token_store import TokenStore

__all__ = [
    "TokenStore",
]
