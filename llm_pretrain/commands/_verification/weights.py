"""Checks of the exported weights: they are the checkpoint's tensors rounded to half precision, bit for bit.

Tensor by tensor: no more than one tensor of the checkpoint and its exports are in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.checkpoints import Manifest, average_name, committed_folders
from llm_pretrain.commands._verification.checkpoints import model_tensors
from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.commands._verification.history import Attempt
from llm_pretrain.commands._verification.rows import is_integer
from llm_pretrain.commands._verification.tensors import CheckpointTensors, count_non_finite, dtype_name
from llm_pretrain.config import Config
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError
from llm_pretrain.export import TensorFiles, huggingface_config, native_config, read_config, to_huggingface

_DTYPES = {"bfloat16": ("bf16", torch.bfloat16), "float16": ("fp16", torch.float16)}
_BEST = "best"


def check_weights(
    checks: Checks,
    folder: Path,
    config: Config,
    attempts: list[Attempt],
    manifests: dict[int, Manifest],
    sound: list[int],
    tokenizer: str | None,
) -> None:
    """Checks every folder of weights, `best` too.

    Args:
        checks: Takes the outcomes.
        folder: The run's weights.
        config: The run's.
        attempts: For settings of earlier exports, and the evaluation that `best` speaks of.
        manifests: Of the run's checkpoints, by step.
        sound: Steps of the checkpoints that were found sound.
        tokenizer: SHA-256 of the stores' tokenizer.json; None where they cannot be opened.
    """
    found = dict(committed_folders(folder))
    if not found and not (folder / _BEST).is_dir():
        with checks.check("weights") as check:
            if sound:
                check.fail(f"{folder}: expected the weights of step {max(sound)}, found none")
            else:
                check.skip("none have been written yet")
        return
    for name, path in [*((path.name, path) for path in found.values()), (_BEST, folder / _BEST)]:
        if not path.is_dir() and name == _BEST:
            continue
        with checks.check(f"weights {name}") as check:
            try:
                if name == _BEST:
                    step = _check_best(check, path, attempts, newest=max(manifests, default=0))
                else:
                    step = int(name.removeprefix("step-"))
                checkpoint = folder.parent / "checkpoints" / f"step-{step or 0:08d}"
                manifest = manifests.get(step) if step in sound else None  # type: ignore[arg-type]  # None is no step
                _check_one(check, path, config, attempts, checkpoint, manifest)
                if tokenizer is not None:
                    _check_tokenizer(check, path / "tokenizer.json", tokenizer)
            except (PretrainError, OSError) as error:
                check.fail(str(error))
            if not path.exists():
                check.problems.clear()
                check.skip("the run has deleted or replaced them meanwhile")


def _check_best(check: Check, path: Path, attempts: list[Attempt], newest: int) -> int | None:
    """Reads best.json, finds the evaluation that it speaks of, and looks for a better one; returns its step.

    Up to the newest checkpoint only: what was evaluated after it may be work that was lost.
    """
    file = path / "best.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        step, loss = content["step"], content["eval/loss"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected step and eval/loss as JSON, found: {error}") from error
    if not is_integer(step):
        raise CheckpointError(f"{file}: expected a whole number of steps, found {step!r:.40}")
    losses = [each.evaluations[step] for each in attempts if step in each.evaluations]
    if losses and loss not in losses:
        check.fail(f"best.json: expected eval/loss {losses[-1]} of step {step}, found {loss!r:.40}")
    elif not losses and attempts:
        check.fail(f"best.json: expected a step with a row of evaluation, found {step!r:.40}")
    else:
        for other in _better(attempts, step, loss, newest):
            check.fail(f"best.json: expected the lowest eval/loss, that of step {other}, found step {step}'s")
    return step if isinstance(step, int) else None


def _better(attempts: list[Attempt], step: int, loss: Any, newest: int) -> list[int]:
    """Steps with a lower evaluation loss than the best's, in the attempts from the one that wrote it on.

    Empty where losses cannot be compared: settings not on record, or another `evaluation.max_batches`.
    """
    writers = [number for number, each in enumerate(attempts) if each.evaluations.get(step) == loss]
    since = attempts[writers[0] :] if writers else []
    sizes = {each.config.evaluation.max_batches if each.config else 0 for each in since}
    if len(sizes) != 1 or 0 in sizes:
        return []
    return sorted(
        {
            other
            for each in since
            for other, value in each.evaluations.items()
            if 0 < other <= newest and isinstance(value, float) and value < loss
        }
    )


def _check_tokenizer(check: Check, file: Path, expected: str) -> None:
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != expected:
        check.fail(f"tokenizer.json: expected the stores' tokenizer ({expected[:12]}), found {found[:12]}")
    check.looked_at += "; tokenizer"


def _check_one(
    check: Check,
    path: Path,
    config: Config,
    attempts: list[Attempt],
    checkpoint: Path,
    manifest: Manifest | None,
) -> None:
    content = read_config(path)
    found = content.get("dtype", content.get("torch_dtype"))
    if not isinstance(found, str) or found not in _DTYPES:
        raise CheckpointError(f"config.json: expected a dtype of {', '.join(_DTYPES)}, found {found!r:.40}")
    short, dtype = _DTYPES[found]
    _check_config(check, content, short, config, attempts)
    check.looked_at = "config.json"
    state, _ = model_tensors(config)
    with TensorFiles(path) as files:
        if manifest is None:
            check.reason = "comparing values: no sound checkpoint of this step is left"
            count = _compare(check, files, state, _zeros(state), config, dtype, values=False)
            check.looked_at += f"; {count} tensors by name, shape and type, finite"
            return
        try:
            with CheckpointTensors(checkpoint, manifest) as tensors:
                names = [name for name in state if name in manifest.tensors]
                averaged = average_name(names[0]) in manifest.tensors
                count = _compare(check, files, names, _reader(tensors, manifest), config, dtype, values=True)
        except (PretrainError, OSError):
            if checkpoint.exists():
                raise
            check.reason = "comparing values: the run has deleted the checkpoint meanwhile"
            return
    whose = "checkpoint's average" if averaged else "checkpoint's"
    check.looked_at += f"; {count} tensors, each the {whose} in {found}, bit for bit, and finite"


def _reader(tensors: CheckpointTensors, manifest: Manifest) -> Callable[[str], Tensor]:
    """Reads what weights are made of: a parameter's average, or the parameter where there is none."""

    def read(name: str) -> Tensor:
        average = average_name(name)
        return tensors.read(average if average in manifest.tensors else name)

    return read


def _check_config(
    check: Check, content: dict[str, Any], dtype: str, config: Config, attempts: list[Attempt]
) -> None:
    """config.json against the settings of the run, or of an earlier attempt that may have exported it."""
    configs = [each.config for each in reversed(attempts) if each.config is not None]
    differences: list[list[str]] = []
    for each in [config, *configs]:
        arguments: dict[str, Any] = {
            "bos_token_id": content.get("bos_token_id"),
            "eos_token_id": content.get("eos_token_id"),
            "pad_token_id": content.get("pad_token_id"),
            "dtype": dtype,
        }
        try:
            expected = huggingface_config(each.model, **arguments)
        except ConfigError:
            expected = native_config(each.model, **arguments)
        expected = json.loads(json.dumps(expected))
        names = sorted(expected.keys() | content.keys())
        differences.append(
            [
                f"config.json: expected {name} {expected.get(name)!r:.60}, found {content.get(name)!r:.60}"
                for name in names
                if expected.get(name) != content.get(name)
            ]
        )
    for line in min(differences, key=len):
        check.fail(line)
    if dtype not in {each.checkpoint.weights_dtype for each in [config, *configs]}:
        check.fail(f"config.json: expected weights in {config.checkpoint.weights_dtype}, found {dtype}")


def _zeros(state: dict[str, Tensor]) -> Any:
    """Reads zeros of a tensor's shape: where only names, shapes and types are compared."""
    return lambda name: torch.zeros(state[name].shape, dtype=state[name].dtype)


def _compare(
    check: Check,
    files: TensorFiles,
    names: Any,
    read: Any,
    config: Config,
    dtype: torch.dtype,
    *,
    values: bool,
) -> int:
    """Compares the exports of the decoder's tensors `names`, which `read` gives; returns how many."""
    left, count = set(files.names), 0
    for name in names:
        if name == "lm_head.weight" and config.model.tie_word_embeddings:
            continue
        for disk_name, expected in to_huggingface({name: read(name)}, config.model, dtype).items():
            count += 1
            if disk_name not in left:
                check.fail(f"{disk_name}: expected such a tensor, found none")
                continue
            left.remove(disk_name)
            found = files.read(disk_name)
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                check.fail(
                    f"{disk_name}: expected {dtype_name(expected)} {list(expected.shape)}, "
                    f"found {dtype_name(found)} {list(found.shape)}"
                )
            elif bad := count_non_finite(found):
                check.fail(f"{disk_name}: expected finite values, found {bad} that are not")
            elif values and not _same_bits(found, expected):
                other = int((found != expected).sum())
                check.fail(
                    f"{disk_name}: expected the checkpoint's values in {dtype_name(expected)}, found "
                    f"{other} of {found.numel()} others"
                )
    for name in sorted(left):
        check.fail(f"{name}: expected no such tensor, found one")
    return count


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8)) if left.dim() else bool(left == right)
