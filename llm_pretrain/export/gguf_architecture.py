"""Which architecture of llama.cpp computes what our decoder computes, its metadata and its tensor names.

No file is opened here. What llama.cpp has no architecture for is refused by the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import ConfigError

_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers for `expert_gating_func`."""

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
"""Name inside a layer, ours -> llama.cpp's."""
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_architecture(model: ModelConfig) -> str:
    """llama.cpp's name of the architecture; ConfigError names every field that none has.

    Plain experts are `qwen3moe` (QK-norm) or `llama` (Mixtral): softmax weights, normalised, experts in
    every layer, no shared one. Everything else is `glm4moe`, whose metadata leaves all that open.
    """
    if not model.moe_layers:
        return "qwen3" if model.qk_norm else "llama"
    if model.moe_layers[0] != model.num_hidden_layers - len(model.moe_layers):
        raise ConfigError(
            "model.decoder_sparse_step: llama.cpp has dense layers before those of experts only, not between "
            f"them; expected 1, found {model.decoder_sparse_step}; export to huggingface"
        )
    is_plain = (
        len(model.moe_layers) == model.num_hidden_layers
        and model.norm_topk_prob
        and model.scoring_func == "softmax"
        and model.n_shared_experts == 0
        and model.routed_scaling_factor == 1
        and model.router_bias_update_rate == 0
    )
    if not is_plain:
        return "glm4moe"
    return "qwen3moe" if model.qk_norm else "llama"


def missing_in_glm4moe(model: ModelConfig, present: Collection[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Our names and shapes of what `glm4moe` always has, to be written as zeros where we have none.

    The bias on the choice of experts, and a shared expert: zeros change nothing.
    """
    hidden, size = model.hidden_size, model.expert_intermediate_size
    for layer in model.moe_layers:
        mlp = f"model.layers.{layer}.mlp."
        if mlp + "gate.e_score_correction_bias" not in present:
            yield mlp + "gate.e_score_correction_bias", (model.num_experts,)
        if not model.n_shared_experts:
            yield mlp + "shared_experts.gate_proj.weight", (size, hidden)
            yield mlp + "shared_experts.up_proj.weight", (size, hidden)
            yield mlp + "shared_experts.down_proj.weight", (hidden, size)


def has_interleaved_rotary(architecture: str) -> bool:
    """Whether rotated pairs lie side by side (Llama's own order), not half a head apart (transformers')."""
    return architecture == "llama"


def gguf_metadata(model: ModelConfig, architecture: str) -> dict[str, int | float | str | bool]:
    """llama.cpp's hyperparameters, without the architecture's prefix."""
    head_dim = model.attention_head_dim
    is_mixtral = architecture == "llama" and bool(model.moe_layers)
    metadata: dict[str, int | float | str | bool] = {
        "context_length": model.max_position_embeddings,
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": model.expert_intermediate_size if is_mixtral else model.intermediate_size,
        "vocab_size": model.vocab_size or 0,
        "attention.head_count": model.num_attention_heads,
        "attention.head_count_kv": model.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": model.rope_theta,
    }
    if model.rope_type != "default":
        metadata |= {"rope.scaling.type": model.rope_type, "rope.scaling.factor": model.rope_factor}
    if model.rope_type == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": model.rope_original_context,
            "rope.scaling.yarn_beta_fast": model.rope_beta_fast,
            "rope.scaling.yarn_beta_slow": model.rope_beta_slow,
        }
    if model.moe_layers:
        metadata |= {
            "expert_count": model.num_experts,
            "expert_used_count": model.num_experts_per_tok,
            "expert_feed_forward_length": model.expert_intermediate_size,
        }
    if architecture == "glm4moe":
        metadata |= {
            "expert_shared_count": max(model.n_shared_experts, 1),
            "expert_gating_func": _SIGMOID if model.scoring_func == "sigmoid" else _SOFTMAX,
            "expert_weights_norm": model.norm_topk_prob,
            "expert_weights_scale": model.routed_scaling_factor,
            "leading_dense_block_count": model.moe_layers[0],
        }
    return metadata


def gguf_name(name: str, architecture: str) -> str | None:
    """llama.cpp's name of a tensor of ours, its experts stacked; None where it has none."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if not match or match[2] not in _NAMES:
        return None
    inner = _NAMES[match[2]]
    if inner == "ffn_norm.weight" and architecture == "glm4moe":
        inner = "post_attention_norm.weight"
    return f"blk.{match[1]}.{inner}"
