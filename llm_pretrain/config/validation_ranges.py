"""What one number may be on its own, by field name; part of `validation.py`.

A bound here is no advice: beyond it no run could begin, and what would say so is an overflow somewhere
inside of a library, or a list that fills the memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from llm_pretrain.config.tree import Config

_POSITIVE = (
    *("model.vocab_size", "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers"),
    *("model.num_attention_heads", "model.num_key_value_heads", "model.head_dim"),
    *("model.max_position_embeddings", "model.rms_norm_eps", "model.initializer_range", "model.rope_theta"),
    *("model.rope_factor", "model.original_max_position_embeddings", "model.routed_scaling_factor"),
    *("model.rope_beta_fast", "model.rope_beta_slow", "evaluation.sample_tokens"),
    *("model.num_experts_per_tok", "model.moe_intermediate_size", "model.decoder_sparse_step"),
    *("optimizer.learning_rate", "optimizer.adam_epsilon", "schedule.decay_steps"),
    *("optimizer.muon_learning_rate", "optimizer.base_hidden_size"),
    *("training.sequence_length", "training.micro_batch_size", "training.global_batch_size"),
    *("training.max_steps", "training.max_skipped_steps", "evaluation.max_batches"),
    *("logging.logging_steps", "distributed.cpu_threads", "distributed.timeout_seconds"),
)
_NOT_NEGATIVE = (
    *("run.seed", "data.seed", "data.num_workers", "model.num_experts", "model.first_k_dense_replace"),
    "model.n_shared_experts",
    *("model.router_aux_loss_coef", "model.router_z_loss_coef", "model.router_bias_update_rate"),
    *("optimizer.weight_decay", "schedule.warmup_steps", "schedule.min_learning_rate"),
    *("training.max_grad_norm", "training.z_loss_coef", "checkpoint.save_steps", "evaluation.eval_steps"),
)
_BELOW_ONE = (
    *("model.attention_dropout", "model.hidden_dropout"),
    *("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.muon_momentum", "optimizer.ema_decay"),
)
_AT_LEAST = {
    # fp32 rounds anything less to 0, and what it keeps from being divided by 0 is
    "model.rms_norm_eps": 1e-37,
    "optimizer.adam_epsilon": 1e-37,
    "model.rope_theta": 1.0,  # below, later pairs of dimensions turn faster, without end
}
_AT_MOST = {
    "model.vocab_size": 1 << 28,
    **dict.fromkeys(("model.hidden_size", "model.intermediate_size", "model.moe_intermediate_size"), 1 << 20),
    "model.num_hidden_layers": 1 << 12,
    **dict.fromkeys(
        (
            *("model.num_attention_heads", "model.num_key_value_heads", "model.head_dim"),
            "model.num_experts",
        ),
        1 << 16,
    ),
    "model.n_shared_experts": 1 << 10,
    "training.sequence_length": 1 << 24,
    "training.micro_batch_size": 1 << 20,
    **dict.fromkeys(("data.num_workers", "distributed.cpu_threads"), 1 << 10),
    "distributed.timeout_seconds": 2_000_000,  # 23 days: libraries count milliseconds in 32 bits
    **dict.fromkeys(("run.seed", "data.seed"), (1 << 63) - 1),
}
LARGEST_INTEGER, LARGEST_NUMBER = (1 << 31) - 1, 1e12
"""For every other field: products of two still fit 64 bits, and squares a float."""


def range_problems(config: Config) -> Iterator[str]:
    """One line for each field whose own value is impossible."""
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                name = f"{section.name}.{field.name}"
                if expected := _expected(name, value):
                    yield f"{name}: expected {expected}, found {value}"
    if config.checkpoint.keep_last < 2:
        yield (
            f"checkpoint.keep_last: expected 2 or more, found {config.checkpoint.keep_last}; the last but "
            "one is what a run falls back to when the last is damaged"
        )


def _expected(name: str, value: float) -> str | None:
    """What the field `name` takes, where it does not take `value`."""
    most = _AT_MOST.get(name, LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER)
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if name in _POSITIVE and value <= 0:
        return "more than 0"
    if name in _NOT_NEGATIVE and value < 0:
        return "0 or more"
    if name in _BELOW_ONE and not 0 <= value < 1:
        return "at least 0 and less than 1"
    if value < _AT_LEAST.get(name, -most):
        return f"at least {_AT_LEAST.get(name, -most):g}"
    return None if value <= most else f"at most {most:g}" if isinstance(most, float) else f"at most {most}"
