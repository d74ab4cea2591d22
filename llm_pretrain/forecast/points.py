"""Reads and writes a ladder's folder: sizes and steps in ladder.json, measurements in points.jsonl."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from llm_pretrain.config.loading import from_dict, to_dict, validate
from llm_pretrain.config.schema import PositiveFloat, PositiveInt, Range, read
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import json_object, read_plain, replace_text
from llm_pretrain.forecast.family import Size, member

LADDER_FILE, POINTS_FILE, RUNS_FOLDER = "ladder.json", "points.jsonl", "runs"
_MAX_BYTES = 1 << 26
Tokens = Annotated[int, Range(gt=0, le=1 << 62)]


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
    tokens: Tokens
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

    loss: PositiveFloat
    bits_per_byte: PositiveFloat | None
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

    hidden_size: PositiveInt
    branches: Annotated[tuple[int, ...], Range(gt=0)]

    @property
    def steps(self) -> tuple[int, ...]:
        """Last steps of the decayed runs: a decay has as many steps as came before it."""
        return tuple(2 * branch for branch in self.branches)

    @property
    def save_steps(self) -> int:
        """Steps between the stable run's checkpoints; every branch is a multiple of them."""
        return math.gcd(*self.branches)


@dataclass(frozen=True)
class _LadderFile:
    """Content of ladder.json, besides its format; see `Ladder`."""

    version: Literal[1]
    budget: str
    store: str
    unique_tokens: Tokens
    threads: PositiveInt
    rungs: list[Rung]
    base: dict[str, Any]


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
        plan = _LadderFile(
            version=1,
            budget=self.budget,
            store=self.store_hash,
            unique_tokens=self.unique_tokens,
            threads=self.threads,
            rungs=list(self.rungs),
            base=to_dict(self.base),
        )
        content = {"format": "llm_pretrain ladder", **dataclasses.asdict(plan)}
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
    content.pop("format", None)
    plan = read(_LadderFile, content, str(file), DataError)
    try:
        base = from_dict(plan.base)
        if problems := validate(base):
            raise ConfigError(*problems)
        for rung in plan.rungs:
            member(base, rung.hidden_size)
    except ConfigError as error:
        raise DataError(f"{file}: expected a ladder, found: {error.problems[0]}") from error
    return Ladder(
        Path(folder), base, plan.store, plan.unique_tokens, tuple(plan.rungs), plan.budget, plan.threads
    )


def read_points(folder: Path) -> tuple[Point, ...]:
    """The points of a ladder; empty before its first run has ended. Raises DataError for a damaged line."""
    points = list[Point]()
    for number, line in enumerate((_read(folder / POINTS_FILE) or b"").splitlines(), start=1):
        place = folder / f"{POINTS_FILE}:{number}"
        points.append(read(Point, json_object(place, line), str(place), DataError))
    return tuple(points)


def _read(file: Path) -> bytes | None:
    """The bytes of a file; None if it does not exist."""
    try:
        return read_plain(file, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error
