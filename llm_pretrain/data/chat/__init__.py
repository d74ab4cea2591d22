"""Conversations as token ids, rendered by the tokenizer's chat template, with a loss mask."""
