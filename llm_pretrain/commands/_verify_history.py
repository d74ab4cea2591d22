"""Reads the history of a run for `llm-pretrain verify`, and checks its rows, settings and status.json."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from llm_pretrain.checkpoints import Manifest, committed_folders, folder_name
from llm_pretrain.commands.verify import Check
from llm_pretrain.config import Config, YamlError, from_dict, read_yaml_file, resolve_model, to_dict, validate
from llm_pretrain.data import open_stores
from llm_pretrain.errors import EXIT_PREEMPTED, CheckpointError, ConfigError, DivergedError, PretrainError
from llm_pretrain.files import read_json, read_plain
from llm_pretrain.optim import learning_rate
from llm_pretrain.tracking import MAX_METRICS_BYTES, fault_lines, read_rows
from llm_pretrain.training import SPIKE_KINDS, SPIKE_REASONS


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


Row = dict[str, Any]
_NOTABLE = ("train/skipped", "train/spike")
"""Keys with which a row is written even if it is not due."""
_ENDS = ("finished", "preempted")
"""States in which a run has ended as it should."""
_MOST_STEPS = 1 << 24
"""Largest step that is accepted if no recorded setting bounds it."""


@dataclass
class Attempt:
    """One start or resume of a run.

    Args:
        number: From 1.
        start: Steps done before it.
        first_byte: Size of metrics.jsonl when it began.
        config: Its configuration; None if it is not recorded.
        before: Training rows of earlier attempts up to `start`.
        rows: Its own training rows, in order.
        evaluations: `eval/loss` of its rows, by step.
        began_elsewhere: It resumed from another run's checkpoint, whose rows are not here.
    """

    number: int
    start: int
    first_byte: int
    config: Config | None
    before: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    evaluations: dict[int, object] = field(default_factory=dict)
    began_elsewhere: bool = False

    @property
    def history(self) -> list[Row]:
        """The rows of all steps that led to the attempt's last one."""
        return self.before + self.rows


@dataclass
class RunFiles:
    """What has been read of a run so far; the checks that read it come before those that use it.

    Args:
        folder: The run's.
        status: Content of status.json; empty if it cannot be read.
        known_config: Content of config.yaml, with `model.vocab_size` filled in; None if it cannot be read.
        manifests: Step and manifest of each committed checkpoint whose manifest is sound, ascending.
        attempts: With their rows; empty if the files cannot be read, or do not exist yet.
        fingerprints: Of the configuration; None if the stores cannot be opened.
        sound: Steps of the checkpoints without problems.
    """

    folder: Path
    status: dict[str, Any] = field(default_factory=dict)
    known_config: Config | None = None
    manifests: dict[int, Manifest] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    fingerprints: dict[str, str] | None = None
    sound: list[int] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The configuration, for checks that are made only if it could be read."""
        assert self.known_config is not None
        return self.known_config

    @property
    def ended_with_save(self) -> bool:
        """Whether the run has ended, by status.json, and so has saved.

        False for one that was stopped before its first step: at step 0, or before it wrote config.yaml if it
        began from another run's checkpoint.
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


def read_config(check: Check, run: RunFiles) -> None:
    """Read the run's config.yaml.

    Raises:
        ConfigError: it cannot be read, or is invalid.
    """
    file, size = run.folder / "config.yaml", run.status.get("world_size")
    if not file.exists() and run.status and not run.ended_with_save and not run.has_rows_or_checkpoints:
        check.skip("not written yet")  # only status.json is written before it
        return
    world_size = size if isinstance(size, int) and size > 0 else 1  # check_status reports others
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
        if problems := _problems(config, world_size):
            raise ConfigError(*problems)
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from error
    if config.model.vocab_size is None:
        config = resolve_model(config, open_stores(config)[0].vocab_size)
    run.known_config = config
    check.looked_at = "every setting is known and none contradicts another"


def read_history(check: Check, run: RunFiles) -> None:
    """Read the attempts with their rows."""
    file = run.folder / "metrics.jsonl"
    if not run.ended_with_save and not run.has_rows_or_checkpoints:
        check.skip("no row has been written yet")
        return
    # Rows are read before the attempts, so that each row's attempt is among them. Lists (moe/load) are
    # dropped to save memory.
    rows = [
        {key: value for key, value in row.items() if not isinstance(value, list)} for row in read_rows(file)
    ]
    attempts = read_attempts(run.folder / "attempts.jsonl")
    if strange := [row["step"] for row in rows if row["step"] < 0 or isinstance(row["step"], bool)]:
        raise CheckpointError(f"{file}: expected steps from 0 on, found {strange[0]}")
    last = last_possible_step(attempts, run.known_config)
    steps = [*(row["step"] for row in rows), *(attempt.start for attempt in attempts)]
    if late := [step for step in steps if step > last]:
        raise CheckpointError(f"{file}: expected steps up to training.max_steps {last}, found {late[0]}")
    assign_rows(attempts, rows, run.folder)
    check.looked_at = f"{len(rows)} rows by {len(attempts)} attempts, all JSON"
    run.attempts = attempts


def read_attempts(file: Path) -> list[Attempt]:
    """The attempts in the order in which they began.

    Raises:
        CheckpointError: the file is missing, or has an invalid row.
    """
    attempts: list[Attempt] = []
    for number, row in enumerate(read_rows(file), start=1):
        start, size = row["step"], row.get("metrics_bytes")
        if start < 0 or not isinstance(size, int) or size < 0:
            raise CheckpointError(
                f"{file}:{number}: expected an attempt with step and metrics_bytes, found step {start!r}, "
                f"metrics_bytes {size!r:.40}"
            )
        attempts.append(Attempt(number, start, size, _config_of(row)))
    if not attempts:
        raise CheckpointError(f"{file}: expected a row for each start of the run, found none")
    return attempts


def assign_rows(attempts: list[Attempt], rows: Iterable[Row], folder: Path) -> None:
    """Assign each row of metrics.jsonl to the attempt that wrote it, and set each attempt's `before`.

    A row was written by the last attempt that began before it in the file. A resumed attempt continues from a
    checkpoint: rows of earlier attempts after that step are lost work. Rows with an evaluation only are no
    training rows.
    """
    content = read_plain(folder / "metrics.jsonl", MAX_METRICS_BYTES)
    first_rows = [content.count(b"\n", 0, attempt.first_byte) for attempt in attempts]
    for index, row in enumerate(rows):
        number = max((k for k, first in enumerate(first_rows) if first <= index), default=0)
        if "eval/loss" in row:
            attempts[number].evaluations[row["step"]] = row["eval/loss"]
        if any(key.startswith(("train/", "data/")) for key in row):
            attempts[number].rows.append(row)
    history: list[Row] = []
    for attempt in attempts:
        attempt.began_elsewhere = _began_elsewhere(attempt, history, folder / "checkpoints")
        if not attempt.began_elsewhere:
            attempt.before = [row for row in history if row["step"] <= attempt.start]
        history = attempt.history


def _began_elsewhere(attempt: Attempt, history: list[Row], own_checkpoints: Path) -> bool:
    """Whether the attempt resumed from another run's checkpoint."""
    if attempt.number == 1:
        return attempt.start > 0
    if attempt.config is None or attempt.config.checkpoint.resume in ("auto", "never"):
        return False
    source = Path(attempt.config.checkpoint.resume).resolve()
    is_own = source.parent == own_checkpoints.resolve()
    return not is_own and attempt.start > max((row["step"] for row in history), default=0)


def last_possible_step(attempts: list[Attempt], config: Config | None) -> int:
    """Largest `training.max_steps` of all attempts; `_MOST_STEPS` or more if one is not recorded."""
    known = [each.config for each in attempts]
    steps = [each.training.max_steps for each in (*known, config) if each is not None]
    return max(steps) if steps and None not in known else max([_MOST_STEPS, *steps])


def check_settings(check: Check, run: RunFiles) -> None:
    """Check that config.yaml has the settings with which the newest attempt began.

    Its record is written first: of one that was killed between the two, and so has no rows, the settings of
    the attempt before it are accepted.
    """
    *earlier, newest = run.attempts
    if newest.config is None:
        check.skip("those of the newest attempt are not on record")
        return
    differences = _differences(newest.config, run.config)
    before = earlier[-1].config if earlier and not newest.rows else None
    if before is not None and not _differences(before, run.config):
        differences = []
    for setting, begun, found in differences:
        check.fail(
            f"{run.folder / 'config.yaml'}: expected {setting} {begun!r:.40}, with which the newest attempt "
            f"began, found {found!r:.40}"
        )
    check.looked_at = "config.yaml says what the newest attempt began with"


def _differences(begun: Config, found: Config) -> list[tuple[str, object, object]]:
    """Each setting whose values differ, with both; a vocabulary size that was not given does not count."""
    if begun.model.vocab_size is None:
        begun = replace(begun, model=replace(begun.model, vocab_size=found.model.vocab_size))
    values = to_dict(found)
    return [
        (f"{section}.{name}", value, values[section][name])
        for section, settings in to_dict(begun).items()
        for name, value in settings.items()
        if values[section][name] != value
    ]


def _config_of(row: Row) -> Config | None:
    try:
        config = from_dict(row["config"]) if isinstance(row.get("config"), dict) else None
    except PretrainError:
        return None  # written by another version: treated as not recorded
    return config if config is not None and not _problems(config) else None


def _problems(config: Config, world_size: int = 1) -> list[str]:
    """Those of `validate` that do not depend on the machine and the folder from which a run is looked at."""
    anywhere = replace(
        config,
        run=replace(config.run, output_dir=None),
        checkpoint=replace(config.checkpoint, resume="auto"),
        logging=replace(config.logging, tensorboard=False),
    )
    return validate(anywhere, world_size)


_ALWAYS = ("train/learning_rate", "train/loss_tokens", "train/tokens")
_NO_SPIKE_REASONS = ("no_loss_tokens", "overflow", "nonfinite_gradient", "nonfinite_loss")
_UNLESS_SKIPPED = ("train/loss", "train/grad_norm", "train/z_loss", "train/aux_loss", "train/router_z_loss")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a finite number; integers in JSON may be too large for a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def logging_steps(attempt: Attempt, config: Config) -> int:
    """`logging.logging_steps` of the attempt, or of `config` if its own is not recorded."""
    return (attempt.config or config).logging.logging_steps


def check_steps(check: Check, run: RunFiles) -> None:
    """Check that every attempt wrote the rows that were due, in order."""
    attempts, config, ended = run.attempts, run.config, _ended_at(run)
    total = 0
    for number, attempt in enumerate(attempts):
        every = logging_steps(attempt, config)
        who = f"attempt {attempt.number}"
        steps = [row["step"] for row in attempt.rows]
        total += len(steps)
        last = max(steps, default=attempt.start)
        if number + 1 < len(attempts) and not attempts[number + 1].began_elsewhere:
            last = max(last, attempts[number + 1].start)
        elif number + 1 == len(attempts) and ended is not None:
            last = max(last, ended)
        if attempt.began_elsewhere:
            check.reason = f"the steps before {attempt.start} are another run's"
        due = set(range((attempt.start // every + 1) * every, last + 1, every))
        if missing := sorted(due - set(steps)):
            check.fail(f"{who}: expected a row of every {_th(every)}, found none of step {spans(missing)}")
        if early := sorted({step for step in steps if step <= attempt.start}):
            check.fail(
                f"{who}: expected rows after its start at step {attempt.start}, found step {spans(early)}"
            )
        if repeated := sorted({a for a, b in pairwise(steps) if b <= a}):
            check.fail(f"{who}: expected ascending steps, found another order after step {spans(repeated)}")
        for row in attempt.rows:
            if row["step"] % every and not any(row.get(key) for key in _NOTABLE):
                check.fail(
                    f"{who}: expected a row off every {_th(every)} to be skipped or a spike, found step "
                    f"{row['step']}"
                )
    kept = attempts[-1].history
    reached = f"steps up to {kept[-1]['step']}" if kept else "no steps"
    check.looked_at = f"{total} rows of {len(attempts)} attempts, {reached}"
    if total == 0 and not check.problems:
        check.skip("no step has been logged yet")


def _th(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def check_learning_rate(check: Check, run: RunFiles) -> None:
    """Check that each row has the learning rate of the schedule."""
    compared = unknown = 0
    for attempt in run.attempts:
        own = attempt.config or (run.config if attempt is run.attempts[-1] else None)
        if own is None:
            unknown += len(attempt.rows)
            continue
        for row in attempt.rows:
            expected, found = learning_rate(own, row["step"] - 1), row.get("train/learning_rate")
            compared += 1
            if not isinstance(found, float | int) or found != expected:
                check.fail(
                    f"step {row['step']}: expected {expected!r}, as the schedule has it, found {found!r:.40}"
                )
    check.looked_at = f"{compared} rows equal to the schedule, bit for bit"
    if check.problems:
        check.looked_at = f"{compared} rows, {len(check.problems)} unlike the schedule"
    if unknown:
        check.reason = f"{unknown} rows of attempts whose configuration is not on record"
    if not compared:
        check.skip(check.reason or "no rows")


def check_tokens(check: Check, run: RunFiles) -> None:
    """Check that the tokens of each row add up to those of the row before."""
    exact = bounded = 0
    for attempt, before, row in pairs(run.attempts):
        tokens, own, step = row.get("train/tokens"), row.get("train/loss_tokens"), row["step"]
        if not (is_integer(tokens) and is_integer(own) and own >= 0):
            check.fail(
                f"step {step}: expected whole numbers of tokens, found train/tokens {tokens!r:.40}, "
                f"train/loss_tokens {own!r:.40}"
            )
            continue
        sources = [value for key, value in row.items() if key.endswith("/loss_tokens") and "/source/" in key]
        if sources and (not all(map(is_integer, sources)) or sum(sources) != own):
            check.fail(f"step {step}: expected the sources' loss tokens to add up to {own}, found {sources}")
        if before is None and attempt.start:
            continue  # the row before is another run's, or missing, which the check `steps` reports
        earlier = before.get("train/tokens") if before else 0
        if not is_integer(earlier):
            continue  # reported for that row
        sum_here = earlier + own
        if step == (before["step"] if before else 0) + 1:
            exact += 1
            if tokens != sum_here:
                check.fail(f"step {step}: expected train/tokens {sum_here}, the running sum, found {tokens}")
        else:
            bounded += 1
            if tokens < sum_here:
                check.fail(f"step {step}: expected train/tokens of {sum_here} or more, found {tokens}")
    check.looked_at = f"{exact} rows add up exactly to the row before"
    if bounded:
        check.looked_at += f", {bounded} rows with steps between them rise enough (see samples)"
    if exact + bounded == 0 and not check.problems:
        check.skip("no two rows follow each other")


def pairs(attempts: list[Attempt]) -> Iterator[tuple[Attempt, Row | None, Row]]:
    """(attempt, row before, row) for every row of every attempt, in order."""
    for attempt in attempts:
        before = attempt.before[-1] if attempt.before else None
        for row in attempt.rows:
            yield attempt, before, row
            before = row


def _check_skipped(check: Check, row: Row) -> None:
    """Check that `train/skipped` and `train/spike` have valid values that agree with each other."""
    skipped, spike, step = row.get("train/skipped"), row.get("train/spike"), row["step"]
    if skipped is not None and skipped not in (*_NO_SPIKE_REASONS, *SPIKE_REASONS):
        check.fail(f"step {step}: expected train/skipped to be a reason, found {skipped!r:.40}")
    if spike is not None and spike not in SPIKE_KINDS:
        check.fail(
            f"step {step}: expected train/spike to be one of {', '.join(SPIKE_KINDS)}, found {spike!r:.40}"
        )
    if (spike is None and skipped in SPIKE_REASONS) or (spike is not None and skipped in _NO_SPIKE_REASONS):
        check.fail(f"step {step}: expected train/spike with a step skipped for it alone, found {spike!r:.40}")


def check_finite(check: Check, run: RunFiles) -> None:
    """Check that each row has its numbers, and that they are finite."""
    rows = skipped = 0
    for _, _, row in pairs(run.attempts):
        rows += 1
        is_skipped = bool(row.get("train/skipped"))
        skipped += is_skipped
        _check_skipped(check, row)
        needed = (
            _ALWAYS
            if is_skipped and "train/spike" not in row
            else (*_ALWAYS, *(key for key in _UNLESS_SKIPPED if key in row))
        )
        if not is_skipped and "train/loss" not in row:
            check.fail(f"step {row['step']}: expected train/loss, found none")
        for key in needed:
            value = row.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                check.fail(f"step {row['step']}: expected {key} to be a number, found {value!r:.40}")
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not is_finite(value):
                check.fail(f"step {row['step']}: expected {key} to be finite or null, found {value!r:.40}")
    for attempt in run.attempts:
        for step, loss in attempt.evaluations.items():
            if not is_finite(loss):
                check.fail(f"step {step}: expected eval/loss to be a finite number, found {loss!r:.40}")
    check.looked_at = f"{rows} rows, {skipped} of skipped steps, which may have nulls"
    if not rows and not check.problems:
        check.skip("no rows")


def check_twice(check: Check, run: RunFiles) -> None:
    """Report the steps that were computed twice, and what differed (`training.check_every`)."""
    steps = [row["step"] for _, _, row in pairs(run.attempts) if row.get("train/check")]
    for line in fault_lines(run.status, undone=False):
        check.fail(f"silent data corruption at {line}")
    if last := [step for step in (*steps[-1:], run.status.get("checked")) if is_integer(step)]:
        looked_at = f"{len(steps)} of the rows' steps, the last is step {max(last)}"
        check.looked_at = "; ".join([looked_at, *fault_lines(run.status, undone=True)])
    elif not check.problems:
        check.skip("no step yet")


_EXIT_CODES = {"finished": 0, "preempted": EXIT_PREEMPTED, "diverged": DivergedError.exit_code}
_STATES = ("running", *_EXIT_CODES, "failed")


def read_status(check: Check, run: RunFiles) -> None:
    """Read status.json.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    file = run.folder / "status.json"
    try:
        content = read_json(file)
    except OSError as error:
        raise CheckpointError(
            f"{file}: expected the run's status, found: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected the run's status as JSON, found: {error}") from error
    if not isinstance(content, dict) or content.get("state") not in _STATES:
        found = content.get("state") if isinstance(content, dict) else content
        raise CheckpointError(f"{file}: expected a state of {', '.join(_STATES)}, found {found!r:.40}")
    run.status = content
    check.looked_at = f"state {content['state']}"


def _ended_at(run: RunFiles) -> int | None:
    """Step at which a run finished or stopped, so that rows must exist up to it; None in other states."""
    last, step = run.config.training.max_steps, run.status.get("step")
    if run.status.get("state") == "finished":
        return last
    is_step = is_integer(step) and 0 <= step <= last
    return step if run.ended_with_save and is_step else None


def check_status(check: Check, run: RunFiles) -> None:
    """Check that state, exit code, step and checkpoint agree with each other and with the folder."""
    if run.status["state"] == "running":  # it may have changed since
        with suppress(CheckpointError):
            read_status(check, run)
    status, config = run.status, run.known_config
    state, step, name = status["state"], status.get("step"), status.get("checkpoint")
    code = status.get("exit_code")
    check.looked_at = f"{state}, step {step}, exit code {code}"
    expected = _EXIT_CODES.get(state)
    if state == "running":
        check.looked_at += f"; {_alive(status.get('pid'))}"
    if (state == "failed") != (is_integer(code) and code not in _EXIT_CODES.values()) or (
        state != "failed" and code != expected
    ):
        check.fail(f"exit_code: expected {expected if state != 'failed' else 'an error'}, found {code!r}")
    size = status.get("world_size", 1)
    if not is_integer(size) or size < 1:
        check.fail(f"world_size: expected a number of processes, found {size!r:.40}")
    if not is_integer(step) or step < 0:
        check.fail(f"step: expected a whole number of steps, found {step!r:.40}")
        return
    _check_named_checkpoint(check, run, step, name)
    if state == "finished" and config is not None and step != config.training.max_steps:
        check.fail(f"step: expected training.max_steps {config.training.max_steps}, found {step}")
    rows = run.attempts[-1].history if run.attempts else []
    if rows and state in _ENDS and rows[-1]["step"] > step:
        check.fail(f"step: expected {rows[-1]['step']}, the last row's, or later, found {step}")


def _check_named_checkpoint(check: Check, run: RunFiles, step: int, name: object) -> None:
    if name is None:
        if run.ended_with_save:
            check.fail(f"checkpoint: expected that of step {step}, found none")
        return
    if not isinstance(name, str):
        check.fail(f"checkpoint: expected a path, found {name!r:.40}")
        return
    place = run.folder / "checkpoints" / Path(name).name
    committed = committed_folders(run.folder / "checkpoints").values()
    if run.ended_with_save and (place.name != folder_name(step) or place not in committed):
        check.fail(f"checkpoint: expected {folder_name(step)} in {place.parent}, found {name}")
    elif run.status["state"] == "running" and place not in committed:
        check.reason = f"{name}, which is another run's, or which the run has deleted meanwhile"
    elif place not in committed and not Path(name).exists():
        check.fail(f"checkpoint: expected a folder, found none at {name}")
    if place in committed:
        check.looked_at += f", {place.name} is there"


def _alive(pid: object) -> str:
    """Whether a process of this machine exists, as text."""
    if not is_integer(pid) or not 0 < pid < 1 << 31:
        return "its process is not on record"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"process {pid} is not on this machine: killed, or running elsewhere"
    except OSError:
        pass
    return f"process {pid} is there"
