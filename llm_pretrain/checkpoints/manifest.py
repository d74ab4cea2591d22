"""Reads, writes and validates `manifest.json`, and compares a checkpoint with the run that resumes from it.

The manifest describes a checkpoint's tensors and files, and holds its scalars. It is written last. A
checkpoint is sound if and only if its manifest is valid and its files match the manifest.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch.optim import Optimizer

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.config.model_config import ModelConfig, neutral_values
from llm_pretrain.config.schema import Count, NonNegativeInt, PositiveInt, read
from llm_pretrain.errors import CheckpointError, MismatchError
from llm_pretrain.files import open_plain, read_json, write_text

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
OPTIMIZER_STATE = "optimizer.state."
"""Prefix of the names of an optimizer's tensors and scalars."""


class UnsoundError(CheckpointError):
    """The checkpoint is damaged or incomplete; an older one may be sound."""


@dataclass(frozen=True)
class RunFacts:
    """Progress and settings of a run when it saved.

    Args:
        step: Optimizer steps of the schedule so far, skipped steps included.
        tokens_seen: Loss tokens trained on so far.
        global_batch_size: Sequences per optimizer step; together with `step`, the position in the data.
        wandb_id: Id of the W&B run to continue.
        fingerprints: Settings that a resuming run must have too, as text: `{"model.hidden_size": "512", …}`.
        extra: Further state of the training loop, as JSON.
        run_id: Id of the run's folder; None for a run without a folder.
    """

    step: NonNegativeInt
    tokens_seen: Count
    launcher: Literal["torchrun", "accelerate"]
    strategy: str
    world_size: PositiveInt
    global_batch_size: PositiveInt
    seed: int
    wandb_id: str | None
    fingerprints: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None


class TensorEntry(TypedDict):
    """Type and shape of a tensor in the files: torch's name, such as `float32`, and the global shape."""

    dtype: str
    shape: list[int]


class ScalarEntry(TypedDict):
    """A 0-dimensional tensor, or a plain number with the type `int`, `float` or `bool`."""

    dtype: str
    value: int | float | bool


class FileEntry(TypedDict):
    """Size and digest of a file beside the manifest."""

    bytes: int
    sha256: str


OptimizerEntry = TypedDict(
    "OptimizerEntry", {"class": str, "groups": list[dict[str, Any]], "without_state": list[str]}
)
"""An optimizer's class, its groups (with parameter names in `params`), and its parameters without state."""


class ScalerEntry(TypedDict):
    """The state of a gradient scaler."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`.

    Args:
        environment: Versions, hardware, git revision and variables; see the function `environment`.
        tensors: Every tensor in the files, by name.
        tied: Second name → first name of tied parameters, which are one tensor and saved once.
        scalars: Every 0-dimensional tensor and plain number, by name.
        scaler: State of the gradient scaler; None if no scaler is enabled.
        files: Every file beside the manifest, by name.
    """

    run: RunFacts
    environment: dict[str, str | None]
    tensors: dict[str, TensorEntry]
    tied: dict[str, str]
    scalars: dict[str, ScalarEntry]
    optimizer: OptimizerEntry
    scaler: ScalerEntry | None
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class StartPoint:
    """Absolute path of another run's checkpoint that a run started from, and SHA-256 of its manifest.json."""

    path: str
    sha256: str

    @classmethod
    def of(cls, folder: Path) -> StartPoint:
        """The checkpoint in a folder."""
        return cls(str(folder.resolve()), file_digest(folder / MANIFEST_NAME)["sha256"])

    def difference(self, folder: Path) -> str | None:
        """A line if the checkpoint in `folder` is another one; None if it is this one."""
        found, text = StartPoint.of(folder).sha256, "the manifest that the run started from"
        if found != self.sha256:
            return f"{folder}: expected {text}, SHA-256 {self.sha256:.16}, found {found:.16}"


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint that matches the run.

    Args:
        warnings: Newer checkpoints that are damaged; after loading, also what changed since the save.
        start: The checkpoint as another run's, from which this run starts at step 0; None on a resume.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    warnings: list[str] = field(default_factory=list)
    start: StartPoint | None = None

    @property
    def run(self) -> RunFacts:
        """Progress and settings of the run when it saved."""
        return self.manifest.run

    @property
    def step(self) -> int:
        """Optimizer steps that this run has taken; the next step is `step + 1`."""
        return 0 if self.start else self.run.step


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync `manifest.json`, with a digest of its own content."""
    # The conversion to JSON and back makes the digest cover what a reader gets (text keys, no tuples).
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["sha256"] = _digest(content)
    # No final line break: a reader would not notice if only that were cut off.
    write_text(folder / MANIFEST_NAME, json.dumps(content, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        UnsoundError: the manifest is missing, truncated or altered.
        CheckpointError: this program does not read its format version, or this user may not read the file.
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
        advice = "; it was not written by this package"  # the digest detects only changes
        return read(Manifest, content, MANIFEST_NAME, UnsoundError, advice=advice)
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

    The id is empty if the run has no folder. It is None if there is no such checkpoint.

    Raises:
        OSError: `parent` cannot be listed.
        CheckpointError: see `read_manifest`.
    """
    for path in reversed(committed_folders(parent).values()):
        with suppress(UnsoundError):
            return read_manifest(path).run.run_id or ""
    return None


def file_digest(file: Path) -> FileEntry:
    """Size and SHA-256 of one file, as the manifest lists them."""
    with open_plain(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def find_damage(folder: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """One line per damaged or missing file. Each rank verifies every `world_size`-th file from `rank` on.

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
    """The error for a file that this user may not read. An UnsoundError would select an older checkpoint."""
    return CheckpointError(f"{file}: expected a file that this user may read, found: {error.strerror}")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_ABSENT = "absent"
_NOT_IN_FINGERPRINT = {"max_position_embeddings", "init_from", "zero_init_residual"}
"""Model fields that may change on resuming: they affect neither shapes nor arithmetic."""


def model_fingerprint(model: ModelConfig) -> dict[str, str]:
    """The fields of the model that decide shapes and arithmetic, by their full names."""
    fields = {f"model.{n}": str(value) for n, value in asdict(model).items() if n not in _NOT_IN_FINGERPRINT}
    if model.rope_type == "yarn":  # its default follows from max_position_embeddings, which may change
        fields["model.original_max_position_embeddings"] = str(model.rope_original_context)
    return fields


def fingerprint_differences(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """One line per key whose text differs.

    If one side lacks a field of the model, it counts as the neutral value. Any other missing key differs.
    """
    neutral = {f"model.{name}": str(value) for name, value in neutral_values().items()}
    known = {key: neutral[key] for key in {*saved, *expected} & neutral.keys()}
    return _compare(known | saved, known | expected)


def optimizer_differences(content: Manifest, optimizer: Optimizer) -> list[str]:
    """One line if the optimizer has another class."""
    return _compare({"optimizer": content.optimizer["class"]}, {"optimizer": type(optimizer).__name__})


def mismatch(path: Path, differences: list[str]) -> MismatchError:
    """The error for these differences, which must be equal on every rank."""
    return MismatchError(
        f"checkpoint {path} does not match: {'; '.join(differences)}; "
        "continue with the configuration it was made with, or start another run (run.name)"
    ).of_all_ranks()


def state_differences(content: Manifest, current: dict[str, str], *, model_only: bool = False) -> list[str]:
    """One line per tensor or scalar whose name, shape or dtype differs from `current` (from `describe`).

    Optimizer state is compared only if the model's state agrees, because it follows from the model's.
    """
    both = describe(content.tensors, content.scalars, content.tied), current
    of_model = [{k: v for k, v in side.items() if not k.startswith(OPTIMIZER_STATE)} for side in both]
    return _compare(*of_model) or ([] if model_only else _compare(*both))


def describe(
    tensors: dict[str, TensorEntry], scalars: dict[str, ScalarEntry], tied: dict[str, str]
) -> dict[str, str]:
    """Name → the type and shape to compare, of tensors and scalars; for a tied name, the first name."""
    shapes = {name: f"{tensor['dtype']}{tensor['shape']}" for name, tensor in tensors.items()}
    numbers = {name: scalar["dtype"] for name, scalar in scalars.items()}
    return {**shapes, **numbers, **{name: f"tied to {first}" for name, first in tied.items()}}


def _compare(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    return [
        f"{key} is {saved.get(key, _ABSENT)} in the checkpoint, {current.get(key, _ABSENT)} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
