"""Which architecture of transformers computes what a decoder of ours computes, and its words for our fields.

A home computes exactly the same function from the same numbers, at most rearranged. Reading and writing
`config.json` with these words is `config_json.py`, rearranging tensors is `tensor_layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import ConfigError


@dataclass(frozen=True)
class Home:
    """One architecture.

    Args:
        architecture: Its class in transformers.
        keys: Our field to its names in `config.json`, and what the architecture assumes where all are
            missing (None: the key must be there).
        fixed: Fields of ours that the architecture decides by itself.
        extra: Keys that are always written.
        rope_theta: What it assumes where the key is missing; so the next three.
        rms_norm_eps: See above.
        head_dim: See above; None for hidden_size / num_attention_heads.
        partial_rotary_factor: See above; ours is always 1.
        written: False where another home is preferred for writing.
    """

    architecture: str
    keys: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0
    written: bool = True


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
_GLM4_MOE = Home(
    "Glm4MoeForCausalLM",
    keys={**_SIGMOID_KEYS, "qk_norm": (("use_qk_norm",), False)},
    fixed={"scoring_func": "sigmoid"},
    extra={**_NO_GROUPS, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0},
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
)
_SOLAR_KEYS = {
    **{name: key for name, key in _SIGMOID_KEYS.items() if name != "first_k_dense_replace"},
    "moe_intermediate_size": (("moe_intermediate_size",), 1280),
}

HOMES: dict[str, Home] = {
    "qwen3": Home("Qwen3ForCausalLM", fixed={"qk_norm": True}, head_dim=128),
    "llama": Home("LlamaForCausalLM", fixed={"qk_norm": False}, extra={"mlp_bias": False}),
    "qwen3_moe": Home(
        "Qwen3MoeForCausalLM",
        keys={
            **_COUNTS,
            "moe_intermediate_size": (("moe_intermediate_size",), 768),
            "norm_topk_prob": (("norm_topk_prob",), False),
            "decoder_sparse_step": (("decoder_sparse_step",), 1),
        },
        fixed={"qk_norm": True},
    ),
    "mixtral": Home(
        "MixtralForCausalLM",
        keys={**_COUNTS, "moe_intermediate_size": (("intermediate_size",), 14336)},
        fixed={"qk_norm": False, "norm_topk_prob": True},
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    "glm4_moe": _GLM4_MOE,
    "hy_v3": Home(
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
        rope_theta=11_158_840.0,
        rms_norm_eps=1e-5,
        head_dim=128,
    ),
    "ernie4_5_moe": Home(
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
        # Its guard against a sum of 0 must not act where ours would divide.
        extra={"use_bias": False, "moe_norm_min": 1e-30},
        rope_theta=5e5,
        rms_norm_eps=1e-5,
    ),
    "qwen2_moe": Home(
        "Qwen2MoeForCausalLM",
        keys={
            **_COUNTS,
            "moe_intermediate_size": (("moe_intermediate_size",), 1408),
            "norm_topk_prob": (("norm_topk_prob",), False),
            "decoder_sparse_step": (("decoder_sparse_step",), 1),
        },
        fixed={"qk_norm": False},
        extra={"qkv_bias": True},  # version 4 knows nothing else; they are written as zeros
    ),
    "dots1": Home(
        "Dots1ForCausalLM",
        keys={
            **_SIGMOID_KEYS,
            "first_k_dense_replace": (("first_k_dense_replace",), 0),
            "n_shared_experts": (("n_shared_experts",), None),
            "norm_topk_prob": (("norm_topk_prob",), False),
        },
        fixed={"qk_norm": True, "scoring_func": "sigmoid"},
        extra=_NO_GROUPS,
        written=False,
    ),
    "solar_open": Home(
        "SolarOpenForCausalLM",
        keys=_SOLAR_KEYS,
        fixed={"qk_norm": False, "scoring_func": "sigmoid", "first_k_dense_replace": 0},
        extra=_NO_GROUPS,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        head_dim=128,
        written=False,
    ),
}

LEADING_DENSE = frozenset({"qwen3_moe", "qwen2_moe"})
"""Those that list leading dense layers in `mlp_only_layers`."""

LAYER_TYPES = frozenset({"hy_v3"})
"""Those that give each layer's kind in `mlp_layer_types`."""

BIASED_CHOICE = frozenset({"glm4_moe", "hy_v3", "ernie4_5_moe", "dots1", "solar_open"})
"""Those that always have a bias on the choice of experts, be it zeros."""

ALWAYS_SHARED = frozenset({"glm4_moe", "qwen2_moe"})
"""Of those written, the ones that must have a shared expert, be it zeros."""


def is_folded(model: ModelConfig) -> bool:
    """Whether `routed_scaling_factor` is in the experts' down projections on disk, for want of a key."""
    return model.scoring_func == "softmax" and model.routed_scaling_factor != 1 and bool(model.moe_layers)


def home_of(model: ModelConfig) -> str:
    """The `model_type` that computes what `model` does; ConfigError names the fields that none has.

    A factor on softmax weights is no field of any home: it goes into the experts' down projections.
    """
    if not model.moe_layers:
        return "qwen3" if model.qk_norm else "llama"
    if model.scoring_func == "sigmoid":
        return _sigmoid_home(model)
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


def _sigmoid_home(model: ModelConfig) -> str:
    if model.num_experts == 1:
        raise ConfigError(
            "model.num_experts: no architecture of transformers with model.scoring_func sigmoid routes to a "
            "single expert; expected 2 or more, found 1"
        )
    leading = model.num_hidden_layers - len(model.moe_layers)
    if model.moe_layers[0] == leading:
        return "glm4_moe"
    lacking = [
        f"model.{name} {wanted}"
        for name, wanted, there in (
            ("qk_norm", "true", model.qk_norm),
            ("norm_topk_prob", "true", model.norm_topk_prob),
            ("n_shared_experts", "1 or more", model.n_shared_experts > 0),
        )
        if not there
    ]
    if lacking:
        raise ConfigError(
            "model.decoder_sparse_step: no architecture of transformers with model.scoring_func sigmoid has "
            f"dense layers between expert layers; expected 1, found {model.decoder_sparse_step}; "
            f"{' and '.join(lacking)} would export"
        )
    return "hy_v3"
