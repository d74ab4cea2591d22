"""`config.json`: our model's shape in the words of transformers 5 and 4 and mlx-lm, and back.

No weights here. An architecture is chosen only where it computes exactly what our decoder computes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import ConfigError

NATIVE_MODEL_TYPE = "llm_pretrain"
"""`model_type` of weights that no architecture of transformers can hold."""

_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COMMON = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_dropout",
)
_ROPE_THETA_DEFAULTS = {"qwen3": 1e4, "llama": 1e4, "qwen3_moe": 1e4, "mixtral": 1e6}
_NATIVE_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


def _model_type(model: ModelConfig) -> str:
    """The architecture that computes what `model` does; ConfigError names the fields that none has."""
    if not model.moe_layers:
        return "qwen3" if model.qk_norm else "llama"
    problems = []
    if model.router_bias_update_rate > 0:
        problems.append(
            "model.router_bias_update_rate: no architecture that transformers knows adds a bias to softmax "
            f"routing; expected 0, found {model.router_bias_update_rate}"
        )
    if not model.qk_norm and not model.norm_topk_prob:
        problems.append(
            "model.norm_topk_prob: Mixtral (experts without model.qk_norm) always normalises; expected true, "
            "found false; train with model.qk_norm: true to export as Qwen3-MoE"
        )
    if not model.qk_norm and len(model.moe_layers) != model.num_hidden_layers:
        problems.append(
            "model.first_k_dense_replace, model.decoder_sparse_step: Mixtral (experts without model.qk_norm) "
            f"has experts in every layer; expected {model.num_hidden_layers}, found {len(model.moe_layers)}; "
            "train with model.qk_norm: true to export as Qwen3-MoE"
        )
    if problems:
        raise ConfigError(*problems)
    return "qwen3_moe" if model.qk_norm else "mixtral"


def huggingface_config(
    model: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
    dtype: str,
) -> dict[str, Any]:
    """`config.json` that transformers 5 and 4 and mlx-lm read alike.

    Version 5 keeps the rotary base in `rope_parameters` and calls the experts' number
    `num_local_experts`; older readers look for `rope_theta`, `num_experts`, `head_dim` and
    `torch_dtype` at the top and fall back to wrong defaults in silence, so both are written.

    Args:
        model: With `vocab_size` set.
        bos_token_id: The tokenizer's; None where it has none. Likewise the next two.
        eos_token_id: See above.
        pad_token_id: See above.
        dtype: Type of the weights beside it: `bf16`, `fp16` or `fp32`.

    Raises:
        ConfigError: Naming each field that no known architecture has.
    """
    model_type = _model_type(model)
    result: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "head_dim": model.attention_head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_cache": True,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "sliding_window": None,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": _DTYPES[dtype],
        "dtype": _DTYPES[dtype],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    result |= {name: getattr(model, name) for name in _COMMON}
    if model_type in ("qwen3", "qwen3_moe"):
        result |= {"use_sliding_window": False, "max_window_layers": model.num_hidden_layers}
    if model_type == "llama":
        result |= {"mlp_bias": False}
    if model_type in ("qwen3_moe", "mixtral"):
        result |= {
            "num_experts": model.num_experts,
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.num_experts_per_tok,
            "router_aux_loss_coef": model.router_aux_loss_coef,
            "output_router_logits": False,
        }
    if model_type == "qwen3_moe":
        result |= {
            "moe_intermediate_size": model.expert_intermediate_size,
            "norm_topk_prob": model.norm_topk_prob,
            "decoder_sparse_step": model.decoder_sparse_step,
            "mlp_only_layers": list(range(model.first_k_dense_replace)),
        }
    if model_type == "mixtral":
        result |= {"intermediate_size": model.expert_intermediate_size}
    return result


def native_config(
    model: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
    dtype: str,
) -> dict[str, Any]:
    """`config.json` for a model that has no home elsewhere: every field of ModelConfig; only we open it."""
    return dataclasses.asdict(model) | {
        "model_type": NATIVE_MODEL_TYPE,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": _DTYPES[dtype],
    }


def model_config_from_huggingface(config_json: dict[str, Any]) -> ModelConfig:
    """The ModelConfig that computes what `config_json` describes.

    Args:
        config_json: As `huggingface_config`, `native_config` or transformers (4 or 5) write it.

    Raises:
        ConfigError: For an architecture or a feature that our decoder lacks, or a missing key.
    """
    model_type = config_json.get("model_type")
    if model_type == NATIVE_MODEL_TYPE:
        return ModelConfig(**{name: config_json[name] for name in _NATIVE_FIELDS & config_json.keys()})
    if model_type not in _ARCHITECTURES:
        known = ", ".join((*_ARCHITECTURES, NATIVE_MODEL_TYPE))
        raise ConfigError(f"config.json: model_type: expected one of {known}, found {model_type!r}")
    _refuse_foreign_features(config_json)
    missing = [name for name in ("vocab_size", *_COMMON[:5]) if config_json.get(name) is None]
    if missing:
        raise ConfigError(f"config.json: expected the keys {', '.join(missing)}, found none of that name")
    fields: dict[str, Any] = {name: config_json[name] for name in _COMMON if name in config_json}
    fields.setdefault("tie_word_embeddings", False)
    fields.setdefault("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6)
    rope = config_json.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config_json.get("rope_theta", _ROPE_THETA_DEFAULTS[model_type]))
    head_dim = config_json.get("head_dim") or (128 if model_type == "qwen3" else None)
    fields |= {
        "vocab_size": config_json["vocab_size"],
        "head_dim": head_dim,
        "rope_theta": float(theta),
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
    }
    if model_type in ("qwen3_moe", "mixtral"):
        fields |= _expert_fields(config_json, model_type)
    return ModelConfig(**fields)


def _expert_fields(config_json: dict[str, Any], model_type: str) -> dict[str, Any]:
    num_experts = config_json.get("num_local_experts", config_json.get("num_experts"))
    if num_experts is None or config_json.get("num_experts_per_tok") is None:
        raise ConfigError("config.json: expected the keys num_experts and num_experts_per_tok, found none")
    fields: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": config_json["num_experts_per_tok"],
        "router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001),
    }
    if model_type == "mixtral":
        return fields | {"moe_intermediate_size": config_json["intermediate_size"], "norm_topk_prob": True}
    dense = sorted(config_json.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers: expected leading layers only, found {dense}")
    return fields | {
        "moe_intermediate_size": config_json.get("moe_intermediate_size", 768),
        "norm_topk_prob": config_json.get("norm_topk_prob", False),
        "decoder_sparse_step": config_json.get("decoder_sparse_step", 1),
        "first_k_dense_replace": len(dense),
    }


def _refuse_foreign_features(config_json: dict[str, Any]) -> None:
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    windows = config_json.get("use_sliding_window", config_json.get("model_type") == "mixtral")
    found = {
        "hidden_act": (config_json.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config_json.get("attention_bias", False), False),
        "mlp_bias": (config_json.get("mlp_bias", False), False),
        "rope_type": (rope_type, "default"),
        "sliding_window": (config_json.get("sliding_window") if windows else None, None),
    }
    problems = [
        f"config.json: {name}: expected {expected!r}, the only one our decoder has, found {value!r}"
        for name, (value, expected) in found.items()
        if value != expected
    ]
    if problems:
        raise ConfigError(*problems)
