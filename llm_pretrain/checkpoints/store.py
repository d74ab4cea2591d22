"""Commits, verifies, restores and prunes the checkpoints of one run.

A checkpoint appears completely or not at all, and an old checkpoint is deleted only after a new one is
committed. A restore gives the saved values bit for bit, or an error. All methods except `committed` are
collective.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from llm_pretrain.checkpoints import folders, state
from llm_pretrain.checkpoints.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ResumePoint,
    RunFacts,
    UnsoundError,
    describe,
    find_damage,
    fingerprint_differences,
    mismatch,
    optimizer_differences,
    read_manifest,
    state_differences,
    write_manifest,
)
from llm_pretrain.checkpoints.state import HostBuffers, Piece, held_pieces, meta_tensors
from llm_pretrain.checkpoints.tensor_files import check_finite, read_tensors, write_pieces
from llm_pretrain.distributed.collectives import Ranks, gather_results, run_on_all_ranks, run_on_rank0
from llm_pretrain.errors import CheckpointError
from llm_pretrain.files import make_folder
from llm_pretrain.hardware import arithmetic_changes, environment

if TYPE_CHECKING:
    from llm_pretrain.distributed.pipeline import Pipeline


class CheckpointStore:
    """The checkpoints in one folder.

    Args:
        folder: The parent of `step-00000100/`, shared by all ranks; the first save creates it.
        ranks: The ranks that save and restore together.
        keep_last: Number of newest checkpoints to keep; at least 2 are kept.
        period: The newest checkpoint whose step is a multiple of this is kept, too; 0 disables this.
        check: Called on rank 0 before a save and before its commit; raises if the run lost the folder.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        keep_last: int,
        period: int = 0,
        check: Callable[[], None] = lambda: None,
    ):
        self.folder, self._check = Path(folder), check
        self._ranks = ranks
        self._keep_last, self._period = keep_last, period
        self._unsound: set[int] = set()

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, ascending; they are not verified."""
        folders.check_parent(self.folder)
        return list(folders.committed_folders(self.folder))

    def newest_periodic(self, step: int) -> Path | None:
        """The newest checkpoint up to `step` whose step is a multiple of `period`; None if there is none."""
        doing = f"{self.folder}: looking for a periodic checkpoint"
        committed = run_on_rank0(self._ranks, lambda: folders.committed_folders(self.folder), doing)
        return committed.get(max(folders.multiples(committed, self._period, step), default=-1))

    def stage(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        facts: RunFacts,
        *,
        buffers: HostBuffers | None = None,
        pipeline: Pipeline | None = None,
    ) -> Staged:
        """Collect the state after step `facts.step`, for `write`.

        Args:
            buffers: Receives copies of the tensors that this rank writes. If it is None, nothing is copied,
                and training must wait until the tensors are written.
            pipeline: The pipeline that the model is a stage of, if any.
        """
        model, ranks = state.raw_module(model), self._ranks

        def collect() -> Staged:
            current = state.collect_state(model, optimizer)
            share = {"rank": ranks.rank, "world_size": ranks.world_size}
            pieces = held_pieces(current.tensors, **share, pipeline=pipeline)
            content = Manifest(
                run=copy.deepcopy(facts),
                environment=environment(_device(model)),
                tensors=state.describe_tensors(current.tensors),
                tied=current.tied,
                scalars=current.scalars,
                optimizer=state.describe_optimizer(model, optimizer),
                scaler=state.scaler_state(scaler),
                files={},
            )
            return Staged(content, buffers.pieces(pieces) if buffers else pieces)

        doing = f"{self.folder}: collecting the state of step {facts.step}"
        staged = run_on_all_ranks(ranks, collect, doing)
        return replace(staged, content=_whole(staged.content, pipeline))

    def write(self, staged: Staged, ranks: Ranks | None = None) -> Path:
        """Commit a staged checkpoint; returns its folder.

        Args:
            staged: From `stage`.
            ranks: The group of ranks, for a write in a background thread; by default the store's.

        Raises:
            CheckpointError: a rank fails; raised on every rank. Nothing was committed or deleted.
            DivergedError: a value is not finite; raised on every rank. Nothing was committed or deleted.
        """
        ranks, step = ranks or self._ranks, staged.content.run.step
        path = write_staged(staged, self.folder, ranks, self._check)
        self._unsound.discard(step)
        if ranks.rank == 0:
            folders.prune(
                self.folder,
                newest=step,
                keep_last=self._keep_last,
                unsound=self._unsound,
                period=self._period,
            )
        return path

    def find(
        self, *, expected: Callable[[RunFacts], dict[str, str]], source: Path | None = None
    ) -> ResumePoint | None:
        """The newest sound checkpoint, or the one in `source`, after verifying all its files.

        Args:
            expected: Returns the fingerprints that a checkpoint with these facts must have.
            source: A checkpoint's folder, to use instead of this store's checkpoints.

        Returns:
            None if this store has no committed checkpoint.

        Raises:
            MismatchError: the checkpoint has another model, data or batch size; names the keys and values.
            CheckpointError: there are checkpoints and none is sound, or `source` is not a checkpoint.
        """
        damaged: list[str] = []
        for path, step in self._candidates(source):
            content, problems = self._verify(path, step)
            if content is not None and not problems:
                wanted = expected(content.run)
                if differences := fingerprint_differences(content.run.fingerprints, wanted):
                    raise mismatch(path, differences)
                warnings = [f"checkpoint {text}; passed over for an older one" for text in damaged]
                return ResumePoint(path, content, warnings)
            damaged.append(f"{path} is damaged: {'; '.join(problems)}")
            self._unsound.update([] if step is None else [step])
        if damaged:
            raise CheckpointError(
                f"{'; '.join(damaged)}; no sound checkpoint is left to continue from: bring one back, or "
                "start in another folder"
            ).of_all_ranks()
        return None

    def load(
        self,
        found: ResumePoint,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Load the checkpoint that `find` returned, in place; adds warnings to `found`.

        Raises:
            MismatchError: tensors differ in name, shape or dtype, or the optimizer has another class.
            CheckpointError: a file cannot be read.
        """
        model, content, ranks = state.raw_module(model), found.manifest, self._ranks
        doing = f"{found.path}: loading a checkpoint"
        without_state = content.optimizer["without_state"]

        def collect() -> state.TrainingState:
            if differences := optimizer_differences(content, optimizer):
                raise mismatch(found.path, differences)
            return state.collect_targets(model, optimizer, without_state)

        target = run_on_all_ranks(ranks, collect, doing)
        state.match_average(content, target, optimizer)
        described = _described(target, pipeline)

        def compare() -> None:
            if differences := state_differences(content, described):
                raise mismatch(found.path, differences)

        run_on_all_ranks(ranks, compare, doing)
        own = f"shard-{ranks.rank + 1:05d}-"  # if the mesh is the same, a rank wrote its own values
        files = sorted(content.files, key=lambda name: (not name.startswith(own), name))
        run_on_all_ranks(ranks, lambda: read_tensors(target.tensors, found.path, files))

        def apply() -> list[str]:
            for name in target.places:
                state.assign(*target.places[name], content.scalars[name]["value"])
            state.apply_state(model, optimizer, target)
            then, now = "when the checkpoint was saved", environment(_device(model))
            changes = arithmetic_changes(content.environment, now, then)
            return [
                *(f"{change}: training continues, but not bit for bit" for change in changes),
                *state.restore_groups(model, optimizer, content.optimizer),
                *state.restore_scaler(scaler, content.scaler),
            ]

        found.warnings.extend(run_on_all_ranks(ranks, apply, doing))

    def _candidates(self, source: Path | None) -> list[tuple[Path, int | None]]:
        """(folder, step in its name) of each checkpoint to try, in order."""
        doing = f"{source or self.folder}: looking for a checkpoint"
        if source is not None:
            run_on_rank0(self._ranks, lambda: _check_source(Path(source)), doing)
            return [(Path(source), None)]
        committed = run_on_rank0(self._ranks, lambda: folders.committed_folders(self.folder), doing)
        return [(path, step) for step, path in reversed(committed.items())]

    def _verify(self, path: Path, step: int | None) -> tuple[Manifest | None, list[str]]:
        """A checkpoint's manifest and its problems. Each rank verifies a part of the files."""

        def read() -> tuple[Manifest | None, list[str]]:
            try:
                content = read_manifest(path)
            except UnsoundError as error:
                return None, [str(error)]
            if step not in (None, content.run.step):
                return None, [f"{MANIFEST_NAME}: expected step {step}, found {content.run.step}"]
            return content, []

        ranks, doing = self._ranks, f"{path}: verifying a checkpoint"
        content, problems = run_on_rank0(ranks, read, doing)
        if content is None:
            return None, problems
        shares = gather_results(
            ranks, lambda: find_damage(path, content, rank=ranks.rank, world_size=ranks.world_size), doing
        )
        return content, [problem for share in shares for problem in share]


def _whole(content: Manifest, pipeline: Pipeline | None) -> Manifest:
    """The manifest of the whole model, from the manifests of all pipeline stages (collective)."""
    if pipeline is None:
        return content
    described = {name: pipeline.merged(getattr(content, name)) for name in ("tensors", "tied", "scalars")}
    optimizers = pipeline.gather(content.optimizer)
    groups = [
        same[0] | {"params": pipeline.ordered(name for each in same for name in each["params"])}
        for same in zip(*(each["groups"] for each in optimizers), strict=True)
    ]
    without_state = pipeline.ordered(name for each in optimizers for name in each["without_state"])
    optimizer = content.optimizer | {"groups": groups, "without_state": without_state}
    return replace(content, optimizer=optimizer, **described)


def _described(target: state.TrainingState, pipeline: Pipeline | None) -> dict[str, str]:
    """Name → type and shape of everything to load, over all pipeline stages (collective)."""
    described = describe(state.describe_tensors(target.tensors), target.scalars, target.tied)
    return described if pipeline is None else pipeline.merged(described)


def _check_source(source: Path) -> None:
    if (source / MANIFEST_NAME).is_file():
        return
    inside = folders.committed_folders(source) or folders.committed_folders(source / "checkpoints")
    hint = f"; did you mean {inside[max(inside)]}?" if inside else ""
    raise CheckpointError(f"{source}: expected a checkpoint with a {MANIFEST_NAME}, found none{hint}")


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


Share = tuple[dict[str, FileEntry], int]
"""The files that a rank wrote, with sizes and digests, and the sum of the pieces' `corners`."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint that is collected but not written.

    Args:
        content: The checkpoint's manifest, without files.
        pieces: The tensors or parts of tensors that this rank writes.
    """

    content: Manifest
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        """Size of all tensors, over all ranks."""
        return sum(tensor.nbytes for tensor in meta_tensors(self.content.tensors).values())

    def corners(self) -> int:
        """The sum that the `corners` of all ranks' pieces must have."""
        tensors = meta_tensors(self.content.tensors)
        return sum(Piece(name, whole, (0,) * whole.dim()).corners() for name, whole in tensors.items())


def write_staged(staged: Staged, parent: Path, ranks: Ranks, check: Callable[[], None]) -> Path:
    """Commit `staged` as a folder in `parent`, and return the folder; collective.

    Every rank writes its files into a temporary folder and hashes them. Rank 0 gathers the hashes, writes the
    manifest last, and commits by one rename. It calls `check` before the first file and before the commit.

    Raises:
        CheckpointError: a rank fails; raised on every rank. Nothing was committed.
        DivergedError: a value is not finite; raised on every rank. Nothing was committed.
    """
    token = run_on_rank0(ranks, lambda: uuid.uuid4().hex)
    temporary = folders.temporary_folder(parent, staged.content.run.step, token)
    doing = f"{temporary}: writing a checkpoint of {staged.bytes} bytes"
    try:
        run_on_rank0(ranks, lambda: _make_room(parent, check), doing)
        shares = gather_results(ranks, lambda: _write_share(staged, temporary, ranks.rank), doing)
        return run_on_rank0(ranks, lambda: _commit(temporary, staged, shares, check), doing)
    except Exception:
        if ranks.rank == 0:
            folders.discard(temporary)
        raise


def _make_room(parent: Path, check: Callable[[], None]) -> None:
    check()
    make_folder(parent)
    folders.clean(parent)


def _write_share(staged: Staged, folder: Path, rank: int) -> Share:
    folder.mkdir(parents=True, exist_ok=True)
    for name, scalar in staged.content.scalars.items():
        check_finite(name, torch.tensor([scalar["value"]], dtype=torch.float64))
    files = write_pieces(staged.pieces, folder, rank=rank)
    return files, sum(piece.corners() for piece in staged.pieces)


def _commit(temporary: Path, staged: Staged, shares: list[Share], check: Callable[[], None]) -> Path:
    if (sum(corners for _, corners in shares) - staged.corners()) % (1 << 64):
        raise CheckpointError(
            f"{temporary}: expected each part of the tensors from one rank, in the type of the whole, found "
            "parts from none or from several, or of another type"
        )
    content = replace(
        staged.content, files={name: each for files, _ in shares for name, each in files.items()}
    )
    for name, expected in content.files.items():
        file = temporary / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{file}: expected {expected['bytes']} bytes written by some rank, rank 0 does not see them; "
                "checkpoints need a folder that all machines share"
            )
    write_manifest(temporary, content)
    check()
    return folders.commit_folder(temporary, folders.folder_name(content.run.step))
