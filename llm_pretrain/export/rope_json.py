"""Rotary positions in `config.json`, in the spellings of transformers 5, of version 4, and older ones."""

from __future__ import annotations

import math
from typing import Any

from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import ConfigError

_KNOWN_TYPES = ("default", "linear", "yarn")


def rope_to_json(model: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for version 4, mlx-lm and others, `rope_parameters` for version 5."""
    scaling: dict[str, Any] | None = None
    if model.rope_type != "default":
        scaling = {"rope_type": model.rope_type, "type": model.rope_type, "factor": model.rope_factor}
    if scaling is not None and model.rope_type == "yarn":
        scaling |= {
            "original_max_position_embeddings": model.rope_original_context,
            "beta_fast": model.rope_beta_fast,
            "beta_slow": model.rope_beta_slow,
        }
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
    parameters.pop("type", None)  # the key of old readers, who know no rope_parameters
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def rope_from_json(
    config_json: dict[str, Any], *, default_theta: float, default_partial: float
) -> dict[str, Any]:
    """Fields of ModelConfig; what is missing means what transformers 5 takes it to mean.

    Args:
        config_json: A whole `config.json`.
        default_theta: The architecture's `rope_theta`.
        default_partial: The architecture's `partial_rotary_factor`.

    Raises:
        ConfigError: For a scaling, or a setting of it, that our decoder lacks.
    """
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: rope_scaling: expected a mapping or null, found {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            "config.json: rope_parameters: expected one setting for all layers, found one per kind of layer"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", config_json.get("partial_rotary_factor", default_partial))
    problems = []
    if kind not in _KNOWN_TYPES:
        problems.append(f"config.json: rope_type: expected one of {', '.join(_KNOWN_TYPES)}, found {kind!r}")
    if partial != 1:
        problems.append(f"config.json: partial_rotary_factor: expected 1, found {partial}")
    if problems:
        raise ConfigError(*problems)
    theta = rope.get("rope_theta") or (config_json.get("rope_parameters") or {}).get("rope_theta")
    fields: dict[str, Any] = {"rope_theta": float(theta or config_json.get("rope_theta") or default_theta)}
    if kind == "default":
        return fields
    return fields | {"rope_type": kind} | _scaling_fields(rope, kind, config_json)


def _scaling_fields(rope: dict[str, Any], kind: str, config_json: dict[str, Any]) -> dict[str, Any]:
    if kind == "linear":
        return {"rope_factor": _factor(rope.get("factor"))}
    longest = config_json.get("max_position_embeddings")
    if longest is None:
        raise ConfigError("config.json: expected the key max_position_embeddings, found none of that name")
    # An original context at the top of the file outranks one inside, as in transformers (Phi-3's way).
    original = config_json.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", longest
    )
    factor = _factor(rope.get("factor") or longest / original)
    _check_yarn(rope, factor)
    return {
        "rope_factor": factor,
        "original_max_position_embeddings": original,
        "rope_beta_fast": float(rope.get("beta_fast") or 32),
        "rope_beta_slow": float(rope.get("beta_slow") or 1),
    }


def _factor(value: Any) -> float:
    if not isinstance(value, int | float) or value < 1:
        raise ConfigError(f"config.json: rope_scaling.factor: expected 1 or more, found {value!r}")
    return float(value)


def _check_yarn(rope: dict[str, Any], factor: float) -> None:
    """Settings of YaRN that our decoder fixes at what the paper recommends."""
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
    if not rope.get("truncate", True):
        problems.append("config.json: rope_scaling.truncate: expected true, found false")
    if problems:
        raise ConfigError(*problems)
