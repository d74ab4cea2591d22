"""`config.json`: our model's shape in the words of transformers 5 and 4 and mlx-lm, and back.

No weights here, and no choice of an architecture: that is `homes.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llm_pretrain.config import ModelConfig, shape_problems
from llm_pretrain.errors import ConfigError
from llm_pretrain.export.homes import (
    ALWAYS_SHARED,
    BIASED_CHOICE,
    HOMES,
    LAYER_TYPES,
    LEADING_DENSE,
    Home,
    home_of,
    is_folded,
)
from llm_pretrain.export.rope_json import rope_from_json, rope_to_json

NATIVE_MODEL_TYPE = "llm_pretrain"
"""`model_type` of weights that no architecture of transformers can hold."""

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
_OWN = "llm_pretrain"
"""Key of the fields that a home cannot say: zeros stand there for a tensor that we do not have, or the
experts' projections hold a factor. Only we read it; whoever does not computes the same."""
_NATIVE_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)} - {"init_from"}
_FOREIGN_BIAS_UPDATE_RATE = 0.001
"""Where a file has a bias on the choice of experts and does not say at which rate it moved: DeepSeek-V3's
(arXiv:2412.19437, section 4.2)."""


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
    `num_local_experts`; older readers look for `rope_theta`, `rope_scaling`, `num_experts`, `head_dim`
    and `torch_dtype` at the top and fall back to wrong defaults in silence, so both are written.

    Args:
        model: With `vocab_size` set.
        bos_token_id: The tokenizer's; None where it has none. Likewise the next two.
        eos_token_id: See above.
        pad_token_id: See above.
        dtype: Type of the weights beside it: `bf16`, `fp16` or `fp32`.

    Raises:
        ConfigError: Naming each field that no known architecture has.
    """
    model_type = home_of(model)
    home = HOMES[model_type]
    result: dict[str, Any] = {
        "architectures": [home.architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "head_dim": model.attention_head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_cache": True,
        **rope_to_json(model),
        "sliding_window": None,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": _DTYPES[dtype],
        "dtype": _DTYPES[dtype],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    result |= {name: getattr(model, name) for name in _COMMON}
    if model_type.startswith("qwen"):
        result |= {"use_sliding_window": False, "max_window_layers": model.num_hidden_layers}
    if home.keys:
        result |= _expert_keys(model, model_type)
    return {**result, **home.extra}


def _expert_keys(model: ModelConfig, model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "router_aux_loss_coef": model.router_aux_loss_coef,
        "output_router_logits": False,
    }
    resolved = dataclasses.replace(model, moe_intermediate_size=model.expert_intermediate_size)
    for field, (names, _) in HOMES[model_type].keys.items():
        result |= dict.fromkeys(names, getattr(resolved, field))
    if "first_k_dense_replace" in result:  # alone: it must say what both our fields say together
        result["first_k_dense_replace"] = model.num_hidden_layers - len(model.moe_layers)
    if model_type in LEADING_DENSE:
        result["mlp_only_layers"] = list(range(model.first_k_dense_replace))
    if model_type in LAYER_TYPES:
        layers = range(model.num_hidden_layers)
        result["mlp_layer_types"] = ["sparse" if model.is_moe_layer(layer) else "dense" for layer in layers]
    if model_type == "ernie4_5_moe":  # mlx-lm does not take -1 for the last
        result["moe_layer_end_index"] = model.num_hidden_layers - 1
    own = {}
    if model_type in BIASED_CHOICE:
        own["router_bias_update_rate"] = model.router_bias_update_rate
    if is_folded(model):
        own["routed_scaling_factor"] = model.routed_scaling_factor
    if model_type in ALWAYS_SHARED and not model.n_shared_experts:
        own["n_shared_experts"] = 0
        result["n_shared_experts"] = 1
    if model_type == "qwen2_moe":
        shared = result.pop("n_shared_experts", model.n_shared_experts)
        result["shared_expert_intermediate_size"] = shared * model.expert_intermediate_size
    return result | ({_OWN: own} if own else {})


def native_config(
    model: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
    dtype: str,
) -> dict[str, Any]:
    """`config.json` for a model that has no home elsewhere: all of ModelConfig; only we open it.

    Where the training started from (`init_from`) is a path on its machine, and left out.
    """
    return {name: getattr(model, name) for name in sorted(_NATIVE_FIELDS)} | {
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
        ConfigError: For an architecture or a feature that our decoder lacks, a missing key, or a value that
            no model can have.
    """
    try:
        model = _read_model(config_json)
    except (TypeError, ValueError, AttributeError) as error:  # a value of another kind, met on the way
        raise ConfigError(
            f"config.json: expected values as transformers writes them, found: {error}"
        ) from error
    if problems := shape_problems(model):
        raise ConfigError(*(f"config.json: {problem}" for problem in problems))
    return model


def _read_model(config_json: dict[str, Any]) -> ModelConfig:
    model_type = config_json.get("model_type")
    if model_type == NATIVE_MODEL_TYPE:
        return ModelConfig(**{name: config_json[name] for name in _NATIVE_FIELDS & config_json.keys()})
    home = HOMES.get(str(model_type))
    if home is None:
        known = ", ".join((*HOMES, NATIVE_MODEL_TYPE))
        raise ConfigError(f"config.json: model_type: expected one of {known}, found {model_type!r}")
    _refuse_foreign_features(config_json)
    needed = ["vocab_size", *_COMMON[:5]]
    if model_type == "solar_open":
        needed.remove("intermediate_size")  # it has no dense layer
    missing = [name for name in needed if config_json.get(name) is None]
    if missing:
        raise ConfigError(f"config.json: expected the keys {', '.join(missing)}, found none of that name")
    fields: dict[str, Any] = {name: config_json[name] for name in _COMMON if name in config_json}
    fields.setdefault("tie_word_embeddings", model_type == "ernie4_5_moe")
    fields.setdefault("rms_norm_eps", home.rms_norm_eps)
    fields |= rope_from_json(
        config_json, default_theta=home.rope_theta, default_partial=home.partial_rotary_factor
    )
    fields |= {
        "vocab_size": config_json["vocab_size"],
        "head_dim": config_json.get("head_dim") or home.head_dim,
        **home.fixed,
    }
    if home.keys:
        fields |= _expert_fields(config_json, str(model_type), home)
    return ModelConfig(**fields)


def _expert_fields(config_json: dict[str, Any], model_type: str, home: Home) -> dict[str, Any]:
    fields: dict[str, Any] = {"router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001)}
    for field, (names, default) in home.keys.items():
        found = [config_json[name] for name in names if config_json.get(name) is not None]
        if not found and default is None:
            raise ConfigError(f"config.json: expected the key {names[-1]}, found none of that name")
        fields[field] = found[0] if found else default
    if model_type in BIASED_CHOICE:
        fields["router_bias_update_rate"] = _FOREIGN_BIAS_UPDATE_RATE
    if model_type in LEADING_DENSE:
        dense = sorted(config_json.get("mlp_only_layers") or [])
        if dense != list(range(len(dense))):
            raise ConfigError(f"config.json: mlp_only_layers: expected leading layers only, found {dense}")
        fields["first_k_dense_replace"] = len(dense)
    if model_type in LAYER_TYPES:
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
    own = config_json.get(_OWN)
    return fields | (
        {name: own[name] for name in _NATIVE_FIELDS & own.keys()} if isinstance(own, dict) else {}
    )


def _layer_fields(config_json: dict[str, Any]) -> dict[str, Any]:
    """`first_k_dense_replace` and `decoder_sparse_step` that give `mlp_layer_types`."""
    layers = config_json["num_hidden_layers"]
    kinds = config_json.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    for step in range(1, layers + 1):
        for first in range(layers):
            if sparse == [layer for layer in range(first, layers) if (layer + 1) % step == 0]:
                return {"first_k_dense_replace": first, "decoder_sparse_step": step}
    raise ConfigError(
        "config.json: mlp_layer_types: expected every n-th layer sparse after leading dense ones, "
        f"found sparse layers {sparse} of {layers}"
    )


def _refuse_foreign_features(config_json: dict[str, Any]) -> None:
    model_type, layers = config_json["model_type"], config_json.get("num_hidden_layers") or 0
    window = config_json.get("sliding_window")
    windows = config_json.get("use_sliding_window", model_type == "mixtral")
    if model_type == "dots1":
        windows = layers > config_json.get("max_window_layers", 62)
    kinds = set(config_json.get("layer_types") or ()) - {"full_attention"}
    groups = config_json.get("n_group") or 1
    last = config_json.get("moe_layer_end_index", -1)
    found = {
        "hidden_act": (config_json.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config_json.get("attention_bias", False), False),
        "mlp_bias": (config_json.get("mlp_bias", False), False),
        "use_bias": (bool(config_json.get("use_bias", False)), False),
        "sliding_window": (window if windows else None, None),
        "layer_types": (", ".join(sorted(kinds)) or "full_attention", "full_attention"),
        "topk_group": (config_json.get("topk_group") or 1 if groups > 1 else groups, groups),
        "moe_layer_end_index": (layers - 1 if last == -1 else last, layers - 1),
    }
    problems = [
        f"config.json: {name}: expected {expected!r}, the only one our decoder has, found {value!r}"
        for name, (value, expected) in found.items()
        if value != expected
    ]
    if problems:
        raise ConfigError(*problems)
