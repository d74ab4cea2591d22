"""Checks of checkpoints and exported weights for `llm-pretrain verify`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.audit.checks import Check, Checks
from llm_pretrain.audit.comparison import tensor_difference
from llm_pretrain.audit.history_checks import RunFiles, is_integer
from llm_pretrain.checkpoints.folders import committed_folders, folder_name
from llm_pretrain.checkpoints.manifest import Manifest, find_damage, fingerprint_differences, read_manifest
from llm_pretrain.checkpoints.opening import CheckpointTensors, is_checkpoint
from llm_pretrain.checkpoints.weights import saved_names
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import weight_changes_fingerprint
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError
from llm_pretrain.export.config_json import huggingface_config, native_config
from llm_pretrain.export.huggingface import TensorFiles, read_config, to_huggingface
from llm_pretrain.files import read_marker, read_object
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.ema import average_name
from llm_pretrain.runs.rows import read_rows
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.saving import fingerprints


def model_tensors(config: Config) -> dict[str, Tensor]:
    """The decoder's state dict on the meta device."""
    with torch.device("meta"):
        return Decoder(config.model).state_dict()


def read_manifests(folder: Path) -> dict[int, Manifest]:
    """Step and manifest of each committed checkpoint whose manifest is sound, ascending."""
    manifests: dict[int, Manifest] = {}
    for step, path in committed_folders(folder).items():
        with suppress(PretrainError):  # check_checkpoints reports it
            manifests[step] = read_manifest(path)
    return manifests


def check_data(check: Check, run: RunFiles) -> None:
    """Open the stores and compare them with the newest checkpoint."""
    run.fingerprints = fingerprints(run.config)
    stores = [source.store for source in run.config.data.sources]
    check.looked_at = f"{', '.join(stores)}: opened"
    if not run.manifests:
        check.reason = "comparing them with a checkpoint: none is sound yet"
        return
    newest = max(run.manifests)
    data = ("data.", "tokenizer", "training.sequence_length")
    saved, wanted = (
        {key: text for key, text in side.items() if key.startswith(data) and "weight_changes" not in key}
        for side in (run.manifests[newest].run.fingerprints, run.fingerprints)
    )
    for line in fingerprint_differences(saved, wanted):
        check.fail(f"step {newest}: {line}")
    check.looked_at += f", hashes and order as in the checkpoint of step {newest}"


def check_checkpoints(checks: Checks, run: RunFiles) -> None:
    """Check every committed checkpoint, and add the steps of sound ones to `run.sound`."""
    folder = run.folder / "checkpoints"
    found = committed_folders(folder)
    if not found:
        with checks.check("checkpoints") as check:
            if run.ended_with_save:
                check.fail(f"{folder}: expected a checkpoint, as status.json says, found none")
            else:
                check.skip("none has been written yet")
    for step, path in found.items():
        check = checks.run(f"checkpoint {path.name}", _check_checkpoint, run, step, path)
        if check.result == "ok":
            run.sound.append(step)


def _check_checkpoint(check: Check, run: RunFiles, step: int, path: Path) -> None:
    check.folder = path
    manifest = read_manifest(path)
    if manifest.run.step != step:
        check.fail(f"manifest.json: expected step {step}, found {manifest.run.step}")
    run_id = (read_marker(run.folder, "run") or {}).get("id")
    if run_id is not None and manifest.run.run_id != run_id:
        check.fail("manifest.json: expected a checkpoint of this folder's run, found another run's")
    for problem in find_damage(path, manifest):
        check.fail(problem)
    size = sum(entry["bytes"] for entry in manifest.files.values())
    check.looked_at = f"{len(manifest.files)} files, {size:,} bytes, SHA-256"
    if check.problems:
        check.reason = "its tensors, since its files are not what the manifest says"
        return
    if start := Progress.resumed(manifest.run, path).started_from:
        if not is_checkpoint(Path(start.path)):
            check.reason = f"its start from {start.path}, which is not there"
        elif difference := start.difference(Path(start.path)):
            check.fail(f"manifest.json: {difference}")
        check.looked_at += f"; started from {start.path}"
    if run.fingerprints is None:
        check.reason = "fingerprints, since the stores cannot be opened"
    else:
        wanted = run.fingerprints | weight_changes_fingerprint(run.config, step)
        for line in fingerprint_differences(manifest.run.fingerprints, wanted):
            check.fail(f"config.yaml: {line}")
        check.looked_at += f"; {len(wanted)} fingerprints"
    for name, tensor in model_tensors(run.config).items():
        shape = manifest.tensors.get(name, {}).get("shape")
        if name not in manifest.tied and shape != list(tensor.shape):
            check.fail(f"{name}: expected shape {list(tensor.shape)}, by config.yaml, found {shape}")
    _check_row(check, run, step, path, manifest)


def _check_row(check: Check, run: RunFiles, step: int, path: Path, manifest: Manifest) -> None:
    """Compare the checkpoint's token count and parameter digest with the row of its step."""
    if (row := run.rows.get(step)) is None:
        return
    if manifest.run.tokens_seen != row.get("train/tokens"):
        check.fail(
            f"manifest.json: expected tokens_seen {row.get('train/tokens')!r:.40}, as train/tokens of step "
            f"{step}, found {manifest.run.tokens_seen}"
        )
    check.looked_at += "; tokens as in the row"
    digest = row.get("train/parameters_sha256")
    if digest is not None and not check.problems:
        found = _parameters_sha256(path, manifest, run.config)
        if found != digest:
            check.fail(
                f"parameters: expected SHA-256 {digest!r:.40}, as train/parameters_sha256 of step {step}, "
                f"found {found}"
            )
        check.looked_at += "; parameters as in the row"


def _parameters_sha256(path: Path, manifest: Manifest, config: Config) -> str:
    """`train/parameters_sha256` of the checkpoint's parameters."""
    digest = hashlib.sha256()
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config.model).named_parameters()]
    with CheckpointTensors(path, manifest) as tensors:
        for name in names:
            digest.update(tensors.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_DTYPES = {"bfloat16": ("bf16", torch.bfloat16), "float16": ("fp16", torch.float16)}
_BEST = "best"


def check_weights(checks: Checks, run: RunFiles) -> None:
    """Check that all exported weights are the checkpoints' tensors in half precision, bit for bit.

    Memory holds one tensor of a checkpoint, and its exports, at a time.
    """
    folder = run.folder / "weights"
    paths = [*committed_folders(folder).values()]
    if (folder / _BEST).is_dir():
        paths.append(folder / _BEST)
    if not paths:
        with checks.check("weights") as check:
            if run.sound:
                check.fail(f"{folder}: expected the weights of step {max(run.sound)}, found none")
            else:
                check.skip("none have been written yet")
    for path in paths:
        checks.run(f"weights {path.name}", _check_weights, run, path)


def _check_weights(check: Check, run: RunFiles, path: Path) -> None:
    check.folder = path
    step = _check_best(check, run, path) if path.name == _BEST else int(path.name.removeprefix("step-"))
    _check_tensors(check, run, path, step)
    if run.fingerprints is not None:
        expected = run.fingerprints["tokenizer"]
        found = Tokenizer(path).hash
        if found != expected:
            check.fail(
                f"tokenizer.json: expected the stores' tokenizer ({expected[:12]}), found {found[:12]}"
            )
        check.looked_at += "; tokenizer"


def _check_best(check: Check, run: RunFiles, path: Path) -> int:
    """Compare best.json with the evaluation of its step; returns the step."""
    file = path / "best.json"
    content = read_object(file)
    step, metric = content.get("step"), next((name for name in content if name != "step"), "eval/loss")
    loss = content.get(metric)
    if not is_integer(step):
        raise CheckpointError(f"{file}: expected a whole number of steps, found {step!r:.40}")
    if run.attempts:  # a running run may have evaluated since the rows were read
        rows = read_rows(run.folder / "metrics.jsonl")
        losses = [row[metric] for row in rows if row["step"] == step and metric in row]
        if loss not in losses:
            expected = losses[-1] if losses else "in a row"
            check.fail(f"best.json: expected {metric} {expected} of step {step}, found {loss!r:.40}")
    return step


def _check_tensors(check: Check, run: RunFiles, path: Path, step: int) -> None:
    """Compare exported weights with the checkpoint of their step; if none is left, with the configuration."""
    config, checkpoint = run.config, run.folder / "checkpoints" / folder_name(step)
    content = read_config(path)
    found = content.get("dtype", content.get("torch_dtype"))
    if not isinstance(found, str) or found not in _DTYPES:
        raise CheckpointError(f"config.json: expected a dtype of {', '.join(_DTYPES)}, found {found!r:.40}")
    short, dtype = _DTYPES[found]
    _check_config(check, run, content, short)
    check.looked_at = "config.json"
    state = model_tensors(config)
    with TensorFiles(path) as files:
        if step not in run.sound:
            check.reason = "comparing values: no sound checkpoint of this step is left"

            def zeros(name: str) -> Tensor:
                return torch.zeros_like(state[name], device="cpu")

            count = _compare(check, files, state, zeros, config, dtype, values=False)
            check.looked_at += f"; {count} tensors by name, shape and type, finite"
            return
        try:
            manifest = read_manifest(checkpoint)  # it may be newer than `run.manifests`
            with CheckpointTensors(checkpoint, manifest) as tensors:
                saved_as = saved_names(manifest, average=True)

                def read(name: str) -> Tensor:
                    return tensors.read(saved_as[name])

                names = [name for name in state if name in manifest.tensors]
                count = _compare(check, files, names, read, config, dtype, values=True)
        except (PretrainError, OSError):
            if checkpoint.exists():
                raise
            check.reason = "comparing values: the run has deleted the checkpoint meanwhile"
            return
    averaged = any(average_name(name) in manifest.tensors for name in names)
    whose = "checkpoint's average" if averaged else "checkpoint's"
    check.looked_at += f"; {count} tensors, each the {whose} in {found}, bit for bit, and finite"


def _check_config(check: Check, run: RunFiles, content: dict[str, Any], dtype: str) -> None:
    """Compare config.json with the settings of the run, or of the earlier attempt that exported it."""
    configs = [run.config, *(each.config for each in reversed(run.attempts) if each.config is not None)]
    differences: list[list[str]] = []
    for each in configs:
        token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        arguments: dict[str, Any] = {"dtype": dtype, **{name: content.get(name) for name in token_ids}}
        try:
            expected = huggingface_config(each.model, **arguments)
        except ConfigError:
            expected = native_config(each.model, **arguments)
        expected = json.loads(json.dumps(expected))
        differences.append(
            [
                f"config.json: expected {name} {expected.get(name)!r:.60}, found {content.get(name)!r:.60}"
                for name in sorted(expected.keys() | content.keys())
                if expected.get(name) != content.get(name)
            ]
        )
    for line in min(differences, key=len):
        check.fail(line)
    if dtype not in {each.checkpoint.weights_dtype for each in configs}:
        check.fail(f"config.json: expected weights in {run.config.checkpoint.weights_dtype}, found {dtype}")


def _compare(
    check: Check,
    files: TensorFiles,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    config: Config,
    dtype: torch.dtype,
    *,
    values: bool,
) -> int:
    """Compare exported tensors with the exports of `read(name)` for all `names`; returns how many are due."""
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
            kinds = [str(each.dtype).removeprefix("torch.") for each in (expected, found)]
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                check.fail(
                    f"{disk_name}: expected {kinds[0]} {list(expected.shape)}, "
                    f"found {kinds[1]} {list(found.shape)}"
                )
            elif bad := int((~found.isfinite()).sum()):
                check.fail(f"{disk_name}: expected finite values, found {bad} that are not")
            elif values and (others := tensor_difference(expected, found)):
                wanted = f"the checkpoint's values in {kinds[0]}"
                check.fail(f"{disk_name}: expected {wanted}, found others: {others}")
    for name in sorted(left):
        check.fail(f"{name}: expected no such tensor, found one")
    return count
