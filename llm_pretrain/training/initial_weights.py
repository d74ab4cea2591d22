"""Starting from a weights folder instead of random values: continued pretraining and upcycling.

Which folder fits is decided here; reading one is the export's business, resuming a run the checkpoints'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.config import VOCAB_MULTIPLE, Config, ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export import load_pretrained, model_config_from_huggingface, read_config
from llm_pretrain.model import Decoder
from llm_pretrain.training.upcycling import has_dense_layers, upcycle, upcycling_problems

_EVERYWHERE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("attention_head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "qk_norm"),
)
_IN_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "expert_intermediate_size", "norm_topk_prob"),
    *("n_shared_experts", "scoring_func", "routed_scaling_factor"),
)
_YARN = ("rope_original_context", "rope_beta_fast", "rope_beta_slow")
_SETTING = {
    "attention_head_dim": "head_dim",
    "expert_intermediate_size": "moe_intermediate_size",
    "rope_original_context": "original_max_position_embeddings",
}
"""Where a property of ModelConfig resolves a default: the field that sets it."""


def load_initial_weights(model: Decoder, config: Config) -> list[str]:
    """Replace the initial weights of `model` by those of the folder `model.init_from`, if it is set.

    Every rank reads the same folder, so that all start alike. Values come as fp32, whatever the folder
    holds. A dense folder starts a mixture of experts by upcycling (`upcycling.py`). Rows that pad the
    vocabulary to a multiple of 64 keep their random values; no other difference in rows is taken.

    Args:
        model: With its initial weights, unwrapped, as `config.model` describes it.
        config: Resolved.

    Returns:
        What was done, one line each, for the console.

    Raises:
        ConfigError: no such folder, an architecture that our decoder lacks, another tokenizer, or every
            field that differs from the folder's, with both values.
        CheckpointError: the folder's files are broken or do not belong together.
    """
    if config.model.init_from is None:
        return []
    folder = Path(config.model.init_from)
    theirs = _read_shape(folder)
    _check_shape(folder, theirs, config.model)
    _check_tokenizer(folder, config)
    with _naming_the_setting():
        source = load_pretrained(folder).state_dict()
    notes = [f"started from the weights in {folder}"]
    if config.model.moe_layers and not theirs.moe_layers:
        notes += upcycle(source, model, theirs)
    notes += _fit_rows(source, model, theirs)
    own = model.state_dict()
    missing = own.keys() - source.keys()
    if config.model.router_bias_update_rate > 0:  # a bias that the folder lacks starts at zero
        missing = {name for name in missing if not name.endswith("e_score_correction_bias")}
    if missing or source.keys() - own.keys():
        names = ", ".join(sorted(missing | (source.keys() - own.keys()))[:3])
        raise CheckpointError(
            f"model.init_from: expected the model's tensors in {folder}, found a difference in {names}"
        )
    model.load_state_dict({**own, **source}, strict=True)
    return notes


@contextmanager
def _naming_the_setting() -> Iterator[None]:
    """Errors of reading a folder, in one line that says why it was read."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"model.init_from: {problem}" for problem in error.problems)) from error
    except CheckpointError as error:
        raise CheckpointError(f"model.init_from: {' '.join(str(error).split())}") from error


def _read_shape(folder: Path) -> ModelConfig:
    """The folder's shape; ConfigError where there is none that we know."""
    if not folder.is_dir():
        raise ConfigError(
            f"model.init_from: expected a folder with config.json and model.safetensors, found none at "
            f"{folder}; a model on a hub is downloaded first"
        )
    if not (folder / "config.json").exists() and (steps := sorted(folder.glob("step-*"))):
        raise ConfigError(
            f"model.init_from: expected a folder with config.json, found none in {folder}; take {steps[-1]}"
        )
    with _naming_the_setting():
        return model_config_from_huggingface(read_config(folder))


def _check_shape(folder: Path, theirs: ModelConfig, ours: ModelConfig) -> None:
    """ConfigError with every field that must be equal and is not."""
    problems = [
        f"model.{_SETTING.get(name, name)}: expected {_shown(theirs, name)}, found {_shown(ours, name)}"
        for name in _compared(theirs, ours)
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if theirs.vocab_size != ours.vocab_size and not _is_padded(theirs, ours):
        problems.append(
            f"model.vocab_size: expected {theirs.vocab_size}, or that rounded up to a multiple of "
            f"{VOCAB_MULTIPLE}, found {ours.vocab_size}"
        )
    if theirs.router_bias_update_rate > 0 and ours.router_bias_update_rate == 0:
        problems.append("model.router_bias_update_rate: expected more than 0, for the bias, found 0.0")
    if ours.moe_layers and not theirs.moe_layers:
        problems += upcycling_problems(theirs, ours)
    if problems:
        command = f"llm-pretrain configs --from_pretrained {folder} --output FILE"
        advice = f"as in {folder} (model.init_from); `{command}` writes the section that fits"
        raise ConfigError(*(f"{problem}; {advice}" for problem in problems))


def _compared(theirs: ModelConfig, ours: ModelConfig) -> Iterator[str]:
    """Fields and properties that decide a tensor's shape or what it computes, where both models use them."""
    yield from _EVERYWHERE
    if theirs.rope_type != "default":  # to stretch positions that were not is what continuing is for
        yield from ("rope_type", "rope_factor")
        yield from _YARN if theirs.rope_type == "yarn" else ()
    if has_dense_layers(theirs) and has_dense_layers(ours):
        yield "intermediate_size"
    if theirs.moe_layers:
        yield from _IN_EXPERTS if ours.moe_layers else ("num_experts",)
        if ours.moe_layers and ours.moe_layers != theirs.moe_layers:
            yield from ("first_k_dense_replace", "decoder_sparse_step")


def _shown(model: ModelConfig, name: str) -> Any:
    return str(value).lower() if isinstance(value := getattr(model, name), bool) else value


def _is_padded(theirs: ModelConfig, ours: ModelConfig) -> bool:
    rows = theirs.vocab_size or 0
    return ours.vocab_size == -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _fit_rows(source: dict[str, Tensor], model: Decoder, theirs: ModelConfig) -> list[str]:
    """Let embedding and head keep their random rows beyond the folder's."""
    rows, own = theirs.vocab_size or 0, model.state_dict()
    wanted = own["lm_head.weight"].shape[0]
    if rows == wanted:
        return []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        source[name] = torch.cat([source[name], own[name][rows:].to(source[name])])
    return [f"vocabulary padded from {rows} to {wanted} rows; the new ones are random"]


def _check_tokenizer(folder: Path, config: Config) -> None:
    """ConfigError where the folder's tokenizer gives ids another meaning than the token store's."""
    if not config.data.sources or not (folder / "tokenizer.json").exists():
        return
    store = Path(config.data.sources[0].store)
    theirs, ours = _vocabulary(folder), _vocabulary(store / "tokenizer")
    differing = sorted(id for id in theirs.keys() & ours.keys() if theirs[id] != ours[id])
    if differing:
        first = differing[0]
        raise ConfigError(
            f"model.init_from: expected the tokenizer of {folder}, found another in {store}: "
            f"{len(differing)} ids differ, the first is {first}, {theirs[first]!r} there and "
            f"{ours[first]!r} here; prepare the store with --tokenizer {folder}"
        )


def _vocabulary(folder: Path) -> dict[int, str]:
    """Id to token of a tokenizer.json; empty where there is none to be read."""
    try:
        data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        entries = data["model"]["vocab"]
        if isinstance(entries, dict):
            tokens = {int(id): token for token, id in entries.items()}
        else:  # Unigram: a list of (piece, score)
            tokens = {id: piece for id, (piece, *_) in enumerate(entries)}
        return tokens | {entry["id"]: entry["content"] for entry in data.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
