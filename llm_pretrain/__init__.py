"""Pretrain language models: two launch paths over one core."""

from llm_pretrain.version import __version__

__all__ = ["__version__"]
