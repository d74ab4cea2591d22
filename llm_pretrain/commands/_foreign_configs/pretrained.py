"""The `model` section of a Hugging Face folder. Its weights are `model.init_from`'s business."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llm_pretrain.commands._foreign_configs.imported import Imported
from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import ConfigError
from llm_pretrain.export import model_config_from_huggingface, read_config

_OF_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "n_shared_experts"),
    *("scoring_func", "routed_scaling_factor", "first_k_dense_replace", "decoder_sparse_step"),
    *("router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate"),
)
_OF_SCALING = (
    *("rope_type", "rope_factor", "original_max_position_embeddings", "rope_beta_fast", "rope_beta_slow"),
)


def from_pretrained(folder: str) -> Imported:
    """The section that `model.init_from: FOLDER` fits.

    A dense folder's leaves the expert settings out, so that the file also goes over a configuration with
    experts, which is then upcycled.

    Raises:
        ConfigError: an architecture that our decoder lacks.
        CheckpointError: no config.json, or a broken one.
    """
    try:
        model = model_config_from_huggingface(read_config(folder))
    except ConfigError as error:
        raise ConfigError(*(f"{Path(folder)}: {problem}" for problem in error.problems)) from error
    left_out = {"init_from"} | (set() if model.moe_layers else set(_OF_EXPERTS))
    left_out |= set() if model.rope_type != "default" else set(_OF_SCALING)
    values = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(ModelConfig)
        if field.name not in left_out and getattr(model, field.name) is not None
    }
    result = Imported(folder, {"model": values})
    result.note(
        f"add `init_from: {folder}` to the section to start from its weights, and prepare the data with"
    )
    result.notes[-1] += f" `llm-pretrain prepare --tokenizer {folder}`, since its tokens are what they know"
    return result
