"""Presets as tests of sizes use them."""

from __future__ import annotations

import dataclasses

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config


def preset(name: str) -> Config:
    """A preset with a vocabulary, in fp32 where it leaves the precision open."""
    config = load_config(["--config", name], needs_data=False, has_bf16=False, world_size=1)
    size = config.model.vocab_size or 4096
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))
