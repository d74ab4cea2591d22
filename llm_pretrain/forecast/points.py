"""Reads and writes a ladder's folder: sizes and steps in ladder.json, measurements in points.jsonl."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from llm_pretrain.config.loading import from_dict, to_dict, validate
from llm_pretrain.config.schema import matches_type
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import json_object, read_plain, replace_text
from llm_pretrain.forecast.family import Size, member
from llm_pretrain.text import first_line

LADDER_FILE, POINTS_FILE, RUNS_FOLDER = "ladder.json", "points.jsonl", "runs"
VERSION = 1
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Training:
    """One model trained on one number of tokens.

    Args:
        hidden_size: Hidden size of the model, a member of the ladder's family.
        parameters: Active parameters, with embedding and head; a tied embedding counts once.
        tokens: Number of trained tokens, from the first step on.
        unique_tokens: Tokens of the training split; if `tokens` is larger, the rest are repetitions.
        flops: FLOPs from the first step on.
    """

    hidden_size: int
    parameters: int
    tokens: int
    unique_tokens: int
    flops: float

    @staticmethod
    def of(size: Size, steps: int, unique_tokens: int) -> Training:
        """The training of a member of the family for some steps."""
        tokens = steps * size.config.training.tokens_per_step
        return Training(
            hidden_size=size.hidden_size,
            parameters=size.active_parameters,
            tokens=tokens,
            unique_tokens=unique_tokens,
            flops=size.flops_per_token * tokens,
        )


@dataclass(frozen=True)
class Point(Training):
    """A training with its measured loss; a line of points.jsonl.

    Args:
        loss: On the validation split, nats per token.
        bits_per_byte: The loss in bits per byte of text; None where the store has no bytes.
        decayed: Whether the learning rate has decayed; False in the stable phase.
    """

    loss: float
    bits_per_byte: float | None
    decayed: bool

    @property
    def key(self) -> tuple[int, bool, int]:
        """Identifies the point in its ladder; points.jsonl is sorted by it."""
        return self.hidden_size, self.decayed, self.tokens


@dataclass(frozen=True)
class Rung:
    """The runs of one size.

    Args:
        hidden_size: Hidden size of the model.
        branches: Steps at which the decays begin, ascending.
    """

    hidden_size: int
    branches: tuple[int, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Last steps of the decayed runs: a decay has as many steps as came before it."""
        return tuple(2 * branch for branch in self.branches)

    @property
    def save_steps(self) -> int:
        """Steps between the stable run's checkpoints; every branch is a multiple of them."""
        return math.gcd(*self.branches)


@dataclass(frozen=True)
class Ladder:
    """A ladder's runs and what they have measured so far.

    Args:
        folder: The ladder's folder.
        base: Base configuration of the family, with the store as its data; vocabulary size and precision are
            resolved.
        store_hash: Hash of the token store.
        unique_tokens: Tokens of the store's training split.
        rungs: One rung for each size, ascending.
        budget: The budget as the user wrote it: `20m`, `1e16`.
        threads: CPU threads of each run.
        points: The measured points; fewer than planned while the ladder runs.
    """

    folder: Path
    base: Config
    store_hash: str
    unique_tokens: int
    rungs: tuple[Rung, ...]
    budget: str
    threads: int
    points: tuple[Point, ...] = ()

    def write(self) -> None:
        """Write ladder.json, which has everything but the points."""
        content = {
            "format": "llm_pretrain ladder",
            "version": VERSION,
            "budget": self.budget,
            "store": self.store_hash,
            "unique_tokens": self.unique_tokens,
            "threads": self.threads,
            "rungs": [dataclasses.asdict(rung) for rung in self.rungs],
            "base": to_dict(self.base),
        }
        replace_text(self.folder / LADDER_FILE, json.dumps(content, indent=1) + "\n")


def write_points(folder: Path, points: Iterable[Point]) -> None:
    """Write points.jsonl, by size and tokens."""
    rows = sorted(points, key=lambda point: point.key)
    text = "".join(json.dumps(dataclasses.asdict(point)) + "\n" for point in rows)
    replace_text(folder / POINTS_FILE, text)


def read_unmeasured(folder: str | Path) -> Ladder | None:
    """Read a ladder without its points; None if the folder has no ladder.

    Raises:
        DataError: ladder.json is damaged.
    """
    file = Path(folder) / LADDER_FILE
    if (text := _read(file)) is None:
        return None
    content = json_object(file, text)
    for name, kind in _LADDER_KINDS.items():
        if not matches_type(kind, value := content.get(name)):
            raise DataError(f"{file}: expected {name} of a ladder, found {value!r:.60}")
    try:
        base = from_dict(content["base"])
        if problems := validate(base):
            raise ConfigError(*problems)
        rungs = tuple(Rung(each["hidden_size"], tuple(each["branches"])) for each in content["rungs"])
        sizes, steps = [rung.hidden_size for rung in rungs], [rung.branches for rung in rungs]
        counts = [content["unique_tokens"], content["threads"], *sizes, *itertools.chain(*steps)]
        ascend = all(each and list(each) == sorted(set(each)) for each in (sizes, *steps))
        if content.get("version") != VERSION or not base.model.vocab_size:
            raise ValueError("version or model.vocab_size")
        if not (matches_type(list[int], counts) and min(counts) > 0 and ascend):
            raise ValueError(f"numbers {counts}, of which those of rungs do not ascend from 1 on"[:80])
        for size in sizes:
            member(base, size)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        found = first_line(error)
        raise DataError(f"{file}: expected a ladder, found a wrong or missing entry: {found}") from error
    others = {name: content[name] for name in ("unique_tokens", "budget", "threads")}
    return Ladder(Path(folder), base, content["store"], rungs=rungs, **others)


_LADDER_KINDS: dict[str, Any] = {
    "store": str,
    "unique_tokens": int,
    "threads": int,
    "budget": str,
    "rungs": list[dict[str, Any]],
    "base": dict[str, Any],
}
_POINT_KINDS = get_type_hints(Point)


def read_points(folder: Path) -> tuple[Point, ...]:
    """The points of a ladder; empty before its first run has ended. Raises DataError for a damaged line."""
    file, found = folder / POINTS_FILE, list[Point]()
    for number, line in enumerate((_read(file) or b"").splitlines(), start=1):
        values = json_object(Path(f"{file}:{number}"), line)
        wrong = [name for name, kind in _POINT_KINDS.items() if not matches_type(kind, values.get(name))]
        if wrong or values.keys() != _POINT_KINDS.keys():
            raise DataError(
                f"{file}:{number}: expected a point with {', '.join(_POINT_KINDS)}, found another line"
            )
        found.append(Point(**values))
        for name in ("tokens", "loss", "bits_per_byte"):
            if (value := values[name]) is not None and not 0 < value < math.inf:
                raise DataError(f"{file}:{number}: expected {name} above 0, found {value}")
    return tuple(found)


def _read(file: Path) -> bytes | None:
    """The bytes of a file; None if it does not exist."""
    try:
        return read_plain(file, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error
