"""Text from a decoder: sampling with a key-value cache, one prompt or many. Knows no tokenizer and no files."""
