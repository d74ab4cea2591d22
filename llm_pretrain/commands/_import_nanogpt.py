"""nanoGPT's configuration files (github.com/karpathy/nanoGPT): Python assignments, parsed and never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_pretrain.commands._imported_config import (
    PRECISIONS,
    ImportedConfig,
    read_text,
    swiglu_width,
)
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import file_name

_DEFAULTS: dict[str, Any] = {
    **{"eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "wandb_log": False},
    **{"wandb_project": "owt", "dataset": "openwebtext", "gradient_accumulation_steps": 40},
    **{"batch_size": 12, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0},
    **{"bias": False, "learning_rate": 6e-4, "max_iters": 600000, "weight_decay": 0.1, "beta1": 0.9},
    **{"beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000},
    **{"lr_decay_iters": 600000, "min_lr": 6e-5, "dtype": "bfloat16"},
}
"""Defaults of its train.py."""
_NOT_CARRIED_OVER = {
    "out_dir": "the run's own folder is runs/NAME, see run.output_dir",
    "eval_only": "`llm-pretrain evaluate` does that",
    "always_save_checkpoint": "checkpoints are kept by checkpoint.keep_last, the best by keep_best",
    "backend": "the machine decides",
    "device": "the launcher and the machine decide",
    "compile": "see training.compile",
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
}


def from_nanogpt(path: str) -> ImportedConfig:
    """A whole configuration from one of nanoGPT's files, over the defaults of its train.py.

    Raises:
        ConfigError: no such file, no Python, or a value of another type than the setting's.
    """
    result = ImportedConfig(path)
    try:
        given = _assignments(path, result)
    except (RecursionError, MemoryError):  # the parser raises either for deep nesting
        raise ConfigError(f"{path}: expected Python assignments, found some nested too deeply") from None
    values = _DEFAULTS | given
    for name in given:
        if name in _NOT_CARRIED_OVER:
            result.not_carried_over(f"{name} = {given[name]!r} ({_NOT_CARRIED_OVER[name]})")
        elif name not in _DEFAULTS and name not in ("wandb_run_name", "init_from"):
            result.not_carried_over(f"{name} = {given[name]!r}, which nanoGPT's train.py does not have")
    whole = [name for name, default in _DEFAULTS.items() if type(default) is int]
    wrong = [name for name in whole if type(values[name]) is not int or values[name] < 0]
    if wrong or values["dtype"] not in PRECISIONS:
        name = wrong[0] if wrong else "dtype"
        expected = "an integer of 0 or more" if wrong else "one of " + ", ".join(PRECISIONS)
        raise ConfigError(f"{path}: {name}: expected {expected}, found {values[name]!r}")
    _model(result, values)
    _data(result, values)
    _training(result, values)
    start = given.get("init_from", "scratch")
    if start not in ("scratch", "resume"):
        result.not_carried_over(f"init_from = {start!r}; GPT-2's weights do not fit our decoder")
    return result.check()


def _assignments(path: str, result: ImportedConfig) -> dict[str, Any]:
    """Names and values of the file's plain assignments; other statements are noted by line."""
    try:
        tree = ast.parse(read_text(path, "--from_nanogpt"))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(f"{path}:{line}: expected Python assignments, found: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > _LARGEST:
            raise ConfigError(
                f"{path}:{node.lineno}: expected integers of up to 18 digits, found a larger one"
            )
    values: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and len(names) == len(targets):
            try:
                values |= dict.fromkeys(names, _value(node.value, values))
                continue
            except (ValueError, ArithmeticError):
                pass
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        text = ast.unparse(node).partition("\n")[0]
        result.not_carried_over(f"line {node.lineno}, `{text[:60]}`, which would have to be run")
    return values


_LARGEST = 10**18
"""Largest integer that is read. Python refuses to print one of more than 4,300 digits."""


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Value of a constant, an earlier name, or arithmetic on numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left, names), _number(node.right, names))
    raise ValueError


def _number(node: ast.expr, names: dict[str, Any]) -> int | float:
    value = _value(node, names)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ValueError
    return value


def _model(result: ImportedConfig, values: dict[str, Any]) -> None:
    """Our decoder with the sizes of the GPT."""
    hidden, heads = values["n_embd"], values["n_head"]
    result.set(
        {
            "vocab_size": None if _is_characters(values) else 50304,
            "hidden_size": hidden,
            "intermediate_size": swiglu_width(hidden),
            "num_hidden_layers": values["n_layer"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": values["block_size"],
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-5,
            "qk_norm": False,
            "attention_dropout": values["dropout"],
            "hidden_dropout": values["dropout"],
        },
        "model",
    )
    result.notes.append(
        "our decoder at GPT-2's size: RMSNorm for LayerNorm, rotary for learned positions, SwiGLU of width "
        "8/3 for GELU of width 4 times the hidden size, which has as many parameters"
    )
    if values["bias"]:
        result.not_carried_over("bias = True; our decoder has none")


def _is_characters(values: dict[str, Any]) -> bool:
    return "char" in str(values["dataset"])


def _data(result: ImportedConfig, values: dict[str, Any]) -> None:
    """nanoGPT's own files; the tokenizer of characters comes from the `meta.pkl` beside them."""
    dataset = str(values["dataset"])
    folder, store = f"data/{dataset}", f"data/stores/{file_name(dataset)}"
    files = [f"{folder}/train.bin", f"{folder}/val.bin"]
    tokenizer = [] if _is_characters(values) else ["--tokenizer", "gpt2/"]
    result.command(*("convert", "--from", "nanogpt", "--input", *files, *tokenizer, "--output", store))
    result.set({"data.sources": [{"store": store}]})
    whose = "the characters of its meta.pkl" if _is_characters(values) else "a folder of GPT-2's tokenizer"
    result.notes.append(
        f"the data: nanoGPT's files as they are, with {whose}; to prepare them from "
        "text use `llm-pretrain prepare`, see docs/coming_from.md"
    )


def _training(result: ImportedConfig, values: dict[str, Any]) -> None:
    total = values["batch_size"] * values["gradient_accumulation_steps"]
    decays = values["decay_lr"]
    warmup = values["warmup_iters"] if decays else 0
    result.precision(values["dtype"], str(values.get("device", "cuda")))
    result.set(
        {
            "run.name": file_name(str(values.get("wandb_run_name", Path(result.origin).stem))),
            "training.sequence_length": values["block_size"],
            "training.micro_batch_size": values["batch_size"],
            "training.global_batch_size": total,
            "training.max_steps": values["max_iters"],
            "training.max_grad_norm": values["grad_clip"],
            "optimizer.learning_rate": values["learning_rate"],
            "optimizer.weight_decay": values["weight_decay"],
            "optimizer.adam_beta1": values["beta1"],
            "optimizer.adam_beta2": values["beta2"],
            "schedule.name": "cosine" if decays else "constant",
            "schedule.warmup_steps": warmup,
            "schedule.min_learning_rate": values["min_lr"] if decays else None,
            "schedule.decay_steps": max(1, values["lr_decay_iters"] - warmup) if decays else None,
            "checkpoint.save_steps": values["eval_interval"],
            "evaluation.eval_steps": values["eval_interval"],
            "evaluation.max_batches": max(1, values["eval_iters"] * values["batch_size"] // max(1, total)),
            "logging.logging_steps": values["log_interval"],
            "logging.wandb_mode": "online" if values["wandb_log"] else "disabled",
            "logging.wandb_project": str(values["wandb_project"]),
        }
    )
    result.notes.append(
        f"training.global_batch_size: {values['batch_size']} * {values['gradient_accumulation_steps']} "
        "accumulation steps, over all processes as in nanoGPT"
    )
