"""Architectures of transformers that our decoder is read from and written as, and their `config.json`.

The file is for transformers 5, transformers 4 and mlx-lm.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

from llm_pretrain.config.loading import shape_problems
from llm_pretrain.config.model_config import YARN_BETAS, ModelConfig, neutral_values
from llm_pretrain.config.schema import build
from llm_pretrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class HFArchitecture:
    """An architecture of transformers that computes what our decoder computes; weights may be rearranged.

    Args:
        class_name: Name of the class in transformers.
        keys: Our field -> its names in `config.json`, and the architecture's default if all names are missing
            (None: that of transformers' class).
        fixed: Our fields whose values the architecture implies.
        extra: Keys that are always written.
        lacks: Keys of other architectures that this class does not declare. They are not written, because a
            reader may infer a feature from a key: TRL infers an auxiliary loss from `router_aux_loss_coef`.
        rope_theta, rms_norm_eps, head_dim, partial_rotary_factor: Defaults for missing keys. A head_dim of
            None means hidden_size / num_attention_heads. Our decoder's partial_rotary_factor is always 1.
    """

    class_name: str
    keys: Mapping[str, tuple[tuple[str, ...], Any]] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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

_LACKING = {
    "qwen2": "biases of query, key and value",
    "olmoe": "norms of query and key over all heads at once",
    "gemma2": "norms after attention and MLP, scaled embeddings, soft caps",
    "deepseek_v3": "latent attention",
}
"""`model_type` -> features that our decoder lacks and that have no key in `config.json`."""

_MLP_ONLY_LAYERS = frozenset({"qwen3_moe", "qwen2_moe"})
"""Architectures that list leading dense layers in `mlp_only_layers`."""

_MLP_LAYER_TYPES = frozenset({"hy_v3"})
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


NATIVE_MODEL_TYPE = "llm_pretrain"
"""`model_type` of weights that only this package opens."""

_ROPE_TYPES = ("default", "linear", "yarn")
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
    "hidden_act",
)
_OWN_FIELDS = "llm_pretrain"
"""Key of a mapping with our fields that the architecture has no key for: a loss coefficient, the tensors that
are zeros because our model lacks them, the factor that the experts' projections include. A reader that
ignores the mapping computes the same results."""
_NATIVE_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)} - {"init_from"}
_FOREIGN_BIAS_UPDATE_RATE = 0.001
"""`router_bias_update_rate` if a model has a router bias but its file has no rate; the value of DeepSeek-V3
(arXiv:2412.19437, section 4.2)."""


def huggingface_config(
    model: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
    dtype: str,
) -> dict[str, Any]:
    """`config.json` for transformers 5, transformers 4 and mlx-lm.

    Version 5 reads `rope_parameters` and `num_local_experts`. Older readers need `rope_theta`,
    `rope_scaling`, `num_experts`, `head_dim` and `torch_dtype` at the top level. Where one is missing, they
    use a wrong default without a warning. So the file has the keys of both.

    Args:
        model: The model's shape; `vocab_size` must be set.
        bos_token_id, eos_token_id, pad_token_id: Ids of the tokenizer; None for a missing token.
        dtype: Type of the weights: `bf16`, `fp16` or `fp32`.

    Raises:
        ConfigError: no architecture of transformers computes the model; it names the fields.
    """
    model_type = match_hf_architecture(model)
    architecture = HF_ARCHITECTURES[model_type]
    result: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "head_dim": model.attention_head_dim,
        "hidden_act": model.hidden_act,  # at this place as in earlier versions, to write equal bytes
        "attention_bias": False,
        "use_cache": True,
        **_rope_keys(model),
        "sliding_window": None,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": _DTYPES[dtype],
        "dtype": _DTYPES[dtype],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    result |= {name: getattr(model, name) for name in _COMMON}
    result["max_position_embeddings"] = model.longest_sequence
    if model_type.startswith("qwen"):
        result |= {"use_sliding_window": False, "max_window_layers": model.num_hidden_layers}
    if architecture.keys:
        result |= _expert_keys(model, model_type)
    lacking = {name: result.pop(name) for name in architecture.lacks}
    if own := {name: value for name, value in lacking.items() if name in _NATIVE_FIELDS}:
        result[_OWN_FIELDS] = own | result.get(_OWN_FIELDS, {})
    return {**result, **architecture.extra}


def _expert_keys(model: ModelConfig, model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = {"router_aux_loss_coef": model.router_aux_loss_coef}
    resolved = dataclasses.replace(model, moe_intermediate_size=model.expert_intermediate_size)
    for field, (names, _) in HF_ARCHITECTURES[model_type].keys.items():
        result |= dict.fromkeys(names, getattr(resolved, field))
    if "first_k_dense_replace" in result:  # it also expresses decoder_sparse_step, which has no key
        result["first_k_dense_replace"] = model.num_hidden_layers - len(model.moe_layers)
    if model_type in _MLP_ONLY_LAYERS:
        result["mlp_only_layers"] = list(range(model.first_k_dense_replace))
    if model_type in _MLP_LAYER_TYPES:
        layers = range(model.num_hidden_layers)
        result["mlp_layer_types"] = ["sparse" if model.is_moe_layer(layer) else "dense" for layer in layers]
    if model_type == "ernie4_5_moe":  # mlx-lm does not accept -1 for the last layer
        result["moe_layer_end_index"] = model.num_hidden_layers - 1
    own = {}
    if model_type in ROUTER_BIAS:
        own["router_bias_update_rate"] = model.router_bias_update_rate
    if scales_down_proj(model):
        own["routed_scaling_factor"] = model.routed_scaling_factor
    if model_type in SHARED_EXPERT and not model.n_shared_experts:
        own["n_shared_experts"] = 0
        result["n_shared_experts"] = 1
    if model_type == "qwen2_moe":
        shared = result.pop("n_shared_experts", model.n_shared_experts)
        result["shared_expert_intermediate_size"] = shared * model.expert_intermediate_size
    return result | ({_OWN_FIELDS: own} if own else {})


def native_config(
    model: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
    dtype: str,
) -> dict[str, Any]:
    """`config.json` with all fields of ModelConfig, for a model that only this package opens.

    `init_from` is left out, because it is a path on the machine that trained the model.
    """
    return {name: getattr(model, name) for name in sorted(_NATIVE_FIELDS)} | {
        "model_type": NATIVE_MODEL_TYPE,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": _DTYPES[dtype],
    }


def model_config_from_huggingface(config_json: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the model that `config_json` describes.

    Args:
        config_json: Content of a file from `huggingface_config`, `native_config` or transformers (4 or 5).

    Raises:
        ConfigError: our decoder lacks the architecture or a feature, a key is missing, or a value is invalid.
    """
    try:
        model = _read_model(config_json)
    except (
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:  # a value of a wrong type or size
        raise ConfigError(
            f"config.json: expected values as transformers writes them, found: {error}"
        ) from error
    if problems := shape_problems(model):
        raise ConfigError(*(f"config.json: {problem}" for problem in problems))
    return build(ModelConfig, vars(model))  # makes 2.0 of a 2 that JSON tools wrote; readers refuse 2


def _read_model(config_json: dict[str, Any]) -> ModelConfig:
    model_type = config_json.get("model_type")
    if model_type == NATIVE_MODEL_TYPE:
        return ModelConfig(**{name: config_json[name] for name in _NATIVE_FIELDS & config_json.keys()})
    architecture = HF_ARCHITECTURES.get(str(model_type))
    problems = _foreign_features(config_json)
    if architecture is None:
        known = ", ".join((*HF_ARCHITECTURES, NATIVE_MODEL_TYPE))
        lacking = f", which has {_LACKING[model_type]}" if model_type in _LACKING else ""
        problems.insert(0, f"config.json: model_type: expected one of {known}, found {model_type!r}{lacking}")
    if architecture is None or problems:
        raise ConfigError(*problems)
    sizes = ("vocab_size", *_COMMON[:6])
    usual = {name: _usual(str(model_type), name) for name in sizes if name not in config_json}
    config_json = config_json | usual
    if config_json.get("num_key_value_heads") is None:
        config_json["num_key_value_heads"] = config_json.get("num_attention_heads")
    if missing := [name for name in sizes if config_json.get(name) is None]:
        raise ConfigError(f"config.json: {', '.join(missing)}: expected a number, found null")
    fields: dict[str, Any] = {name: config_json[name] for name in _COMMON if name in config_json}
    fields.setdefault("tie_word_embeddings", model_type == "ernie4_5_moe")
    fields.setdefault("rms_norm_eps", architecture.rms_norm_eps)
    fields |= _rope_fields(config_json, architecture)
    fields |= {
        "vocab_size": config_json["vocab_size"],
        "head_dim": config_json.get("head_dim") or architecture.head_dim,
        **architecture.fixed,
    }
    if architecture.keys:
        fields |= _expert_fields(config_json, str(model_type), architecture)
    return ModelConfig(**fields)


def _usual(model_type: str, *names: str) -> Any:
    """transformers' default for the first of these keys that it has; makes no configuration of any size."""
    from transformers import CONFIG_MAPPING

    parameters = inspect.signature(CONFIG_MAPPING[model_type]).parameters
    return next((parameters[name].default for name in names if name in parameters), None)


def _expert_fields(
    config_json: dict[str, Any], model_type: str, architecture: HFArchitecture
) -> dict[str, Any]:
    fields: dict[str, Any] = {"router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001)}
    for field, (names, default) in architecture.keys.items():
        found = [config_json[name] for name in names if config_json.get(name) is not None]
        fields[field] = found[0] if found else _usual(model_type, *names) if default is None else default
    if model_type in ROUTER_BIAS:
        fields["router_bias_update_rate"] = _FOREIGN_BIAS_UPDATE_RATE
    if model_type in _MLP_ONLY_LAYERS:
        dense = sorted(config_json.get("mlp_only_layers") or [])
        if dense != list(range(len(dense))):
            raise ConfigError(f"config.json: mlp_only_layers: expected leading layers only, found {dense}")
        fields["first_k_dense_replace"] = len(dense)
    if model_type in _MLP_LAYER_TYPES:
        fields |= _layer_fields(config_json)
    if model_type == "qwen2_moe":
        shared = config_json.get("shared_expert_intermediate_size", 5632)
        count, rest = divmod(shared, fields["moe_intermediate_size"])
        if rest:
            raise ConfigError(
                "config.json: shared_expert_intermediate_size: expected a multiple of moe_intermediate_size "
                f"= {fields['moe_intermediate_size']}, found {shared}"
            )
        fields["n_shared_experts"] = count
    own = config_json.get(_OWN_FIELDS)
    return fields | (
        {name: own[name] for name in _NATIVE_FIELDS & own.keys()} if isinstance(own, dict) else {}
    )


def _layer_fields(config_json: dict[str, Any]) -> dict[str, Any]:
    """`first_k_dense_replace` and `decoder_sparse_step` that describe the layers in `mlp_layer_types`."""
    layers, kinds = config_json["num_hidden_layers"], config_json.get("mlp_layer_types")
    if not kinds and layers > 1:
        return {"first_k_dense_replace": 1, "decoder_sparse_step": 1}
    sparse = [layer for layer, kind in enumerate(kinds or ()) if kind == "sparse"]
    first = sparse[0] if sparse else 0
    for step in (sparse[1] - first,) if sparse[1:] else range(1, first + 2):
        expected = range(first, layers, step)
        if (first + 1) % step == 0 and len(expected) == len(sparse) and [*expected] == sparse:
            return {"first_k_dense_replace": max(0, first + 1 - step), "decoder_sparse_step": step}
    raise ConfigError(
        "config.json: mlp_layer_types: expected every n-th layer sparse after leading dense ones, "
        f"found sparse layers {sparse} of {layers}"
    )


def _foreign_features(config_json: dict[str, Any]) -> list[str]:
    """One line per key, of any architecture, whose value our decoder does not support."""
    model_type, layers = config_json.get("model_type"), config_json.get("num_hidden_layers") or 0
    window = config_json.get("sliding_window", 4096 if model_type == "mistral" else None)
    has_window = model_type in ("mixtral", "mistral") or model_type not in HF_ARCHITECTURES
    windows = config_json.get("use_sliding_window", has_window)
    kinds = set(config_json.get("layer_types") or ()) - {"full_attention"}
    groups = config_json.get("n_group") or 1
    last = config_json.get("moe_layer_end_index", -1)
    found = {
        "attention_bias": (config_json.get("attention_bias", False), False),
        "mlp_bias": (config_json.get("mlp_bias", False), False),
        "use_bias": (bool(config_json.get("use_bias", False)), False),
        "sliding_window": (window if windows else None, None),
        "layer_types": (", ".join(sorted(kinds)) or "full_attention", "full_attention"),
        "topk_group": (config_json.get("topk_group") or 1 if groups > 1 else groups, groups),
        "moe_layer_end_index": (layers - 1 if last == -1 else last, layers - 1),
    }
    return [
        f"config.json: {name}: expected {expected!r}, the only one our decoder has, found {value!r}"
        for name, (value, expected) in found.items()
        if value != expected
    ]


def _rope_keys(model: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for transformers 4, mlx-lm and others; `rope_parameters` for 5."""
    scaling: dict[str, Any] | None = None
    if model.rope_type != "default":
        scaling = {"rope_type": model.rope_type, "type": model.rope_type, "factor": model.rope_factor}
    if scaling is not None and model.rope_type == "yarn":
        scaling |= {"original_max_position_embeddings": model.rope_original_context, **YARN_BETAS}
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
    parameters.pop("type", None)  # read only by versions without rope_parameters
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _rope_fields(config_json: dict[str, Any], architecture: HFArchitecture) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of transformers 5, 4 and older versions.

    Missing keys get the defaults of transformers 5.

    Raises:
        ConfigError: our decoder lacks the scaling or one of its settings.
    """
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: rope_scaling: expected a mapping or null, found {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            "config.json: rope_parameters: expected one setting for all layers, found one per kind of layer"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get(
        "partial_rotary_factor",
        config_json.get("partial_rotary_factor", architecture.partial_rotary_factor),
    )
    problems = []
    if kind not in _ROPE_TYPES:
        problems.append(f"config.json: rope_type: expected one of {', '.join(_ROPE_TYPES)}, found {kind!r}")
    if partial != 1:
        problems.append(f"config.json: partial_rotary_factor: expected 1, found {partial}")
    if problems:
        raise ConfigError(*problems)
    theta = rope.get("rope_theta") or (config_json.get("rope_parameters") or {}).get("rope_theta")
    theta = theta or config_json.get("rope_theta") or architecture.rope_theta
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    if kind == "default":
        return fields
    return fields | {"rope_type": kind} | _rope_scaling_fields(rope, kind, config_json)


def _rope_scaling_fields(rope: dict[str, Any], kind: str, config_json: dict[str, Any]) -> dict[str, Any]:
    if kind == "linear":
        return {"rope_factor": _rope_factor(rope.get("factor"))}
    longest = config_json["max_position_embeddings"]
    # as in transformers, a value at the top of the file takes precedence
    original = config_json.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", longest
    )
    if not original:
        raise ConfigError(
            f"config.json: original_max_position_embeddings: expected 1 or more, found {original!r}"
        )
    factor = _rope_factor(rope.get("factor") or longest / original)
    _check_yarn(rope, factor)
    return {"rope_factor": factor, "original_max_position_embeddings": original}


def _rope_factor(value: Any) -> float:
    if not isinstance(value, int | float) or value < 1:
        raise ConfigError(f"config.json: rope_scaling.factor: expected 1 or more, found {value!r}")
    return float(value)


def _check_yarn(rope: dict[str, Any], factor: float) -> None:
    """Raise ConfigError for settings of YaRN other than the paper's: the decoder uses those of the paper."""
    usual = 0.1 * math.log(factor) + 1.0
    found = rope.get("attention_factor")
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if found is None and mscale and mscale_all:
        found = (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all * math.log(factor) + 1.0)
    problems = []
    if found is not None and not math.isclose(found, usual, rel_tol=1e-6):
        problems.append(
            f"config.json: rope_scaling.attention_factor: expected 0.1 * ln(factor) + 1 = {usual:.7g}, "
            f"found {found:.7g}"
        )
    problems += [
        f"config.json: rope_scaling.{name}: expected {value:g}, found {found!r:.40}"
        for name, value in YARN_BETAS.items()
        if (found := rope.get(name) or value) != value
    ]
    if not rope.get("truncate", True):
        problems.append("config.json: rope_scaling.truncate: expected true, found false")
    if problems:
        raise ConfigError(*problems)
