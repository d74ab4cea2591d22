"""What a checkpoint and a configuration must agree on for a resume to continue the same run."""

from __future__ import annotations

from dataclasses import asdict

from llm_pretrain.config import Config, ModelConfig
from llm_pretrain.data import data_fingerprint

NOT_IN_FINGERPRINT = {"max_position_embeddings", "init_from", "zero_init_residual"}
"""Model fields that change neither shapes nor arithmetic of a run that has a checkpoint."""


def fingerprints(config: Config) -> dict[str, str]:
    """What must be equal for a resume at any step to continue the same run."""
    # an average of the parameters is state that a checkpoint has or has not, whatever its decay
    averaging = {"optimizer.ema_decay": "more than 0"} if config.optimizer.ema_decay else {}
    return (
        model_fingerprint(config.model)
        | data_fingerprint(config)
        | {
            "run.seed": str(config.run.seed),
            "training.global_batch_size": str(config.training.global_batch_size),
            "optimizer.name": config.optimizer.name,
        }
        | averaging
    )


def model_fingerprint(model: ModelConfig) -> dict[str, str]:
    """The fields that decide shapes and arithmetic, by their full names."""
    fields = {f"model.{n}": str(value) for n, value in asdict(model).items() if n not in NOT_IN_FINGERPRINT}
    if model.rope_type == "yarn":  # where it is not set, it follows from max_position_embeddings
        fields["model.original_max_position_embeddings"] = str(model.rope_original_context)
    return fields
