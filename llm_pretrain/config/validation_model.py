"""Contradictions between fields of the `model` section, by field name; part of `validation.py`.

What a single field may be on its own (positive, not negative, below one) is said there.
"""

from __future__ import annotations

from collections.abc import Iterator

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config

Relation = tuple[tuple[str, ...], str]
"""The fields that a contradiction is about, and its line."""


def model_relations(config: Config) -> Iterator[Relation]:
    """Every contradiction between fields of `config.model`, and with the sequence length."""
    model = config.model
    yield from attention_relations(model)
    names = ("training.sequence_length", "model.max_position_embeddings")
    if config.training.sequence_length > model.max_position_embeddings:
        yield (
            names,
            f"{names[0]}: expected at most {names[1]} = {model.max_position_embeddings}, "
            f"found {config.training.sequence_length}",
        )
    yield from _rope(model)
    yield from (_experts(model) if model.num_experts else _no_experts(model))


def attention_relations(model: ModelConfig) -> Iterator[Relation]:
    """Heads that do not divide up what they share."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    names = ("model.num_attention_heads", "model.num_key_value_heads")
    if kv_heads == 0 or heads % kv_heads:
        yield names, f"{names[0]}: expected a multiple of {names[1]} = {kv_heads}, found {heads}"
    names = ("model.hidden_size", "model.num_attention_heads")
    if model.head_dim is None and (heads == 0 or model.hidden_size % heads):
        yield (
            names,
            f"{names[0]}: expected a multiple of {names[1]} = {heads} where model.head_dim is not "
            f"set, found {model.hidden_size}",
        )
    elif (head_dim := model.head_dim or model.hidden_size // heads) % 2:
        names = ("model.head_dim", *names)
        yield (
            names,
            f"{names[0]}: expected an even width for rotary positions, found {head_dim}"
            + ("" if model.head_dim else f" = {names[1]} / {names[2]}"),
        )


def _rope(model: ModelConfig) -> Iterator[Relation]:
    """A field that the chosen scaling ignores is a contradiction too: it says something else was meant."""
    names = ("model.rope_factor", "model.rope_type")
    if model.rope_type == "default" and model.rope_factor != 1:
        yield (
            names,
            f"{names[0]}: expected 1 with {names[1]} = default, found {model.rope_factor}; "
            f"set {names[1]} to linear or yarn",
        )
    elif model.rope_type != "default" and model.rope_factor < 1:
        yield names, f"{names[0]}: expected 1 or more, found {model.rope_factor}"
    names = ("model.original_max_position_embeddings", "model.rope_type")
    original, longest = model.original_max_position_embeddings, model.max_position_embeddings
    if model.rope_type != "yarn":
        if original is not None:
            yield names, f"{names[0]}: expected none with {names[1]} = {model.rope_type}, found {original}"
        return
    names = ("model.rope_beta_fast", "model.rope_beta_slow")
    if model.rope_beta_fast <= model.rope_beta_slow:
        yield (
            names,
            f"{names[0]}: expected more than {names[1]} = {model.rope_beta_slow}, "
            f"found {model.rope_beta_fast}",
        )
    names = ("model.max_position_embeddings", "model.original_max_position_embeddings", "model.rope_factor")
    if original is None:
        names = (names[0], names[2])
        if model.rope_factor >= 1 and longest % model.rope_factor:
            yield (
                names,
                f"{names[0]}: expected a multiple of {names[1]} = {model.rope_factor} where "
                f"model.original_max_position_embeddings is not set, found {longest}",
            )
    elif not original <= longest <= original * model.rope_factor:
        yield (
            names,
            f"{names[0]}: expected at least {names[1]} = {original} and at most {names[2]} times that = "
            f"{original * model.rope_factor:g}, found {longest}",
        )
    names = ("model.rope_theta", "model.rope_type")
    if model.rope_theta <= 1:
        yield names, f"{names[0]}: expected more than 1 with {names[1]} = yarn, found {model.rope_theta}"


def _no_experts(model: ModelConfig) -> Iterator[Relation]:
    """Fields that only experts give a meaning, in a model that has none."""
    found = {
        "model.n_shared_experts": (model.n_shared_experts, 0),
        "model.scoring_func": (model.scoring_func, "softmax"),
        "model.routed_scaling_factor": (model.routed_scaling_factor, 1.0),
        "model.router_bias_update_rate": (model.router_bias_update_rate, 0.0),
    }
    for name, (value, default) in found.items():
        if value != default:
            names = (name, "model.num_experts")
            yield names, f"{name}: expected {default} with {names[1]} = 0, found {value}; set {names[1]}"
    if model.router_aux_loss_scope == "global_batch":
        names = ("model.router_aux_loss_scope", "model.num_experts")
        yield (
            names,
            f"{names[0]}: expected sequence or micro_batch with {names[1]} = 0, found global_batch; "
            f"set {names[1]}",
        )


def _experts(model: ModelConfig) -> Iterator[Relation]:
    names = ("model.num_experts_per_tok", "model.num_experts")
    if model.num_experts_per_tok > model.num_experts:
        yield (
            names,
            f"{names[0]}: expected at most {names[1]} = {model.num_experts}, "
            f"found {model.num_experts_per_tok}",
        )
    layers, dense, every = model.num_hidden_layers, model.first_k_dense_replace, model.decoder_sparse_step
    names = ("model.first_k_dense_replace", "model.num_hidden_layers")
    if dense > layers:
        yield names, f"{names[0]}: expected at most {names[1]} = {layers}, found {dense}"
        return
    names = ("model.num_experts", *names, "model.decoder_sparse_step")
    if every > 0 and layers // every * every <= dense:
        yield (
            names,
            f"{names[0]}: expected a layer that routes to the {model.num_experts} experts, found none with "
            f"{names[2]} = {layers}, {names[1]} = {dense}, {names[3]} = {every}",
        )
