"""Half-precision weights of a run: what is written beside its tensors. When, is `saving`'s business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from llm_pretrain.checkpoints import save_weights
from llm_pretrain.config import Config
from llm_pretrain.data import TokenStore
from llm_pretrain.errors import CheckpointError
from llm_pretrain.training.card import card_facts
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.run_folder import RunFolder


def weights_writer(
    config: Config,
    engine: Engine,
    folder: RunFolder,
    stores: list[TokenStore],
    progress: Progress,
    tensors: dict[str, Tensor],
    *,
    best_loss: float | None = None,
) -> Callable[[], Path]:
    """What writes the weights of this step, or `weights/best`, whatever `progress` says when it is called.

    It raises CheckpointError where they cannot be written, DivergedError where a value is not finite.
    """
    store, then = stores[0], replace(progress)

    def write() -> Path:
        try:
            card = card_facts(config, engine, stores, then, is_best=best_loss is not None)
        except OSError as error:  # of the stores
            raise CheckpointError(f"{folder.weights}: the model card cannot be written: {error}") from error
        return save_weights(
            folder.weights,
            then.step,
            tensors,
            config.model,
            dtype=config.checkpoint.weights_dtype,
            tokenizer_folder=store.tokenizer_folder,
            token_ids={
                "bos_token_id": store.bos_token_id,
                "eos_token_id": store.eos_token_id,
                "pad_token_id": store.pad_token_id,
            },
            keep_last=config.checkpoint.keep_last,
            sequence_length=config.training.sequence_length,
            best_loss=best_loss,
            card=card,
        )

    return write
