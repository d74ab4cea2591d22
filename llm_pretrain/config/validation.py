"""Contradictions and impossible values in a well-typed configuration, all of them, by field name.

Knows the meaning of the fields and the number of processes; not where a value came from, and nothing
of the machine except whether the paths and packages that a field names can be used.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from llm_pretrain.config.checking import check_tree
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.config.validation_data import data_problems
from llm_pretrain.config.validation_kernels import kernel_problems, kernel_relations
from llm_pretrain.config.validation_model import Relation, attention_relations, model_relations
from llm_pretrain.config.validation_ranges import range_problems


def validate(config: Config, world_size: int = 1, *, needs_data: bool = True) -> list[str]:
    """Every contradiction in `config`, one line each, the field's name first; empty when there is none.

    Args:
        config: A configuration whose fields have their types.
        world_size: Number of processes of the run.
        needs_data: Whether `data.sources` must name a store.
    """
    alone = [
        *range_problems(config),
        *_names(config),
        *data_problems(config.data, needs_data),
        *kernel_problems(config),
    ]
    wrong = {line.partition(":")[0] for line in alone}
    relations = [*model_relations(config), *_batch(config, world_size), *_schedule(config)]
    relations += [*_samples(config), *_deepspeed(config), *_spikes(config)]
    relations += [*kernel_relations(config), *_float8(config)]
    # a relation to a value that is impossible anyway says nothing new, and may not be computable
    return alone + [text for names, text in relations if not wrong.intersection(names)]


def shape_problems(model: ModelConfig) -> list[str]:
    """What is wrong in a model that somebody else has described: types, and values impossible anywhere."""
    if problems := check_tree({"model": dataclasses.asdict(model)})[1]:
        return [problem.line for problem in problems]
    config = Config(model=model)
    alone = [line for line in range_problems(config) if line.startswith("model.")]
    return alone or [line for _, line in attention_relations(model)]


def _names(config: Config) -> Iterator[str]:
    """Names and paths."""
    name, output_dir, resume = config.run.name, config.run.output_dir, config.checkpoint.resume
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name):
        yield (
            "run.name: expected at most 128 letters, digits, `.`, `_` and `-`, the first no `.` or `-`, "
            f"found {name!r}"
        )
    if output_dir is not None and not output_dir.strip():
        yield f"run.output_dir: expected a folder, found {output_dir!r}"
    elif output_dir is not None and _is_other_than_folder(output_dir):
        yield f"run.output_dir: expected a folder, found another thing at {output_dir!r}"
    if resume not in ("auto", "never") and not _is_folder(resume) and not _is_past(resume, config):
        yield f"checkpoint.resume: expected auto, never or a checkpoint's folder, found {resume!r}"
    project = config.logging.wandb_project
    if not re.fullmatch(r"[^/\\#?%:\s][^/\\#?%:\n]{0,127}", project):
        yield f"logging.wandb_project: expected at most 128 characters, none of /\\#?%:, found {project!r}"
    if config.logging.tensorboard and find_spec("tensorboard") is None:
        yield (
            "logging.tensorboard: expected the package tensorboard, found none; "
            "pip install 'llm_pretrain[tensorboard]', or leave it off"
        )


def _is_folder(path: str) -> bool:
    try:
        return bool(path) and Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _is_past(resume: str, config: Config) -> bool:
    """Whether the run has checkpoints of its own, which outrank another run's that is gone by now."""
    own = config.run.folder / "checkpoints"
    try:
        return bool(resume) and Path(resume).resolve().parent != own.resolve() and any(own.glob("step-*"))
    except (OSError, ValueError):
        return False


def _is_other_than_folder(path: str) -> bool:
    try:
        return Path(path).exists() and not Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _batch(config: Config, world_size: int) -> Iterator[Relation]:
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    names = ("training.global_batch_size", "training.micro_batch_size")
    unit = micro * world_size
    if unit > 0 and total % unit == 0:
        return
    below = max(total // unit, 0) * unit if unit > 0 else 0
    sizes = " or ".join(str(size) for size in (below, below + unit) if size > 0)
    advice = f"{names[0]} {sizes} would work"
    if total % world_size == 0:
        each = total // world_size
        fits = [size for size in range(1, min(each, 4096) + 1) if each % size == 0]
        near = sorted(sorted(fits, key=lambda size: abs(size - micro))[:5])
        advice += f", or {names[1]} " + " or ".join(str(size) for size in near)
    else:
        advice += f"; no {names[1]} works with {total} on {world_size} processes"
    yield (
        names,
        f"{names[0]}: expected a multiple of {names[1]} * world size = {micro} * {world_size} = {unit}, "
        f"found {total}; {advice}",
    )


def _schedule(config: Config) -> Iterator[Relation]:
    schedule, peak, steps = config.schedule, config.optimizer.learning_rate, config.training.max_steps
    names = ("schedule.warmup_steps", "training.max_steps")
    if schedule.warmup_steps > steps:
        yield (
            names,
            f"{names[0]}: expected at most {names[1]} = {steps}, found {schedule.warmup_steps}; lower it, or "
            f"raise {names[1]}",
        )
    names = ("schedule.min_learning_rate", "optimizer.learning_rate")
    if schedule.min_learning_rate > peak:
        yield names, f"{names[0]}: expected at most {names[1]} = {peak}, found {schedule.min_learning_rate}"
    names = ("schedule.decay_steps", "schedule.warmup_steps", "training.max_steps")
    rest = steps - schedule.warmup_steps
    if schedule.name == "wsd" and schedule.decay_steps is not None and schedule.decay_steps > rest >= 0:
        yield (
            names,
            f"{names[0]}: expected at most {names[2]} - {names[1]} = {rest} for the wsd schedule, "
            f"found {schedule.decay_steps}",
        )


def _samples(config: Config) -> Iterator[Relation]:
    tokens, positions = config.evaluation.sample_tokens, config.model.max_position_embeddings
    names = ("evaluation.sample_tokens", "model.max_position_embeddings")
    if config.evaluation.sample_prompts and tokens >= positions:
        yield names, f"{names[0]}: expected less than {names[1]} = {positions}, found {tokens}"


_REFUSED_BY_DEEPSPEED: dict[str, tuple[Sequence[object], str, str]] = {
    "training.precision": (
        ["fp16"],
        "fp32 or bf16",
        ", whose loss scale DeepSpeed would keep to itself and no checkpoint has; use bf16",
    ),
    "training.compile": (
        ["on"],
        "auto or off",
        ", whose graphs DeepSpeed's hooks would cut; use ddp or fsdp",
    ),
    "training.float8": ([True], "false", "; use ddp or fsdp"),
    "training.spike_action": (
        ["skip", "rollback"],
        "log",
        ", but its engine takes every step before it can be judged; use ddp or fsdp",
    ),
    "optimizer.name": (
        ["muon"],
        "adamw",
        ", which needs whole matrices, but ZeRO's optimizer sees flat parts of them; use ddp or fsdp",
    ),
}
"""Of each field the values that DeepSpeed cannot do, what to set instead, and why."""


def _deepspeed(config: Config) -> Iterator[Relation]:
    if config.distributed.strategy != "deepspeed":
        return
    strategy = "distributed.strategy"
    for name, (refused, expected, why) in _REFUSED_BY_DEEPSPEED.items():
        section, field = name.split(".")
        found = getattr(getattr(config, section), field)
        if found in refused:
            shown = str(found).lower() if isinstance(found, bool) else found
            yield (
                (name, strategy),
                f"{name}: expected {expected} with {strategy} deepspeed, found {shown}{why}",
            )
    if decay := config.optimizer.ema_decay:
        yield (
            ("optimizer.ema_decay", strategy),
            f"optimizer.ema_decay: expected 0 with {strategy} deepspeed, found {decay}, but "
            "ZeRO's optimizer has no place for an average of the parameters; use ddp or fsdp",
        )


def _float8(config: Config) -> Iterator[Relation]:
    training = config.training
    names = ("training.float8", "training.precision")
    if training.float8 and training.precision not in ("auto", "bf16"):
        yield names, f"{names[0]}: expected false with {names[1]} {training.precision}, found true; set bf16"
    names = ("training.float8", "training.micro_batch_size", "training.sequence_length")
    if training.float8 and (tokens := training.micro_batch_size * training.sequence_length) % 16:
        yield (
            names,
            f"{names[0]}: expected {names[1]} * {names[2]} to be a multiple of 16, which FP8 products take, "
            f"found {tokens}",
        )


def _spikes(config: Config) -> Iterator[Relation]:
    action = config.training.spike_action
    names = ("training.spike_action", "checkpoint.save_steps")
    if action == "rollback" and config.checkpoint.save_steps == 0:
        yield (
            names,
            f"{names[0]}: expected log or skip with {names[1]} 0, found rollback, which goes back to a "
            f"periodic checkpoint; set {names[1]}",
        )
