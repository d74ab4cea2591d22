"""Reads, writes and validates `manifest.json`, and compares a checkpoint with the run that resumes from it.

The manifest describes a checkpoint's tensors and files and holds its scalars. It is written last: a
checkpoint is sound if and only if its manifest is valid and its files match it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch.optim import Optimizer

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.config.model_config import ModelConfig, neutral_values
from llm_pretrain.config.schema import matches_type
from llm_pretrain.errors import CheckpointError, MismatchError
from llm_pretrain.files import open_plain, read_json, write_text

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class UnsoundError(CheckpointError):
    """The checkpoint is damaged or incomplete; an older one may be sound."""


@dataclass(frozen=True)
class RunFacts:
    """Progress and settings of a run when it saved.

    Args:
        step: Optimizer steps taken from the schedule, skipped ones included.
        tokens_seen: Loss tokens trained on so far.
        global_batch_size: Sequences per optimizer step; with `step`, the position in the data.
        wandb_id: Id of the W&B run to continue.
        fingerprints: Settings that must be equal to resume, as text: `{"model.hidden_size": "512", …}`.
        extra: Further state of the training loop, as JSON.
        run_id: Id of the run's folder; None outside of one.
    """

    step: int
    tokens_seen: int
    launcher: Literal["torchrun", "accelerate"]
    strategy: str
    world_size: int
    global_batch_size: int
    seed: int
    wandb_id: str | None
    fingerprints: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`.

    Args:
        environment: Versions, hardware, git revision and variables; see the function `environment`.
        tensors: Name → `{"dtype": "float32", "shape": [64, 32]}` of every tensor in the files.
        tied: Second name → first name of parameters that are one tensor, saved once.
        scalars: Name → `{"dtype", "value"}` of every 0-dimensional tensor and plain number.
        optimizer: Its class, groups, and the parameters without state.
        scaler: The gradient scaler's state; None without an enabled one.
        files: Name → `{"bytes", "sha256"}` of every file beside the manifest.
    """

    run: RunFacts
    environment: dict[str, str | None]
    tensors: dict[str, dict[str, Any]]
    tied: dict[str, str]
    scalars: dict[str, dict[str, Any]]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint that matches the run.

    Args:
        warnings: Newer checkpoints that are damaged and, after loading, what changed since it was saved.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    warnings: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunFacts:
        """Progress and settings of the run when it saved."""
        return self.manifest.run

    @property
    def step(self) -> int:
        """Optimizer steps taken; the next one is `step + 1`."""
        return self.run.step


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync `manifest.json`, with a digest of its own content."""
    # Converted to JSON and back, so that the digest covers what a reader gets (text keys, no tuples).
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["sha256"] = _digest(content)
    # Without a final line break, so that any cut is detected.
    write_text(folder / MANIFEST_NAME, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        UnsoundError: it is missing, truncated or altered.
        CheckpointError: this version does not read its format version, or this user may not read it.
    """
    file = folder / MANIFEST_NAME
    try:
        content = read_json(file)
        stored = content.pop("sha256")
        if (found := _digest(content)) != stored:
            raise UnsoundError(f"{MANIFEST_NAME}: expected SHA-256 {stored} of its content, found {found}")
        if (version := content.pop("format_version")) != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version is {version}, this version of llm_pretrain reads {FORMAT_VERSION}; "
                "continue with the version that wrote it"
            )
        manifest = Manifest(run=RunFacts(**content.pop("run")), **content)
        if wrong := wrong_part(manifest):
            raise UnsoundError(f"{MANIFEST_NAME}: expected {wrong}; it was not written by this package")
        return manifest
    except FileNotFoundError:
        raise UnsoundError(f"{MANIFEST_NAME}: expected a file, found none") from None
    except PermissionError as error:
        raise _no_permission(folder / MANIFEST_NAME, error) from None
    except OSError as error:
        raise UnsoundError(f"{MANIFEST_NAME}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsoundError(f"{MANIFEST_NAME}: expected a complete manifest, found damaged content") from None


def newest_run_id(parent: Path) -> str | None:
    """The id of the run that wrote the newest checkpoint in `parent` with a readable manifest.

    It is empty for a run outside of a folder of its own, None without such a checkpoint.

    Raises:
        OSError: the folder cannot be listed.
        CheckpointError: as `read_manifest`.
    """
    for path in reversed(committed_folders(parent).values()):
        with suppress(UnsoundError):
            return read_manifest(path).run.run_id or ""
    return None


def file_digest(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of one file, as the manifest lists them."""
    with open_plain(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def find_damage(folder: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """One line per damaged or missing file, of every `world_size`-th file from `rank` on.

    Raises:
        CheckpointError: a file may not be read.
    """
    problems = []
    for name, expected in sorted(manifest.files.items())[rank::world_size]:
        if Path(name).name != name:  # never read outside of the folder
            problems.append(f"{MANIFEST_NAME}: expected plain file names, found {name!r}")
            continue
        try:
            if not (folder / name).is_file():  # reading a pipe would block
                raise FileNotFoundError
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                problems.append(f"{name}: expected {expected['bytes']} bytes, found {size}")
            elif (found := file_digest(folder / name)["sha256"]) != expected["sha256"]:
                problems.append(f"{name}: expected SHA-256 {expected['sha256']}, found {found}")
        except FileNotFoundError:
            problems.append(f"{name}: expected a file, found none")
        except PermissionError as error:
            raise _no_permission(folder / name, error) from None
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error}")
    return problems


def _no_permission(file: Path, error: OSError) -> CheckpointError:
    """The error for a file that this user may not read; no UnsoundError, for which an older one is used."""
    return CheckpointError(f"{file}: expected a file that this user may read, found: {error.strerror}")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
_LONGEST = 1 << 62


def wrong_part(manifest: Any) -> str | None:
    """The first invalid part, in words: what was expected and found; None if the manifest is valid.

    The digest detects changes, but not a manifest that was written by hand or by another program. Such a file
    must not lead to a traceback, to reading a file elsewhere or to an enormous allocation.
    """
    for owner in (manifest.run, manifest):
        hints = get_type_hints(type(owner))
        for name, value in vars(owner).items():
            if not is_dataclass(value) and not matches_type(hints[name], value):
                return f"{name} as {hints[name]}, found {value!r:.60}"
    run = manifest.run
    least = {"step": 0, "tokens_seen": 0, "world_size": 1, "global_batch_size": 1}
    for name, bound in least.items():
        if not bound <= getattr(run, name) < _LONGEST:
            return f"{name} from {bound} on, found {getattr(run, name)!r:.60}"
    for name, check in {"tensors": _tensor, "scalars": _scalar, "files": _file}.items():
        for key, entry in getattr(manifest, name).items():
            if wrong := check(entry):
                return f"{name} {key!r:.80} with {wrong}, found {entry!r:.80}"
    return _optimizer(manifest.optimizer) or _scaler(manifest.scaler)


def _tensor(entry: Mapping[str, Any]) -> str | None:
    shape = entry.get("shape", ())
    if entry.get("dtype") not in _DTYPES:
        return "a dtype of torch"
    if not matches_type(list[int], shape) or not all(0 <= size < _LONGEST for size in shape):
        return "a shape of whole numbers"
    return None if math.prod(shape) < _LONGEST else "a shape that some memory could hold"


def _scalar(entry: Mapping[str, Any]) -> str | None:
    dtype, value = entry.get("dtype"), entry.get("value")
    if dtype not in _DTYPES | {"int", "float", "bool"}:
        return "a dtype"
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _LONGEST):
        return "a number"
    if "int" in str(dtype) and not matches_type(int, value):
        return "a whole number"
    if dtype in _DTYPES - {"bool"}:
        kind = getattr(torch, dtype)
        limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
        return None if limits.min <= value <= limits.max else f"a number within {dtype}"
    return None if math.isfinite(value) else "a finite number"


def _file(entry: Mapping[str, Any]) -> str | None:
    digest = entry.get("sha256")
    if not matches_type(int, entry.get("bytes")) or entry["bytes"] < 0:
        return "a number of bytes"
    is_digest = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return None if is_digest else "a SHA-256"


def _optimizer(entry: Mapping[str, Any]) -> str | None:
    groups = entry.get("groups")
    if not isinstance(entry.get("class"), str) or not isinstance(groups, list):
        return f"an optimizer with its class and groups, found {entry!r:.60}"
    for group in groups:
        if not isinstance(group, Mapping) or not matches_type(list[str], group.get("params")):
            return f"the names of parameters in each of the optimizer's groups, found {group!r:.60}"
        for key, value in group.items():
            if key == "lr" and not (matches_type(float, value) and math.isfinite(value)):
                return f"a finite number as the optimizer's 'lr', found {value!r:.60}"
            if key != "params" and not _setting(value):
                return f"a number or text as the optimizer's {key!r:.40}, found {value!r:.60}"
    if not matches_type(list[str], entry.get("without_state")):
        return f"the optimizer's parameters without state, found {entry.get('without_state')!r:.60}"
    return None


def _setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_setting, value))
    return value is None or isinstance(value, bool | int | float | str)


_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def _scaler(entry: Mapping[str, Any] | None) -> str | None:
    if entry is not None and not (
        entry.keys() >= _SCALER_KEYS
        and all(isinstance(value, int | float) for value in entry.values())
        and entry.get("scale", 0) > 0
        and matches_type(int, entry.get("growth_interval", 1))
    ):
        return f"a gradient scaler's numbers, found {entry!r:.60}"
    return None


_ABSENT = "absent"


_NOT_IN_FINGERPRINT = {"max_position_embeddings", "init_from", "zero_init_residual"}
"""Model fields that change neither shapes nor arithmetic of a resumed run."""


def model_fingerprint(model: ModelConfig) -> dict[str, str]:
    """The fields of the model that decide shapes and arithmetic, by their full names."""
    fields = {f"model.{n}": str(value) for n, value in asdict(model).items() if n not in _NOT_IN_FINGERPRINT}
    if model.rope_type == "yarn":  # unset, it follows from max_position_embeddings, which may change
        fields["model.original_max_position_embeddings"] = str(model.rope_original_context)
    return fields


def fingerprint_differences(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """One line per key whose text differs.

    A field of the model that one side does not know has its neutral value there; another key is missing.
    """
    neutral = {f"model.{name}": str(value) for name, value in neutral_values().items()}
    known = {key: neutral[key] for key in {*saved, *expected} & neutral.keys()}
    return _compare(known | saved, known | expected)


def optimizer_differences(content: Manifest, optimizer: Optimizer) -> list[str]:
    """One line if the optimizer has another class."""
    return _compare({"optimizer": content.optimizer["class"]}, {"optimizer": type(optimizer).__name__})


def mismatch(path: Path, differences: list[str]) -> MismatchError:
    """The error for differences, which are the same on every rank."""
    error = MismatchError(
        f"checkpoint {path} does not match: {'; '.join(differences)}; "
        "continue with the configuration it was made with, or start another run (run.name)"
    )
    error.shared = True
    return error


def state_differences(content: Manifest, current: dict[str, str]) -> list[str]:
    """One line per tensor or scalar whose name, shape or dtype differs from `current`, made by `describe`.

    Optimizer state is compared only if the model's state agrees, because it follows from that.
    """
    saved = describe(content.tensors, content.scalars, content.tied)
    differences = _compare(*(_select(side, optimizer=False) for side in (saved, current)))
    return differences or _compare(*(_select(side, optimizer=True) for side in (saved, current)))


def describe(
    tensors: dict[str, dict[str, Any]], scalars: dict[str, dict[str, Any]], tied: dict[str, str]
) -> dict[str, str]:
    """What is compared of tensors and scalars, by name."""
    shapes = {name: f"{tensor['dtype']}{tensor['shape']}" for name, tensor in tensors.items()}
    numbers = {name: scalar["dtype"] for name, scalar in scalars.items()}
    return {**shapes, **numbers, **{name: f"tied to {first}" for name, first in tied.items()}}


def _select(description: dict[str, str], *, optimizer: bool) -> dict[str, str]:
    return {key: text for key, text in description.items() if key.startswith("optimizer.state.") == optimizer}


def _compare(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    return [
        f"{key} is {saved.get(key, _ABSENT)} in the checkpoint, {current.get(key, _ABSENT)} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
