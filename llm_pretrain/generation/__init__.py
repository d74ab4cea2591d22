"""Text from a decoder: sampling with a key-value cache, one prompt or many.

Knows token ids only: no tokenizer and no files.
"""
