"""Conversations as token ids, rendered by the tokenizer's chat template, with a loss mask."""

from llm_pretrain.data.chat.rendering import chat_prompt_ids

__all__ = [
    "chat_prompt_ids",
]
