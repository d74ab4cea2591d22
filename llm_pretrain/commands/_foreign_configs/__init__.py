"""Configurations of other frameworks as ours: read, never run, with every loss said."""

from llm_pretrain.commands._foreign_configs.imported import Imported
from llm_pretrain.commands._foreign_configs.litgpt import from_litgpt
from llm_pretrain.commands._foreign_configs.minimind import from_minimind
from llm_pretrain.commands._foreign_configs.nanogpt import from_nanogpt
from llm_pretrain.commands._foreign_configs.pretrained import from_pretrained

__all__ = ["Imported", "from_litgpt", "from_minimind", "from_nanogpt", "from_pretrained"]
