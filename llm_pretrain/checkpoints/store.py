"""Checkpoints of one run: commit, restore and retention.

Promises: a checkpoint appears whole or not at all; an old one is deleted only after a new one is safe;
what is restored is what was saved, to the last bit, or an error. All ranks call all methods together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llm_pretrain.checkpoints import folders, state
from llm_pretrain.checkpoints.differences import (
    fingerprint_differences,
    mismatch,
    optimizer_differences,
    state_differences,
)
from llm_pretrain.checkpoints.environment import environment, environment_changes
from llm_pretrain.checkpoints.manifest import (
    MANIFEST_NAME,
    Manifest,
    ResumePoint,
    RunFacts,
    UnsoundError,
    find_damage,
    read_manifest,
)
from llm_pretrain.checkpoints.ranks import Ranks
from llm_pretrain.checkpoints.staging import HostBuffers, own_pieces
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.checkpoints.writing import Staged, write_staged
from llm_pretrain.errors import CheckpointError

Expected = dict[str, str] | Callable[[int], dict[str, str]]


class CheckpointStore:
    """The checkpoints in one folder.

    Args:
        folder: Where `step-00000100/` and the like stand; shared by all ranks, created at the first save.
        rank: This process's number.
        world_size: Number of processes.
        gather_objects: Gives every rank the list of all ranks' values; a barrier.
        keep_last: Checkpoints to keep; at least 2 are kept.
        period: Besides these, the newest of a multiple of this step is kept; 0 keeps none besides.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        gather_objects: Callable[[Any], list],
        keep_last: int,
        period: int = 0,
    ):
        self.folder = Path(folder)
        self._ranks = Ranks(rank, world_size, gather_objects)
        self._keep_last, self._period = keep_last, period
        self._unsound: set[int] = set()

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, ascending; whether they are sound is not looked at."""
        folders.check_parent(self.folder)
        return list(folders.committed_folders(self.folder))

    def latest_step(self) -> int | None:
        """Step of the newest committed checkpoint."""
        return max(self.committed(), default=None)

    def newest_periodic(self, step: int) -> Path | None:
        """The newest checkpoint of a multiple of `period` up to `step`, as rank 0 sees it; None without."""
        doing = f"{self.folder}: looking for a periodic checkpoint"
        committed = self._ranks.first(doing, lambda: folders.committed_folders(self.folder))
        return committed.get(max(folders.multiples(committed, self._period, step), default=-1))

    def save(self, model: nn.Module, optimizer: Optimizer, scaler: Any, facts: RunFacts) -> Path:
        """Commit the state after step `facts.step`; returns the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, when one of them fails; nothing was committed, and earlier
                checkpoints are as they were.
            DivergedError: likewise, when a value is not finite.
        """
        return self.write(self.stage(model, optimizer, scaler, facts))

    def stage(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        facts: RunFacts,
        *,
        buffers: HostBuffers | None = None,
    ) -> Staged:
        """Take down the state after step `facts.step`, for `write`.

        Args:
            model, optimizer, scaler: What trains.
            facts: Where the run stands.
            buffers: Where to copy this rank's share of the tensors to; without it they stay live, and
                training must not go on before they are written.
        """
        model, ranks = state.raw_module(model), self._ranks

        def collect() -> Staged:
            current = state.collect_state(model, optimizer)
            pieces = own_pieces(current.tensors, rank=ranks.rank, world_size=ranks.world_size)
            content = Manifest(
                run=copy.deepcopy(facts),
                environment=environment(_device(model)),
                tensors=current.describe_tensors(),
                tied=current.tied,
                scalars=current.scalars,
                optimizer=state.describe_optimizer(model, optimizer),
                scaler=state.scaler_state(scaler),
                files={},
            )
            size = sum(tensor.nbytes for tensor in current.tensors.values())
            return Staged(content, buffers.pieces(pieces) if buffers else pieces, size)

        return ranks.each(f"{self.folder}: collecting the state of step {facts.step}", collect)

    def write(self, staged: Staged, gather_objects: Callable[[Any], list] | None = None) -> Path:
        """Commit what was staged; returns the checkpoint's folder.

        Args:
            staged: From `stage`.
            gather_objects: Another channel between the ranks, for a thread beside the training.

        Raises:
            CheckpointError: on every rank, when one of them fails; nothing was committed, and earlier
                checkpoints are as they were.
            DivergedError: likewise, when a value is not finite.
        """
        ranks, step = self._ranks, staged.content.run.step
        if gather_objects is not None:
            ranks = Ranks(ranks.rank, ranks.world_size, gather_objects)
        path = write_staged(staged, self.folder, ranks)
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

    def find(self, *, expected: Expected, source: Path | None = None) -> ResumePoint | None:
        """The newest sound checkpoint, or the one in `source`, verified file by file; loads nothing.

        Args:
            expected: What must equal the checkpoint's fingerprints, key by key; where it depends on how far
                the checkpoint is, a function of its step.
            source: A checkpoint's own folder, instead of this store's.

        Returns:
            None when this store has no committed checkpoint.

        Raises:
            MismatchError: it belongs to another model, data or batch; names every key and both values.
            CheckpointError: there are checkpoints and none is sound, or `source` is none.
        """
        damaged: list[str] = []
        for path, step in self._candidates(source):
            content, problems = self._verify(path, step)
            if content is not None and not problems:
                wanted = expected(content.run.step) if callable(expected) else expected
                if differences := fingerprint_differences(content.run.fingerprints, wanted):
                    raise mismatch(path, differences)
                warnings = [f"checkpoint {text}; passed over for an older one" for text in damaged]
                return ResumePoint(path, content, warnings)
            damaged.append(f"{path} is damaged: {'; '.join(problems)}")
            self._unsound.update([] if step is None else [step])
        if damaged:
            raise _shared(
                f"{'; '.join(damaged)}; no sound checkpoint is left to continue from: bring one back, or "
                "start in another folder"
            )
        return None

    def load(self, found: ResumePoint, model: nn.Module, optimizer: Optimizer, scaler: Any) -> None:
        """Fill model, optimizer and scaler in place from what `find` returned; adds to its warnings.

        Raises:
            MismatchError: tensors differ in name, shape or dtype, or the optimizer is another one.
            CheckpointError: a file cannot be read.
        """
        model, content, ranks = state.raw_module(model), found.manifest, self._ranks
        doing = f"{found.path}: loading a checkpoint"
        target = ranks.each(doing, lambda: _targets(found.path, content, model, optimizer))
        read_tensors(target.tensors, found.path, sorted(content.files), world_size=ranks.world_size)

        def apply() -> list[str]:
            for name, scalar in content.scalars.items():
                target.set_scalar(name, scalar["value"])
            state.apply_state(model, optimizer, target)
            return [
                *environment_changes(content.environment, _device(model)),
                *state.restore_groups(model, optimizer, content.optimizer),
                *state.restore_scaler(scaler, content.scaler),
            ]

        found.warnings.extend(ranks.each(doing, apply))

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        *,
        expected: Expected,
        source: Path | None = None,
    ) -> ResumePoint | None:
        """`find`, then `load`; returns None and touches nothing when there is no committed checkpoint."""
        found = self.find(expected=expected, source=source)
        if found is not None:
            self.load(found, model, optimizer, scaler)
        return found

    def _candidates(self, source: Path | None) -> list[tuple[Path, int | None]]:
        """Folders to try in order, as rank 0 sees them, each with the step its name promises."""
        doing = f"{source or self.folder}: looking for a checkpoint"
        if source is not None:
            self._ranks.first(doing, lambda: _check_source(Path(source)))
            return [(Path(source), None)]
        committed = self._ranks.first(doing, lambda: folders.committed_folders(self.folder))
        return [(path, step) for step, path in reversed(committed.items())]

    def _verify(self, path: Path, step: int | None) -> tuple[Manifest | None, list[str]]:
        """The manifest, and what is wrong with the checkpoint; ranks share the reading of files."""

        def read() -> tuple[Manifest | None, list[str]]:
            try:
                content = read_manifest(path)
            except UnsoundError as error:
                return None, [str(error)]
            if step not in (None, content.run.step):
                return None, [f"{MANIFEST_NAME}: expected step {step}, found {content.run.step}"]
            return content, []

        ranks, doing = self._ranks, f"{path}: verifying a checkpoint"
        content, problems = ranks.first(doing, read)
        if content is None:
            return None, problems
        shares = ranks.all_results(
            doing, lambda: find_damage(path, content, rank=ranks.rank, world_size=ranks.world_size)
        )
        return content, [problem for share in shares for problem in share]


def _targets(path: Path, content: Manifest, model: nn.Module, optimizer: Optimizer) -> state.TrainingState:
    """What to load into, once nothing differs."""
    if differences := optimizer_differences(content, optimizer):
        raise mismatch(path, differences)
    target = state.collect_targets(model, optimizer, content.optimizer["without_state"])
    if differences := state_differences(content, target):
        raise mismatch(path, differences)
    return target


def _check_source(source: Path) -> None:
    if (source / MANIFEST_NAME).is_file():
        return
    if (source / "model.safetensors").is_file():
        raise CheckpointError(
            f"{source}: expected a checkpoint, found exported weights, which are in half precision and have "
            "no optimizer state; name a folder step-… under checkpoints/"
        )
    inside = folders.committed_folders(source) or folders.committed_folders(source / "checkpoints")
    hint = f"; did you mean {inside[max(inside)]}?" if inside else ""
    raise CheckpointError(f"{source}: expected a checkpoint with a {MANIFEST_NAME}, found none{hint}")


def _shared(message: str) -> CheckpointError:
    error = CheckpointError(message)
    error.shared = True
    return error


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
