"""litgpt's pretraining files (github.com/Lightning-AI/litgpt, config_hub/pretrain/*.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_pretrain.commands._imported_config import ImportedConfig, parse_yaml, read_text
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import file_name

_LLAMA = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
_LLAMA |= {"parallel_residual": False, "rotary_percentage": 1.0}
_KNOWN: dict[str, dict[str, Any]] = {
    "tiny-llama-1.1b": _LLAMA | {
        "vocab_size": 32000, "padding_multiple": 64, "block_size": 2048, "n_layer": 22, "n_head": 32,
        "n_embd": 2048, "n_query_groups": 4, "intermediate_size": 5632, "norm_eps": 1e-5,
    },
    "micro-llama-300M": _LLAMA | {
        "vocab_size": 32000, "padding_multiple": 64, "block_size": 2048, "n_layer": 12, "n_head": 16,
        "n_embd": 1024, "n_query_groups": 4, "intermediate_size": 5632, "norm_eps": 1e-5,
    },
}  # fmt: skip
"""Shape of each `model_name`, from its litgpt/config.py."""
_EXPECTED = {
    "norm_class_name": ("RMSNorm", "LayerNorm"), "mlp_class_name": ("LLaMAMLP", "GptNeoxMLP"),
    "bias": (False, True), "parallel_residual": (False, True), "rotary_percentage": (1.0, 0.25),
}  # fmt: skip
"""Value of our decoder, and litgpt's default."""
_SHAPE = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "intermediate_size": "intermediate_size", "block_size": "max_position_embeddings",
    "moe_intermediate_size": "moe_intermediate_size", "head_size": "head_dim", "norm_qk": "qk_norm",
    "n_expert": "num_experts", "n_expert_per_token": "num_experts_per_tok",
}  # fmt: skip
_OTHER_SHAPE = {
    *("padded_vocab_size", "vocab_size", "padding_multiple", "n_query_groups", "norm_eps", "rope_base"),
    *("name", "hf_config", *_EXPECTED),
}
_PRECISIONS = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "32-true": "fp32"}
_TRAIN = {
    "global_batch_size": "training.global_batch_size", "micro_batch_size": "training.micro_batch_size",
    "lr_warmup_steps": "schedule.warmup_steps", "min_lr": "schedule.min_learning_rate",
    "save_interval": "checkpoint.save_steps", "log_interval": "logging.logging_steps",
    "max_norm": "training.max_grad_norm",
    "learning_rate": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.adam_beta1", "beta2": "optimizer.adam_beta2",
}  # fmt: skip
_TRAIN_DEFAULTS = {
    "global_batch_size": 512, "micro_batch_size": 4, "lr_warmup_steps": 2000, "min_lr": 4e-5,
    "save_interval": 1000, "log_interval": 1, "max_norm": 1.0,
}  # fmt: skip
_NULL_MEANS_0 = {"lr_warmup_steps", "save_interval"}
_EVALUATION_DEFAULTS = {"interval": 1000, "max_iters": 100}
_OPTIMIZER_DEFAULTS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""litgpt's in litgpt/pretrain.py, and those of torch.optim.AdamW, which it takes for the optimizer."""
_TRAIN_ELSEWHERE = {"max_tokens", "max_steps", "max_seq_length", "tie_embeddings"}
_OPTIMIZER = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
_WHOLE = {"global_batch_size", "max_seq_length", "block_size", "vocab_size", "padding_multiple", "n_embd"}
_WHOLE |= {"max_tokens", "n_layer", "n_head", "micro_batch_size", "max_iters"}
_TOP = {"model_name", "model_config", "precision", "data", "train", "eval", "optimizer", "seed"}
_TOP |= {"logger_name", "tokenizer_dir"}


def from_litgpt(path: str) -> ImportedConfig:
    """A whole configuration from one of litgpt's pretraining files.

    Raises:
        ConfigError: no such file, no YAML, a model of unknown shape, or an optimizer we lack.
    """
    text = read_text(path, "--from_litgpt")
    data = parse_yaml(path, text, "litgpt's settings, such as `train:`")
    result = ImportedConfig(path)
    defaults = {"train": _TRAIN_DEFAULTS, "eval": _EVALUATION_DEFAULTS}
    sections = {name: each | _given(_section(path, data, name)) for name, each in defaults.items()}
    train = _section(path, data, "train")
    sections["train"] |= {name: 0 for name in _NULL_MEANS_0 & train.keys() if train[name] is None}
    shape = _shape(path, data)
    for name, value in (("train.", sections["train"]), ("eval.", sections["eval"]), ("model_config.", shape)):
        for key in _WHOLE & value.keys():
            if value[key] is not None and (type(value[key]) is not int or value[key] < 1):
                raise ConfigError(f"{path}: {name}{key}: expected a positive integer, found {value[key]!r}")
    _model(result, shape, sections["train"])
    _training(result, data, sections["train"], sections["eval"], shape)
    for name, value in data.items():
        if name not in _TOP and value not in (None, False, "auto", 1):
            result.not_carried_over(f"{name}: {value}")
    return result.check()


def _given(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _section(path: str, data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name}: expected a section with its fields, found {value!r:.60}")
    return value


def _shape(path: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of litgpt's Config: given in the file, or of a known name."""
    name, shape = data.get("model_name"), _section(path, data, "model_config")
    if shape:
        if missing := [key for key in ("n_embd", "n_layer", "n_head") if shape.get(key) is None]:
            raise ConfigError(f"{path}: model_config.{missing[0]}: expected a positive integer, found none")
        if shape.get("mlp_class_name") == "LLaMAMLP" and shape.get("intermediate_size") is None:
            raise ConfigError(
                f"{path}: model_config.intermediate_size: expected a positive integer with mlp_class_name "
                "LLaMAMLP, found none"
            )
        return {"name": name or shape.get("name"), **_given(shape)}
    if not isinstance(name, str) or name not in _KNOWN:
        raise ConfigError(
            f"{path}: model_name: expected one of {', '.join(_KNOWN)}, or the shape under model_config, "
            f"found {name!r}"
        )
    return {"name": name, **_KNOWN[name]}


def _model(result: ImportedConfig, shape: dict[str, Any], train: dict[str, Any]) -> None:
    rows, multiple = shape.get("vocab_size", 50254), shape.get("padding_multiple", 512)
    result.set({setting: shape.get(name) for name, setting in _SHAPE.items()}, "model")
    result.set(
        {
            "intermediate_size": shape.get("intermediate_size", 4 * shape["n_embd"]),
            "max_position_embeddings": shape.get("block_size", 4096),
            "num_key_value_heads": shape.get("n_query_groups", shape["n_head"]),
            "rms_norm_eps": shape.get("norm_eps", 1e-5),
            "rope_theta": shape.get("rope_base", 10000),
            "qk_norm": bool(shape.get("norm_qk", False)),
            "tie_word_embeddings": bool(train.get("tie_embeddings")),
            "vocab_size": shape.get("padded_vocab_size") or -(-rows // multiple) * multiple,
        },
        "model",
    )
    if shape.get("n_expert"):
        result.notes.append(
            "litgpt's mixture of experts normalises the chosen experts' weights, as we do by default"
        )
    for name, (ours, default) in _EXPECTED.items():
        if (found := shape.get(name, default)) != ours and (name, found) != ("mlp_class_name", "LLaMAMoE"):
            result.not_carried_over(f"model_config.{name}: {found}; our decoder has {ours}")
    for name, value in shape.items():
        if name not in _SHAPE and name not in _OTHER_SHAPE and value not in (None, False):
            result.not_carried_over(f"model_config.{name}: {value}")


def _training(
    result: ImportedConfig,
    data: dict[str, Any],
    train: dict[str, Any],
    evaluation: dict[str, Any],
    shape: dict[str, Any],
) -> None:
    for name, value in train.items():
        if name in _TRAIN:
            result.set({_TRAIN[name]: value})
        elif name not in _TRAIN_ELSEWHERE and value is not None:
            result.not_carried_over(f"train.{name}: {value}")
    total = train["global_batch_size"]
    length = train.get("max_seq_length") or shape.get("block_size", 4096)
    steps = train.get("max_steps")
    if steps is None and isinstance(tokens := train.get("max_tokens"), int):
        steps = max(1, tokens // (total * length))
    if steps is None:
        result.notes.append("training.max_steps: litgpt's file sets neither max_steps nor max_tokens")
    precision, logger = data.get("precision") or "bf16-mixed", data.get("logger_name")
    if precision not in ("bf16-mixed", "16-mixed", "32-true"):
        result.notes.append(f"precision: {precision}: weights and optimizer stay in fp32 here")
    result.set(
        {
            "run.name": file_name(Path(str(data.get("out_dir") or shape["name"] or "litgpt")).name),
            "run.seed": data.get("seed", 42),
            "training.sequence_length": length,
            "training.max_steps": steps,
            "training.precision": _PRECISIONS.get(str(precision)),
            "schedule.name": "cosine",
            "evaluation.eval_steps": evaluation["interval"],
            "logging.wandb_mode": "online" if logger == "wandb" else "disabled",
            "logging.tensorboard": True if logger == "tensorboard" else None,
        }
    )
    _optimizer(result, data.get("optimizer"))
    _evaluation(result, evaluation, train["micro_batch_size"], total)
    source = data.get("data")
    name = (source.get("class_path") if isinstance(source, dict) else source) or "TinyLlama"
    tokenizer = data.get("tokenizer_dir")
    result.data("corpus.jsonl", str(name).rpartition(".")[2].lower(), 32000, tokenizer and str(tokenizer))
    result.notes.append(f"data: {name}: the corpus has to be in files; name them in place of corpus.jsonl")


def _evaluation(
    result: ImportedConfig, evaluation: dict[str, Any], micro_batch_size: int, global_batch_size: int
) -> None:
    """litgpt's validate() counts micro batches per process, `evaluation.max_batches` global batches."""
    micro_batches = evaluation["max_iters"]
    batches = max(1, micro_batches * micro_batch_size // global_batch_size)
    result.set({"evaluation.max_batches": batches})
    result.notes.append(
        f"evaluation.max_batches: eval.max_iters counts micro batches of each process: {micro_batches} * "
        f"{micro_batch_size} sequences are {batches} of the global batch, for one process"
    )
    for name in sorted(evaluation.keys() - {"interval", "max_iters"}):
        if evaluation[name] not in (None, False):
            result.not_carried_over(f"eval.{name}: {evaluation[name]}")


def _optimizer(result: ImportedConfig, optimizer: Any) -> None:
    """Options of AdamW, from litgpt's `optimizer:`."""
    options: dict[str, Any] = {}
    name = optimizer
    if isinstance(optimizer, dict):
        name, options = optimizer.get("class_path"), optimizer.get("init_args") or {}
    if name is not None and str(name).rpartition(".")[2] != "AdamW":
        raise ConfigError(f"{result.origin}: optimizer: expected AdamW, found {name!r}")
    if not isinstance(options, dict):
        raise ConfigError(f"{result.origin}: optimizer.init_args: expected a section, found {options!r}")
    for key, value in (_OPTIMIZER_DEFAULTS | _given(options)).items():
        if key in _OPTIMIZER:
            result.set({f"optimizer.{_OPTIMIZER[key]}": value})
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            result.set({"adam_beta1": value[0], "adam_beta2": value[1]}, "optimizer")
        elif key != "fused":
            result.not_carried_over(f"optimizer.{key}: {value}")
