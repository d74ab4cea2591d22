"""Checks of the checkpoints: files, fingerprints, names and shapes of tensors, finite values.

A running run deletes its oldest checkpoints: one that goes while it is read is no failure.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.checkpoints import (
    Manifest,
    committed_folders,
    find_damage,
    fingerprint_differences,
    read_manifest,
)
from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.commands._verification.history import Attempt
from llm_pretrain.commands._verification.rows import is_integer
from llm_pretrain.commands._verification.tensors import CheckpointTensors, count_non_finite, dtype_name
from llm_pretrain.config import Config
from llm_pretrain.data import weight_changes_fingerprint
from llm_pretrain.errors import PretrainError
from llm_pretrain.model import Decoder
from llm_pretrain.training import fingerprints, state_tensors

_OPTIMIZER = "optimizer.state."


def model_tensors(config: Config) -> tuple[dict[str, Tensor], set[str]]:
    """The decoder's state by name, without memory of its own, and which of the names are parameters."""
    with torch.device("meta"):
        model = Decoder(config.model)
    return model.state_dict(), {name for name, _ in model.named_parameters(remove_duplicate=False)}


def read_manifests(folder: Path) -> dict[int, Manifest]:
    """Step and manifest of each committed checkpoint whose manifest is sound, ascending."""
    manifests: dict[int, Manifest] = {}
    for step, path in committed_folders(folder).items():
        try:
            manifests[step] = read_manifest(path)
        except PretrainError:
            continue  # `check_checkpoints` names it
    return manifests


def check_data(checks: Checks, config: Config, manifests: dict[int, Manifest]) -> dict[str, str] | None:
    """Whether the stores are those of the newest checkpoint; returns the configuration's fingerprints."""
    expected = None
    with checks.check("data") as check:
        expected = fingerprints(config)
        stores = [source.store for source in config.data.sources]
        check.looked_at = f"{', '.join(stores)}: opened"
        if not manifests:
            check.reason = "comparing them with a checkpoint: none is sound yet"
            return expected
        newest = max(manifests)
        data = ("data.", "tokenizer", "training.sequence_length")
        saved, wanted = (
            {key: text for key, text in side.items() if key.startswith(data) and "weight_changes" not in key}
            for side in (manifests[newest].run.fingerprints, expected)
        )
        for line in fingerprint_differences(saved, wanted):
            check.fail(f"step {newest}: {line}")
        check.looked_at += f", hashes and order as in the checkpoint of step {newest}"
    return expected


def check_checkpoints(
    checks: Checks,
    folder: Path,
    config: Config,
    expected: dict[str, str] | None,
    attempts: list[Attempt],
    *,
    needed: bool,
) -> list[int]:
    """Checks every committed checkpoint; returns the steps of the sound ones.

    Args:
        checks: Takes the outcomes.
        folder: The run's checkpoints.
        config: The run's.
        expected: Fingerprints of the configuration; None where the stores cannot be opened.
        attempts: For the rows that must agree.
        needed: Whether the run says that it has one.
    """
    sound = []
    found = committed_folders(folder)
    if not found:
        with checks.check("checkpoints") as check:
            if needed:
                check.fail(f"{folder}: expected a checkpoint, as status.json says, found none")
            else:
                check.skip("none has been written yet")
    for step, path in found.items():
        with checks.check(f"checkpoint {path.name}") as check:
            try:
                _check_one(check, step, path, config, expected, attempts)
            except (PretrainError, OSError) as error:
                check.fail(str(error))
            if not path.exists():  # pruned while it was read
                check.problems.clear()
                check.skip("the run has deleted it meanwhile, as it does with older ones")
        if check.result == "ok":
            sound.append(step)
    return sound


def _check_one(
    check: Check,
    step: int,
    path: Path,
    config: Config,
    expected: dict[str, str] | None,
    attempts: list[Attempt],
) -> None:
    manifest = read_manifest(path)
    if manifest.run.step != step:
        check.fail(f"manifest.json: expected step {step}, found {manifest.run.step}")
    for problem in find_damage(path, manifest):
        check.fail(problem)
    size = sum(entry["bytes"] for entry in manifest.files.values())
    check.looked_at = f"{len(manifest.files)} files, {size:,} bytes, SHA-256"
    if check.problems:
        check.reason = "its tensors, since its files are not what the manifest says"
        return
    if expected is None:
        check.reason = "fingerprints, since the stores cannot be opened"
    else:
        wanted = expected | weight_changes_fingerprint(config, step)
        for line in fingerprint_differences(manifest.run.fingerprints, wanted):
            check.fail(f"config.yaml: {line}")
        check.looked_at += f"; {len(wanted)} fingerprints"
    for problem in _name_problems(manifest, config):
        check.fail(problem)
    _check_values(check, path, manifest)
    _check_row(check, step, path, manifest, config, attempts)


def _name_problems(manifest: Manifest, config: Config) -> list[str]:
    """Names, shapes and types of the tensors against the configuration's model and its optimizer."""
    state, parameters = model_tensors(config)
    expected = {
        name: {"dtype": dtype_name(tensor), "shape": list(tensor.shape)}
        for name, tensor in state.items()
        if name not in manifest.tied
    }
    found = manifest.tensors
    if manifest.run.strategy == "deepspeed":  # its optimizer's layout is its own
        found = {name: facts for name, facts in found.items() if not name.startswith(_OPTIMIZER)}
    else:
        stateless = set(manifest.optimizer.get("without_state", []))
        expected |= {
            f"{_OPTIMIZER}{name}.{key}": expected[name]
            for name in (parameters & expected.keys()) - stateless
            for key in state_tensors(name, state[name], config.optimizer)
        }
    return [
        f"{name}: expected {_words(expected.get(name))}, by config.yaml, found {_words(found.get(name))}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def _words(facts: dict[str, Any] | None) -> str:
    return f"{facts['dtype']} {facts['shape']}" if facts else "no such tensor"


def _check_values(check: Check, path: Path, manifest: Manifest) -> None:
    numbers = 0
    with CheckpointTensors(path, manifest) as tensors:
        for problem in tensors.problems:
            check.fail(problem)
        if tensors.problems:
            return
        for name, facts in manifest.tensors.items():
            bad = 0
            for part in tensors.parts(name):
                numbers += part.numel()
                bad += count_non_finite(part)
                if dtype_name(part) != facts["dtype"]:
                    check.fail(f"{name}: expected {facts['dtype']}, found {dtype_name(part)} in the file")
            if bad:
                check.fail(f"{name}: expected finite values, found {bad} that are not")
    scalars = {name: scalar.get("value") for name, scalar in manifest.scalars.items()}
    scalars |= {f"scaler.{name}": value for name, value in (manifest.scaler or {}).items()}
    for name, value in scalars.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            check.fail(f"{name}: expected a finite number, found {value!r:.40}")
    check.looked_at += (
        f"; {len(manifest.tensors)} tensors by name, shape and type, {numbers:,} values and "
        f"{len(scalars)} scalars finite"
    )


def _check_row(
    check: Check, step: int, path: Path, manifest: Manifest, config: Config, attempts: list[Attempt]
) -> None:
    """Whether the checkpoint and a row of its step count the same tokens, and have the same parameters."""
    rows = [row for attempt in attempts for row in attempt.rows if row["step"] == step]
    if not rows:
        return
    counts = [row["train/tokens"] for row in rows if is_integer(row.get("train/tokens"))]
    if manifest.run.tokens_seen not in counts:
        check.fail(
            f"manifest.json: expected tokens_seen {' or '.join(map(str, counts))}, as train/tokens of step "
            f"{step}, found {manifest.run.tokens_seen}"
        )
    check.looked_at += "; tokens as in the row"
    digests = {
        row["train/parameters_sha256"] for row in rows if isinstance(row.get("train/parameters_sha256"), str)
    }
    if digests and not check.problems:
        found = _parameters_sha256(path, manifest, config)
        if found not in digests:
            check.fail(
                f"parameters: expected SHA-256 {' or '.join(sorted(digests)):.40}, as "
                f"train/parameters_sha256 of step {step}, found {found}"
            )
        check.looked_at += "; parameters as in the row"


def _parameters_sha256(path: Path, manifest: Manifest, config: Config) -> str:
    """What `train/parameters_sha256` would be of the checkpoint's parameters."""
    digest = hashlib.sha256()
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config.model).named_parameters()]
    with CheckpointTensors(path, manifest) as tensors:
        for name in names:
            digest.update(tensors.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
