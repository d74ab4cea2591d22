"""`manifest.json`: everything a checkpoint knows about itself, written last.

A folder with a manifest that parses and whose files match it is a sound checkpoint; nothing else is.
Tensors are not here, only their names, dtypes and shapes; scalars are here, losslessly.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_pretrain.checkpoints.manifest_parts import wrong_part
from llm_pretrain.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class UnsoundError(CheckpointError):
    """This checkpoint is damaged or incomplete; an older one may be sound."""


@dataclass(frozen=True)
class RunFacts:
    """Where a run stands, beside its tensors.

    Args:
        step: Optimizer steps taken from the schedule.
        tokens_seen: Loss tokens trained on so far.
        launcher: Which entry script's path saved.
        strategy: `distributed.strategy`.
        world_size: Number of processes.
        global_batch_size: Sequences per optimizer step; with the step, the position in the data.
        seed: `run.seed`.
        wandb_id: Id to continue the tracker's run with.
        fingerprints: What must be the same to continue, as flat text: `{"model.hidden_size": "512", …}`.
        extra: Anything else the loop wants back, as JSON.
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


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`.

    Args:
        run: Where the run stood.
        environment: Versions, hardware and git revision that wrote it.
        tensors: Name → `{"dtype": "float32", "shape": [64, 32]}` of every tensor in the files.
        tied: Second name → first name of parameters that are one tensor, saved once.
        scalars: Name → `{"dtype", "value"}` of every 0-dimensional tensor and plain number.
        optimizer: Its class, groups, and the parameters that had no state yet.
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
    """A sound checkpoint that matches, and where its run stood.

    Args:
        path: The checkpoint's folder.
        manifest: What it says about itself.
        warnings: What the user should know: damaged checkpoints passed over and, once it is loaded,
            what changed since it was saved.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    warnings: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps taken; the next one is `step + 1`."""
        return self.manifest.run.step

    @property
    def tokens_seen(self) -> int:
        """Loss tokens trained on so far."""
        return self.manifest.run.tokens_seen

    @property
    def wandb_id(self) -> str | None:
        """Id to continue the tracker's run with."""
        return self.manifest.run.wandb_id

    @property
    def world_size(self) -> int:
        """Number of processes that saved it."""
        return self.manifest.run.world_size

    @property
    def launcher(self) -> str:
        """Entry script's path that saved it."""
        return self.manifest.run.launcher

    @property
    def extra(self) -> dict[str, Any]:
        """What the loop gave along."""
        return self.manifest.run.extra


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync `manifest.json`; it carries its own digest, so that it can vouch for itself too."""
    # Through JSON once, so that the digest is of what a reader will see (keys are text, tuples are lists).
    content = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}))
    content["sha256"] = _digest(content)
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)  # no line break after it: the last byte counts too
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        UnsoundError: it is missing, cut off, or its content is not what was written.
        CheckpointError: it is sound, but of a format that this version does not read.
    """
    file = folder / MANIFEST_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
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
    except OSError as error:
        raise UnsoundError(f"{MANIFEST_NAME}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsoundError(f"{MANIFEST_NAME}: expected a complete manifest, found damaged content") from None


def file_digest(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of one file, as the manifest lists them."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def find_damage(folder: Path, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """One line per file of this rank's share (every W-th) that is not what the manifest says."""
    problems = []
    for name, expected in sorted(manifest.files.items())[rank::world_size]:
        if Path(name).name != name:  # `..` and paths: nothing outside of the folder is read
            problems.append(f"{MANIFEST_NAME}: expected plain file names, found {name!r}")
            continue
        try:
            if not (folder / name).is_file():  # a pipe would be waited for
                raise FileNotFoundError
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                problems.append(f"{name}: expected {expected['bytes']} bytes, found {size}")
            elif (found := file_digest(folder / name)["sha256"]) != expected["sha256"]:
                problems.append(f"{name}: expected SHA-256 {expected['sha256']}, found {found}")
        except FileNotFoundError:
            problems.append(f"{name}: expected a file, found none")
        except OSError as error:
            problems.append(f"{name}: cannot be read: {error}")
    return problems


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
