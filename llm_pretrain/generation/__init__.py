"""Text from a decoder: sampling with a key-value cache, one prompt or many.

Knows token ids and the bytes they stand for: no tokenizer and no files.
"""

from llm_pretrain.generation.sampling import generate
from llm_pretrain.generation.text import TextStream

__all__ = ["TextStream", "generate"]
