"""Architectures of transformers that we read as our decoder or write our decoder as, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_pretrain.config.model_config import ModelConfig, neutral_values
from llm_pretrain.errors import ConfigError


@dataclass(frozen=True)
class HFArchitecture:
    """An architecture of transformers that computes what our decoder computes; weights may be rearranged.

    Args:
        class_name: Name of the class in transformers.
        keys: Our field -> its names in `config.json`, and the architecture's default if all names are missing
            (None: the key is required).
        fixed: Our fields whose values the architecture implies.
        extra: Keys that are always written.
        lacks: Keys of other architectures that this class does not declare. They are not written, because a
            reader may infer a feature from a key: TRL infers an auxiliary loss from `router_aux_loss_coef`.
        rope_theta, rms_norm_eps, head_dim, partial_rotary_factor: Defaults for missing keys. A head_dim of
            None means hidden_size / num_attention_heads. Our decoder's partial_rotary_factor is always 1.
    """

    class_name: str
    keys: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0


_COUNTS = {
    "num_experts": (("num_local_experts", "num_experts"), None),
    "num_experts_per_tok": (("num_experts_per_tok",), None),
}
_SIGMOID_KEYS = {
    "num_experts": (("n_routed_experts",), None),
    "num_experts_per_tok": (("num_experts_per_tok",), None),
    "moe_intermediate_size": (("moe_intermediate_size",), 1408),
    "n_shared_experts": (("n_shared_experts",), 1),
    "norm_topk_prob": (("norm_topk_prob",), True),
    "routed_scaling_factor": (("routed_scaling_factor",), 1.0),
    "first_k_dense_replace": (("first_k_dense_replace",), 1),
}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
_GLM4_MOE = HFArchitecture(
    "Glm4MoeForCausalLM",
    keys={**_SIGMOID_KEYS, "qk_norm": (("use_qk_norm",), False)},
    fixed={"scoring_func": "sigmoid"},
    extra={**_NO_GROUPS, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0},
    lacks=("sliding_window", "router_aux_loss_coef"),
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
)

HF_ARCHITECTURES: dict[str, HFArchitecture] = {
    "qwen3": HFArchitecture("Qwen3ForCausalLM", fixed={"qk_norm": True}, head_dim=128),
    "llama": HFArchitecture(
        "LlamaForCausalLM", fixed={"qk_norm": False}, extra={"mlp_bias": False}, lacks=("sliding_window",)
    ),
    "mistral": HFArchitecture("MistralForCausalLM", fixed={"qk_norm": False}, lacks=("attention_bias",)),
    "qwen3_moe": HFArchitecture(
        "Qwen3MoeForCausalLM",
        keys={
            **_COUNTS,
            "moe_intermediate_size": (("moe_intermediate_size",), 768),
            "norm_topk_prob": (("norm_topk_prob",), False),
            "decoder_sparse_step": (("decoder_sparse_step",), 1),
        },
        fixed={"qk_norm": True},
        lacks=("max_window_layers",),
    ),
    "mixtral": HFArchitecture(
        "MixtralForCausalLM",
        keys={**_COUNTS, "moe_intermediate_size": (("intermediate_size",), 14336)},
        fixed={"qk_norm": False, "norm_topk_prob": True},
        lacks=("attention_bias",),
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    "glm4_moe": _GLM4_MOE,
    "hy_v3": HFArchitecture(
        "HYV3ForCausalLM",
        keys={
            "num_experts": (("num_experts",), None),
            "num_experts_per_tok": (("num_experts_per_tok",), None),
            "moe_intermediate_size": (("moe_intermediate_size",), 1536),
            "n_shared_experts": (("num_shared_experts",), 1),
            "routed_scaling_factor": (("router_scaling_factor",), 2.826),
        },
        fixed={"qk_norm": True, "scoring_func": "sigmoid", "norm_topk_prob": True},
        extra={"mlp_bias": False},
        lacks=("sliding_window", "router_aux_loss_coef"),
        rope_theta=11_158_840.0,
        rms_norm_eps=1e-5,
        head_dim=128,
    ),
    "ernie4_5_moe": HFArchitecture(
        "Ernie4_5_MoeForCausalLM",
        keys={
            "num_experts": (("moe_num_experts",), None),
            "num_experts_per_tok": (("moe_k",), None),
            "moe_intermediate_size": (("moe_intermediate_size",), 1536),
            "n_shared_experts": (("moe_num_shared_experts",), 2),
            "first_k_dense_replace": (("moe_layer_start_index",), 1),
            "decoder_sparse_step": (("moe_layer_interval",), 1),
        },
        fixed={"qk_norm": False, "norm_topk_prob": True},
        # The lower bound of the sum of weights must not take effect, because our decoder has no such bound.
        extra={"use_bias": False, "moe_norm_min": 1e-30},
        lacks=("sliding_window", "attention_bias", "attention_dropout"),
        rope_theta=5e5,
        rms_norm_eps=1e-5,
    ),
    "qwen2_moe": HFArchitecture(
        "Qwen2MoeForCausalLM",
        keys={
            "num_experts": (("num_experts",), None),
            "num_experts_per_tok": (("num_experts_per_tok",), None),
            "moe_intermediate_size": (("moe_intermediate_size",), 1408),
            "norm_topk_prob": (("norm_topk_prob",), False),
            "decoder_sparse_step": (("decoder_sparse_step",), 1),
        },
        fixed={"qk_norm": False},
        extra={"qkv_bias": True},  # transformers 4 always has biases, so they are written as zeros
        lacks=("attention_bias",),
    ),
}
"""`model_type` -> architecture."""

LACKING = {
    "qwen2": "biases of query, key and value",
    "olmoe": "norms of query and key over all heads at once",
    "gemma2": "norms after attention and MLP, scaled embeddings, soft caps",
    "deepseek_v3": "latent attention",
}
"""`model_type` -> features that our decoder lacks and that have no key in `config.json`."""

MLP_ONLY_LAYERS = frozenset({"qwen3_moe", "qwen2_moe"})
"""Architectures that list leading dense layers in `mlp_only_layers`."""

MLP_LAYER_TYPES = frozenset({"hy_v3"})
"""Architectures that list the kind of each layer in `mlp_layer_types`."""

ROUTER_BIAS = frozenset({"glm4_moe", "hy_v3", "ernie4_5_moe"})
"""Architectures that always have a router bias; if our model has none, the bias is zeros."""

SHARED_EXPERT = frozenset({"glm4_moe", "qwen2_moe"})
"""Architectures that always have a shared expert; if our model has none, the expert is zeros."""


CARRIED = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range"),
        *("tie_word_embeddings", "attention_dropout", "rope_theta", "rope_type", "rope_factor"),
        *("original_max_position_embeddings", "qk_norm", "hidden_act", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob", "n_shared_experts", "scoring_func"),
        *("routed_scaling_factor", "first_k_dense_replace", "decoder_sparse_step", "router_aux_loss_coef"),
        *("router_bias_update_rate", "router_z_loss_coef", "router_aux_loss_scope"),
        *("hidden_dropout", "zero_init_residual", "init_from"),  # affect only training
    }
)
"""Fields of the model that these architectures can express, or that affect only training."""

GGUF_CARRIED = CARRIED - {"hidden_act"}
"""Fields that GGUF can express: llama.cpp computes SiLU in every architecture that we write."""


def check_carried(model: ModelConfig, target: str, carried: frozenset[str] = CARRIED) -> None:
    """Stop if a field that the target cannot express has another value than its neutral value.

    Args:
        model: The model.
        target: Name of the target, for the error.
        carried: Fields that the target can express.

    Raises:
        ConfigError: names the fields.
    """
    found = {name: value for name, value in vars(model).items() if name not in carried}
    neutral = neutral_values(type(model))
    if problems := [
        f"model.{name}: {target} cannot express it; expected {neutral[name]}, found {value}"
        for name, value in found.items()
        if value != neutral[name]
    ]:
        raise ConfigError(*problems)


def scales_down_proj(model: ModelConfig) -> bool:
    """Whether the experts' down projections on disk include `routed_scaling_factor`.

    They include it because no architecture with softmax scores has a key for this factor.
    """
    return model.scoring_func == "softmax" and model.routed_scaling_factor != 1 and bool(model.moe_layers)


def match_hf_architecture(model: ModelConfig) -> str:
    """The `model_type` of the architecture that computes what `model` computes.

    Raises:
        ConfigError: no architecture computes it; the error names the fields.
    """
    check_carried(model, "no architecture of transformers here")
    if not model.moe_layers:
        if model.qk_norm:
            return "qwen3"
        # transformers' Llama requires a hidden size that is a multiple of the heads, even with a head_dim
        return "llama" if model.hidden_size % model.num_attention_heads == 0 else "mistral"
    if model.scoring_func == "sigmoid":
        return _match_sigmoid_architecture(model)
    if model.qk_norm:
        problems = [
            f"model.{name}: no architecture of transformers has it with model.scoring_func softmax and "
            f"model.qk_norm; expected 0, found {getattr(model, name)}; "
            "model.scoring_func sigmoid or model.qk_norm false would export"
            for name in ("n_shared_experts", "router_bias_update_rate")
            if getattr(model, name) > 0
        ]
        if problems:
            raise ConfigError(*problems)
        return "qwen3_moe"
    if not model.norm_topk_prob:
        if model.router_bias_update_rate > 0:
            raise ConfigError(
                "model.router_bias_update_rate: no architecture of transformers has it with "
                "model.scoring_func softmax and model.norm_topk_prob false; expected 0, found "
                f"{model.router_bias_update_rate}; model.norm_topk_prob true would export"
            )
        return "qwen2_moe"
    plain = not model.n_shared_experts and not model.router_bias_update_rate
    return "mixtral" if plain and len(model.moe_layers) == model.num_hidden_layers else "ernie4_5_moe"


def _match_sigmoid_architecture(model: ModelConfig) -> str:
    if model.num_experts == 1:
        raise ConfigError(
            "model.num_experts: no architecture of transformers with model.scoring_func sigmoid routes to a "
            "single expert; expected 2 or more, found 1"
        )
    leading = model.num_hidden_layers - len(model.moe_layers)
    if model.moe_layers[0] == leading:
        return "glm4_moe"
    if not (model.qk_norm and model.norm_topk_prob and model.n_shared_experts):
        raise ConfigError(
            "model.decoder_sparse_step: no architecture of transformers with model.scoring_func sigmoid has "
            f"dense layers between expert layers; expected 1, found {model.decoder_sparse_step}; "
            "model.qk_norm true, model.norm_topk_prob true and model.n_shared_experts 1 or more would export"
        )
    return "hy_v3"
