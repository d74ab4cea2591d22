"""The commit protocol: a staged checkpoint becomes a folder, whole or not at all.

Every rank writes its files into a temporary folder and tells their digests; the manifest is written last, and
one rename commits. Knows nothing of models, nor of which older checkpoints stay. Runs in any thread.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_pretrain.checkpoints import folders
from llm_pretrain.checkpoints.averages import average_name
from llm_pretrain.checkpoints.manifest import Manifest, write_manifest
from llm_pretrain.checkpoints.ranks import Ranks
from llm_pretrain.checkpoints.staging import HostBuffers, Piece
from llm_pretrain.checkpoints.tensor_files import check_finite, write_pieces
from llm_pretrain.errors import CheckpointError

Share = tuple[dict[str, dict[str, Any]], int]
"""A rank's files with their sizes and digests, and how many bytes of tensors they hold."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint that is taken down and not written yet.

    Args:
        content: Its manifest, without files.
        pieces: What this rank writes.
        bytes: Size of all tensors, over all ranks.
    """

    content: Manifest
    pieces: list[Piece]
    bytes: int

    def copied(self, live: dict[str, Tensor], buffers: HostBuffers) -> dict[str, Tensor]:
        """Copies of `live`, by the model's names: those that stand here, the others made in `buffers`.

        Where a parameter's average stands here, `live` has that under its name.
        """
        here = {
            piece.name: piece.tensor
            for piece in self.pieces
            if list(piece.tensor.shape) == self.content.tensors[piece.name]["shape"]
        }
        first = {name: self._stands_as(self.content.tied.get(name, name)) for name in live}
        missing = {first[name]: tensor for name, tensor in live.items() if first[name] not in here}
        here |= buffers.tensors(missing)
        return {name: here[first[name]] for name in live}

    def _stands_as(self, name: str) -> str:
        """What weights are made of: the average, or the parameter where there is none."""
        average = average_name(name)
        return average if average in self.content.tensors else name


def write_staged(staged: Staged, parent: Path, ranks: Ranks) -> Path:
    """Commit `staged` as a folder of `parent`; collective over `ranks`. Returns the folder.

    Raises:
        CheckpointError: on every rank, when one of them fails; nothing was committed.
        DivergedError: likewise, when a value is not finite.
    """
    token = ranks.first("naming a checkpoint", lambda: uuid.uuid4().hex)
    temporary = folders.temporary_folder(parent, staged.content.run.step, token)
    doing = f"{temporary}: writing a checkpoint of {staged.bytes} bytes"
    try:
        ranks.first(doing, lambda: _make_room(parent))
        shares = ranks.all_results(doing, lambda: _write_share(staged, temporary, ranks.rank))
        return ranks.first(doing, lambda: _commit(temporary, staged, shares))
    except Exception:
        if ranks.rank == 0:
            folders.discard(temporary)
        raise


def _make_room(parent: Path) -> None:
    folders.make_parent(parent)
    folders.clean(parent)


def _write_share(staged: Staged, folder: Path, rank: int) -> Share:
    """Write this rank's files; returns their sizes and digests, and how many bytes of tensors they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, scalar in staged.content.scalars.items():
        check_finite(name, torch.tensor([scalar["value"]], dtype=torch.float64))
    files = write_pieces(staged.pieces, folder, rank=rank)
    return files, sum(piece.tensor.nbytes for piece in staged.pieces)


def _commit(temporary: Path, staged: Staged, shares: list[Share]) -> Path:
    if (written := sum(size for _, size in shares)) != staged.bytes:
        raise CheckpointError(f"{temporary}: expected {staged.bytes} bytes of tensors, ranks wrote {written}")
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
    return folders.commit_folder(temporary, content.run.step)
