"""What a ladder's folder holds: its sizes and steps in ladder.json, its measurements in points.jsonl."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from llm_pretrain.config import Config, from_dict, matches_type, to_dict, validate
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.files import json_object, read_plain, replace_text
from llm_pretrain.ladder.family import Size, member, tokens_per_step

LADDER_FILE, POINTS_FILE, RUNS_FOLDER = "ladder.json", "points.jsonl", "runs"
VERSION = 1
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Training:
    """One model trained on one number of tokens.

    Args:
        hidden_size: Of the model, a member of the ladder's family.
        parameters: Active ones, without embedding and head.
        parameters_with_embedding: Active ones; a tied embedding counts once.
        tokens: Trained on, from the first step.
        unique_tokens: Of the training split; more `tokens` are repetitions.
        flops: From the first step.
    """

    hidden_size: int
    parameters: int
    parameters_with_embedding: int
    tokens: int
    unique_tokens: int
    flops: float

    @staticmethod
    def of(size: Size, steps: int, unique_tokens: int) -> Training:
        """That of a member of the family for some steps."""
        model, tokens = size.config.model, steps * tokens_per_step(size.config)
        embedding = (model.vocab_size or 0) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
        return Training(
            hidden_size=size.hidden_size,
            parameters=size.active_parameters - embedding,
            parameters_with_embedding=size.active_parameters,
            tokens=tokens,
            unique_tokens=unique_tokens,
            flops=size.flops_per_token * tokens,
        )


@dataclass(frozen=True)
class Point(Training):
    """A training with its measured loss; a line of points.jsonl.

    Args:
        loss: On the validation split, nats per token.
        bits_per_byte: The same per byte of text; None where the store has no bytes.
        decayed: Whether the learning rate has decayed; False in the stable phase.
    """

    loss: float
    bits_per_byte: float | None
    decayed: bool

    @property
    def key(self) -> tuple[int, bool, int]:
        """What no other point of a ladder has, and by which points.jsonl is ordered."""
        return self.hidden_size, self.decayed, self.tokens


@dataclass(frozen=True)
class Budget:
    """What a ladder may use.

    Args:
        text: As it was given: `20m`, `1e16`.
        flops: Of all trainings.
        seconds: Of wall time; None where FLOPs were given.
        measuring_seconds: Of those, what the measurement of this machine's speed took.
        start_up_seconds: Measured, of each run; 0 where FLOPs were given.
    """

    text: str
    flops: float
    seconds: float | None = None
    measuring_seconds: float = 0.0
    start_up_seconds: float = 0.0


@dataclass(frozen=True)
class Rung:
    """The runs of one size.

    Args:
        hidden_size: Of the model.
        steps: Optimizer steps of its decayed runs, each with its stable part.
        branches: Step at which the decay of each begins.
    """

    hidden_size: int
    steps: tuple[int, ...]
    branches: tuple[int, ...]

    @property
    def save_steps(self) -> int:
        """Steps between the stable run's checkpoints: every branch is a multiple."""
        return math.gcd(*self.branches)


@dataclass(frozen=True)
class Ladder:
    """A ladder's runs and what they have measured so far.

    Args:
        folder: Of the ladder.
        base: The configuration whose family it is, with the store as its data, vocabulary and precision
            resolved.
        store_hash: Of the token store.
        unique_tokens: Of its training split.
        rungs: One for each size, ascending.
        budget: What it was given.
        rate_factor: Factor on the base's learning rates that was best; None before it is known.
        threads: CPU threads of each run.
        points: The table; fewer than planned while the ladder runs.
        seconds_per_token: Hidden size -> measured seconds per trained token of one run, with others beside
            it.
    """

    folder: Path
    base: Config
    store_hash: str
    unique_tokens: int
    rungs: tuple[Rung, ...]
    budget: Budget
    rate_factor: float | None
    threads: int
    points: tuple[Point, ...] = ()
    seconds_per_token: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def write(self) -> None:
        """Write ladder.json: all but the points and the speeds."""
        content = {
            "format": "llm_pretrain ladder",
            "version": VERSION,
            "budget": dataclasses.asdict(self.budget),
            "store": self.store_hash,
            "unique_tokens": self.unique_tokens,
            "threads": self.threads,
            "rate_factor": self.rate_factor,
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
    """A ladder without what it has measured; None where the folder has none.

    Raises:
        DataError: ladder.json is damaged.
    """
    file = Path(folder) / LADDER_FILE
    try:
        content = json_object(file, read_plain(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error
    if content.get("version") != VERSION:
        raise DataError(f"{file}: expected version {VERSION}, found {content.get('version')!r:.40}")
    for name, kind in _LADDER_KINDS.items():
        if not matches_type(kind, value := content.get(name)):
            raise DataError(f"{file}: expected {name} of a ladder, found {value!r:.60}")
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise DataError(f"{file}: expected {name} above 0, found {value}")
    try:
        budget, base = _budget(content["budget"]), from_dict(content["base"])
        if problems := validate(base):
            raise ConfigError(*problems)
        if base.model.vocab_size is None:
            raise ValueError("model.vocab_size")
        if not content["rungs"]:
            raise ValueError("rungs")
        rungs = tuple(Rung(rung["hidden_size"], *map(tuple, _steps(rung))) for rung in content["rungs"])
        sizes = [rung.hidden_size for rung in rungs]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"rungs of hidden sizes {sizes}, which do not ascend")
        for size in sizes:
            member(base, size)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{file}: expected a ladder, found a wrong or missing entry: {first}") from error
    others = {name: content[name] for name in ("unique_tokens", "rate_factor", "threads")}
    return Ladder(Path(folder), base, content["store"], rungs=rungs, budget=budget, **others)


_LADDER_KINDS: dict[str, Any] = {
    "store": str,
    "unique_tokens": int,
    "threads": int,
    "rate_factor": float | None,
    "rungs": list[dict[str, Any]],
    "budget": dict[str, Any],
    "base": dict[str, Any],
}


def _budget(values: Mapping[str, Any]) -> Budget:
    """That of ladder.json. Raises ValueError where it cannot be one."""
    budget = Budget(**values)
    numbers = [budget.flops, budget.measuring_seconds, budget.start_up_seconds]
    if budget.seconds is not None:
        numbers.append(budget.seconds)
    kinds = isinstance(budget.text, str) and matches_type(list[float], numbers)
    if not (kinds and budget.flops > 0 and all(0 <= each < math.inf for each in numbers)):
        raise ValueError(f"budget {values}"[:80])
    return budget


def _steps(rung: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Steps and branches of a rung in ladder.json. Raises ValueError where they cannot be."""
    steps, branches = rung["steps"], rung["branches"]
    kinds = matches_type(list[int], [rung["hidden_size"], *steps, *branches])
    ends_each = kinds and len(steps) == len(branches) > 0 and all(map(operator.lt, branches, steps))
    if not ends_each or branches[0] < 1 or any(map(operator.ge, branches, branches[1:])):
        raise ValueError(f"rungs {rung}"[:80])
    return steps, branches


def read_points(folder: Path) -> tuple[Point, ...]:
    """The table of a ladder; empty before its first run has ended. Raises DataError for a damaged line."""
    file = folder / POINTS_FILE
    try:
        lines = read_plain(file, _MAX_BYTES).splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error
    return tuple(_point(file, number, line) for number, line in enumerate(lines, start=1))


_KINDS = get_type_hints(Point)
_RANGES = {
    **{name: (1, 1e18) for name, kind in _KINDS.items() if kind is int},
    **{"flops": (1.0, 1e27), "loss": (1e-6, 1e3), "bits_per_byte": (1e-6, 1e3)},
}
"""Of what a training can have measured; the fit computes with any of them."""


def _point(file: Path, number: int, line: bytes) -> Point:
    values = json_object(Path(f"{file}:{number}"), line)
    wrong = [name for name, kind in _KINDS.items() if not matches_type(kind, values.get(name))]
    if wrong or values.keys() != _KINDS.keys():
        raise DataError(f"{file}:{number}: expected a point with {', '.join(_KINDS)}, found another line")
    for name, (least, most) in _RANGES.items():
        if (value := values[name]) is not None and not least <= value <= most:
            raise DataError(f"{file}:{number}: expected {name} from {least:g} to {most:g}, found {value}")
    return Point(**values)
