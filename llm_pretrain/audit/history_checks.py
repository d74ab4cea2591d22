"""Reads status.json, config.yaml and the rows of a run for `llm-pretrain verify`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from llm_pretrain.audit.checks import Check
from llm_pretrain.checkpoints.folders import committed_folders, folder_name
from llm_pretrain.checkpoints.manifest import Manifest
from llm_pretrain.config.loading import from_dict, resolve_model, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.data.loader import open_stores
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError
from llm_pretrain.files import read_object
from llm_pretrain.runs.attempts import Attempt, owner_of, read_attempts, row_starts
from llm_pretrain.runs.record import fault_lines
from llm_pretrain.runs.rows import Row, is_training_row, read_metrics
from llm_pretrain.text import reason_of

_STATES = ("running", "finished", "preempted", "diverged", "failed")
_MOST_STEPS = 1 << 24
"""Largest step that is accepted if no recorded setting bounds it."""


@dataclass
class RunFiles:
    """What has been read of a run so far; a check that fills a field runs before the checks that use it.

    Args:
        folder: The run's folder.
        status: Content of status.json; empty if it cannot be read.
        known_config: Content of config.yaml, with `model.vocab_size` filled in; None if it cannot be read.
        manifests: Step and manifest of each committed checkpoint whose manifest is sound, ascending.
        attempts: Starts of the run; empty if the files cannot be read, or do not exist yet.
        rows: Rows of optimizer steps, by step, without lost work (`read_metrics`).
        fingerprints: Fingerprints of the configuration; None if the stores cannot be opened.
        sound: Steps of the checkpoints without problems.
    """

    folder: Path
    status: dict[str, Any] = field(default_factory=dict)
    known_config: Config | None = None
    manifests: dict[int, Manifest] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    fingerprints: dict[str, str] | None = None
    sound: list[int] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The configuration, for checks that run only if config.yaml could be read."""
        assert self.known_config is not None
        return self.known_config

    @property
    def ended_with_save(self) -> bool:
        """Whether status.json says that the run ended after it saved a checkpoint.

        False for a run that was stopped before its first step: at step 0 or, if it began from another run's
        checkpoint, before it wrote config.yaml.
        """
        status = self.status
        is_at_start = status.get("step") == 0 and status.get("checkpoint") is None
        has_begun = self.known_config is not None or self.has_rows_or_checkpoints
        return status.get("state") == "finished" or (
            status.get("state") == "preempted" and has_begun and not is_at_start
        )

    @property
    def has_rows_or_checkpoints(self) -> bool:
        """Whether a row or a checkpoint has been written."""
        rows = self.folder / "metrics.jsonl"
        return (rows.exists() and rows.stat().st_size > 0) or bool(
            committed_folders(self.folder / "checkpoints")
        )

    def logging_steps(self, attempt: Attempt) -> int:
        """`logging.logging_steps` of an attempt, or of config.yaml if the attempt's settings are unknown."""
        return (attempt.config or self.config).logging.logging_steps


def check_status_file(check: Check, run: RunFiles) -> None:
    """Read status.json.

    Raises:
        DataError: status.json is missing or is no JSON object.
        CheckpointError: status.json has no known state.
    """
    file = run.folder / "status.json"
    content = read_object(file)
    if (state := content.get("state")) not in _STATES:
        raise CheckpointError(f"{file}: expected a state of {', '.join(_STATES)}, found {state!r:.40}")
    run.status = content
    check.looked_at = f"state {state}"


def read_config(check: Check, run: RunFiles) -> None:
    """Read the run's config.yaml.

    Raises:
        ConfigError: config.yaml cannot be read, or is invalid.
    """
    file, size = run.folder / "config.yaml", run.status.get("world_size")
    if not file.exists() and run.status and not run.ended_with_save and not run.has_rows_or_checkpoints:
        check.skip("not written yet")  # a run writes only status.json before config.yaml
        return
    try:
        tree = read_yaml_file(file)
    except (OSError, ValueError) as error:
        found = reason_of(error)
        raise ConfigError(f"{file}: expected the run's configuration as YAML, found: {found}") from error
    try:
        config = from_dict(tree)
        if problems := _problems(config, size if is_integer(size) and size > 0 else 1):
            raise ConfigError(*problems)
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from error
    if config.model.vocab_size is None:
        config = resolve_model(config, open_stores(config)[0].vocab_size)
    run.known_config = config
    check.looked_at = "every setting is known and none contradicts another"


def _problems(config: Config, world_size: int) -> list[str]:
    """The problems that `validate` finds, without those that depend on this machine or the run's folder."""
    anywhere = replace(
        config,
        run=replace(config.run, output_dir=None),
        checkpoint=replace(config.checkpoint, resume="auto", start_from=None),
        logging=replace(config.logging, tensorboard=False),
    )
    return validate(anywhere, world_size)


def read_history(check: Check, run: RunFiles) -> None:
    """Read the attempts, and the rows without lost work; fail if a row that was due is missing."""
    file = run.folder / "metrics.jsonl"
    if not run.ended_with_save and not run.has_rows_or_checkpoints:
        check.skip("no row has been written yet")
        return
    attempts = read_attempts(run.folder)

    def keep(row: Row) -> Row:  # `moe/load` of a long run would fill the memory
        return {key: value for key, value in row.items() if not isinstance(value, list)}

    rows = read_metrics(file, convert=keep, starts=row_starts(attempts))
    configs = [run.config, *(attempt.config for attempt in attempts)]
    last = max(_MOST_STEPS if each is None else each.training.max_steps for each in configs)
    steps = [*(attempt.start for attempt in attempts), *(row["step"] for row in rows)]
    if strange := [step for step in steps if not 0 <= step <= last]:
        raise CheckpointError(f"{file}: expected steps up to training.max_steps {last}, found {strange[0]}")
    origin = attempts[0].start
    run.rows = {row["step"]: row for row in rows if is_training_row(row) and row["step"] > origin}
    run.attempts = attempts
    last = max([attempts[-1].start, *run.rows, _ended_at(run) or 0])
    due: list[int] = []
    starts = (each.start for each in attempts if each.start < last)  # a later start is lost work
    for begin, end in pairwise(sorted({origin, last, *starts})):
        every = run.logging_steps(owner_of(end, attempts))
        due += range((begin // every + 1) * every, end + 1, every)
    if missing := [step for step in due if step not in run.rows]:
        check.fail(f"{file}: expected a row of every step that was due, found none of step {spans(missing)}")
    check.looked_at = f"{len(run.rows)} rows by {len(attempts)} attempts, {len(due)} of them due"
    if not run.rows and not check.problems:
        check.skip("no step has been logged yet")
    elif origin:
        check.reason = f"the steps before {origin}, which are another run's"


def _ended_at(run: RunFiles) -> int | None:
    """Step at which a run finished or stopped: rows must exist up to this step. None in other states."""
    last, step = run.config.training.max_steps, run.status.get("step")
    if run.status.get("state") == "finished" and not run.config.evaluation.patience:
        return last
    return step if run.ended_with_save and is_integer(step) and 0 <= step <= last else None


def check_twice(check: Check, run: RunFiles) -> None:
    """Report the steps that were computed twice, and what differed (`training.check_every`)."""
    steps = [step for step, row in run.rows.items() if row.get("train/check")]
    for line in fault_lines(run.status, undone=False):
        check.fail(f"silent data corruption at {line}")
    if last := [step for step in (*steps[-1:], run.status.get("checked")) if is_integer(step)]:
        looked_at = f"{len(steps)} of the rows' steps, the last is step {max(last)}"
        check.looked_at = "; ".join([looked_at, *fault_lines(run.status, undone=True)])
    elif not check.problems:
        check.skip("no step yet")


def check_status(check: Check, run: RunFiles) -> None:
    """Check that the step and the checkpoint of status.json agree with the folder."""
    if run.status["state"] == "running":  # status.json may have changed since it was read
        with suppress(PretrainError):
            check_status_file(check, run)
    state, step, config = run.status["state"], run.status.get("step"), run.known_config
    check.looked_at = f"{state}, step {step}"
    if not is_integer(step) or step < 0:
        check.fail(f"step: expected a whole number of steps, found {step!r:.40}")
        return
    _check_named_checkpoint(check, run, step)
    last = None if config is None or config.evaluation.patience else config.training.max_steps
    if state == "finished" and last not in (None, step):
        check.fail(f"step: expected training.max_steps {last}, found {step}")
    if state in ("finished", "preempted") and step < max(run.rows, default=0):
        check.fail(f"step: expected {max(run.rows)}, the last row's, or later, found {step}")


def _check_named_checkpoint(check: Check, run: RunFiles, step: int) -> None:
    name = run.status.get("checkpoint")
    if not isinstance(name, str):
        if name is not None or run.ended_with_save:
            check.fail(f"checkpoint: expected that of step {step}, found {name!r:.40}")
        return
    place = run.folder / "checkpoints" / Path(name).name
    is_there = place in committed_folders(place.parent).values()
    if run.ended_with_save and (place.name != folder_name(step) or not is_there):
        check.fail(f"checkpoint: expected {folder_name(step)} in {place.parent}, found {name}")
    elif run.status["state"] == "running" and not is_there:
        check.reason = f"{name}, which is another run's, or which the run has deleted meanwhile"
    elif not is_there and not Path(name).exists():
        check.fail(f"checkpoint: expected a folder, found none at {name}")
    if is_there:
        check.looked_at += f", {place.name} is there"


def spans(numbers: list[int], most: int = 5) -> str:
    """Ascending numbers as text, `3, 7-9`; only the first `most` spans."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(shown) + (", …" if len(found) > most else "")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
