"""A run's history out of its files: its attempts, and which rows of metrics each of them wrote after which.

A resumed attempt goes on from a checkpoint, so the rows before its own are those up to that step; rows that
an older attempt wrote later than that belong to work which was lost. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llm_pretrain.commands._verification.checks import Checks
from llm_pretrain.config import Config, YamlError, from_dict, read_yaml_file, resolve_model, to_dict, validate
from llm_pretrain.data import open_stores
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError
from llm_pretrain.tracking import read_rows

Row = dict[str, Any]
_MOST_STEPS = 1 << 24
"""Steps that are believed where nothing on record bounds them."""


@dataclass
class Attempt:
    """One start or resume of a run.

    Args:
        number: From 1.
        start: Steps done before it.
        began: Seconds since 1970.
        config: Its own; None where it is not on record.
        before: Rows of training that it goes on from, by step.
        rows: Its own rows of training, in their order.
        evaluations: `eval/loss` of its rows, by step.
        began_elsewhere: It goes on from another run's checkpoint, whose rows are not here.
    """

    number: int
    start: int
    began: float
    config: Config | None
    before: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    evaluations: dict[int, object] = field(default_factory=dict)
    began_elsewhere: bool = False

    @property
    def history(self) -> list[Row]:
        """The rows behind the attempt's last step: the inherited ones and its own."""
        return self.before + self.rows


def read_config(file: Path, world_size: int = 1) -> Config:
    """The run's config.yaml, with `model.vocab_size` filled in.

    Raises:
        ConfigError: it cannot be read, or contradicts itself.
    """
    try:
        tree = read_yaml_file(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: expected the run's configuration, found: {error.strerror or error}"
        ) from error
    except (ValueError, YamlError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: expected the run's configuration as YAML, found: {reason}") from error
    try:
        if not isinstance(tree, dict):
            raise ConfigError(f"expected sections, found {type(tree).__name__}")
        config = from_dict(tree)
        if problems := validate(config, world_size):
            raise ConfigError(*problems)
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from error
    if config.model.vocab_size is None:
        config = resolve_model(config, open_stores(config)[0].vocab_size)
    return config


def read_attempts(file: Path) -> list[Attempt]:
    """The attempts in the order in which they began.

    Raises:
        CheckpointError: no such file, or what stands in it is no attempt.
    """
    attempts: list[Attempt] = []
    for number, row in enumerate(read_rows(file), start=1):
        began, start = row.get("time"), row["step"]
        if not isinstance(began, int | float) or start < 0:
            raise CheckpointError(
                f"{file}:{number}: expected an attempt with step and time, found step {start!r}, "
                f"time {began!r:.40}"
            )
        attempts.append(Attempt(number, start, float(began), _config_of(row)))
    if not attempts:
        raise CheckpointError(f"{file}: expected a row for each start of the run, found none")
    return attempts


def assign_rows(attempts: list[Attempt], rows: Iterable[Row], own_checkpoints: Path) -> None:
    """Give each row of metrics.jsonl to the attempt that wrote it, and each attempt what it goes on from.

    A row is the work of the last attempt that had begun when it was written; a row without a time, of that
    of the row before. Rows of evaluation alone are no rows of training.
    """
    number = 0
    for row in rows:
        written = row.get("time")
        if isinstance(written, int | float):
            number = max((k for k, each in enumerate(attempts) if each.began <= written), default=0)
        if "eval/loss" in row:
            attempts[number].evaluations[row["step"]] = row["eval/loss"]
        if any(key.startswith(("train/", "data/")) for key in row):
            attempts[number].rows.append(row)
    line: list[Row] = []
    for attempt in attempts:
        attempt.began_elsewhere = _began_elsewhere(attempt, line, own_checkpoints)
        if not attempt.began_elsewhere:
            attempt.before = [row for row in line if row["step"] <= attempt.start]
        line = attempt.history


def _began_elsewhere(attempt: Attempt, line: list[Row], own_checkpoints: Path) -> bool:
    """Whether the attempt goes on from another run's checkpoint."""
    if attempt.number == 1:
        return attempt.start > 0
    if attempt.config is None or attempt.config.checkpoint.resume in ("auto", "never"):
        return False
    source = Path(attempt.config.checkpoint.resume).resolve()
    is_own = source.parent == own_checkpoints.resolve()
    return not is_own and attempt.start > max((row["step"] for row in line), default=0)


def last_possible_step(attempts: list[Attempt], config: Config | None) -> int:
    """Largest `training.max_steps` that any attempt had; where one's is not on record, what memory allows."""
    known = [each.config for each in attempts]
    steps = [each.training.max_steps for each in (*known, config) if each is not None]
    return max(steps) if steps and None not in known else max([_MOST_STEPS, *steps])


def check_settings(checks: Checks, folder: Path, config: Config, attempts: list[Attempt]) -> None:
    """Whether config.yaml still says what the newest attempt began with."""
    with checks.check("settings") as check:
        begun = attempts[-1].config
        if begun is None:
            return check.skip("those of the newest attempt are not on record")
        if begun.model.vocab_size is None:
            begun = replace(begun, model=replace(begun.model, vocab_size=config.model.vocab_size))
        for name, wanted, found in _other_settings(begun, config):
            check.fail(
                f"{folder / 'config.yaml'}: expected {name} {wanted!r:.40}, with which "
                f"the newest attempt began, found {found!r:.40}"
            )
        check.looked_at = "config.yaml says what the newest attempt began with"
    return None


def _other_settings(left: Config, right: Config) -> Iterator[tuple[str, object, object]]:
    mine, theirs = to_dict(left), to_dict(right)
    for section, settings in mine.items():
        for name, value in settings.items():
            if theirs[section][name] != value:
                yield f"{section}.{name}", value, theirs[section][name]


def _config_of(row: Row) -> Config | None:
    try:
        config = from_dict(row["config"]) if isinstance(row.get("config"), dict) else None
    except PretrainError:
        return None  # of another version; what needs it says that it is not on record
    return config if config is not None and not validate(config) else None
