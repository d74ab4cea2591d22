"""Gathers the facts of a run for the model card in its weights; how a card reads is `export`'s business."""

from __future__ import annotations

from collections.abc import Sequence

from llm_pretrain.checkpoints import environment
from llm_pretrain.config import Config
from llm_pretrain.data import TokenStore
from llm_pretrain.export import CardFacts, CardSource
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.progress import Progress

_VERSIONS = ("torch", "llm_pretrain", "python")
"""Nothing that tells one machine from another of the same kind."""


def card_facts(
    config: Config, engine: Engine, stores: Sequence[TokenStore], progress: Progress, *, is_best: bool
) -> CardFacts:
    """What is to be said of the weights of this step."""
    splits = [store.split("train") for store in stores]
    versions = environment(engine.device)
    return CardFacts(
        config=config,
        step=progress.step,
        tokens_seen=progress.tokens_seen,
        sources=[
            CardSource(source.label, source.weight, split.documents, int(split.offsets[-1]))
            for source, split in zip(config.data.sources, splits, strict=True)
        ],
        tokenizer_size=stores[0].vocab_size,
        tokenizer_hash=stores[0].tokenizer_hash,
        has_chat_template=(stores[0].tokenizer_folder / "chat_template.jinja").is_file(),
        world_size=engine.world_size,
        versions={name: versions.get(name) for name in _VERSIONS},
        evaluation=progress.evaluation,
        evaluation_step=progress.evaluation_step,
        is_best=is_best,
    )
