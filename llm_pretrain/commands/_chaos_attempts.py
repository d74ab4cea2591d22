"""One attempt of a chaos run: it is started, killed at its target, and compared with the reference run."""

from __future__ import annotations

import hashlib
import json
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from llm_pretrain.checkpoints import (
    CheckpointTensors,
    Manifest,
    committed_folders,
    find_damage,
    folder_name,
    read_manifest,
)
from llm_pretrain.commands._kill_schedule import Kill, Target
from llm_pretrain.commands._launching import (
    OUTPUT_FOLDERS,
    SCRIPTS,
    Job,
    LaunchContext,
    RunMonitor,
    RunningJob,
    is_training_row,
    last_error_lines,
    newest_checkpoint,
    processes_of,
    read_status,
    shorten,
    temporary_folders,
)
from llm_pretrain.commands._parity_comparison import SAMPLES, Rows
from llm_pretrain.errors import EXIT_PREEMPTED, PretrainError
from llm_pretrain.tracking import read_rows

LAUNCHER_SECONDS, WORKER_SECONDS = 60.0, 30.0
"""Time limits of a launcher that lost a worker, and of workers that lost their launcher."""
_SLOW_STEPS = 3.0
"""Where a step, save or evaluation takes long, a limit is extended to this many of them."""
_POLL_SECONDS, _POLL_SAVE_SECONDS = 0.004, 0.0005
_MACHINE_KEYS = ("time", "perf/")
"""First characters of the keys that measure the machine."""
_LAUNCH_FACTS = ("launcher", "run_id", "wandb_id")
"""Facts in a checkpoint's manifest that name the run and how it was launched."""


@dataclass(frozen=True)
class Violation:
    """A violated guarantee, as one line, with its step and key where it has them."""

    text: str
    step: int | None = None
    key: str | None = None


@dataclass
class Attempt:
    """One start of the run.

    Args:
        path: Its launch path.
        exit_code: The launcher's; None where it outlived its time limit.
        last_step: Of the rows that it wrote; None without any.
        in_save: Whether it was writing a checkpoint or weights when it was killed.
        saved_step: Step of what it was writing.
        killed: Whether it was killed; otherwise it ended by itself.
        seconds: From its start to the kill or its end.
        ended_within: Seconds from the kill until no process was left.
        violation: The first broken promise.
        number: From 1 on; also the number of its kill.
        kill, target: As drawn and placed; None for the last attempt.
        began_at: Its first step; None where it was killed before it wrote one down.
        checkpoint_before, checkpoint_after: Newest committed steps at its start and at its end.
        moment: Where the kill fell, for the table.
    """

    path: str
    exit_code: int | None = None
    last_step: int | None = None
    in_save: bool = False
    saved_step: int | None = None
    killed: bool = False
    seconds: float = 0.0
    ended_within: float | None = None
    violation: Violation | None = None
    number: int = 0
    kill: Kill | None = None
    target: Target | None = None
    began_at: int | None = None
    checkpoint_before: int = 0
    checkpoint_after: int = 0
    moment: str = ""

    @property
    def label(self) -> str:
        """Its name in a message."""
        return f"kill {self.number}, attempt {self.number}" if self.killed else f"attempt {self.number}"


@dataclass
class Durations:
    """Seconds that the phases of a run take here, for delays and time limits.

    Args:
        start_up: Launch path to the seconds from its start to the first row; the shortest seen.
        step, save, evaluation: Of one each.
        longest_gap: Between two rows, including saves and evaluations.
    """

    start_up: dict[str, float] = field(default_factory=dict)
    step: float = 0.05
    save: float = 0.05
    evaluation: float = 0.0
    longest_gap: float = 0.0

    def add_start_up(self, path: str, seconds: float) -> None:
        """Enter a measured start-up."""
        self.start_up[path] = min(seconds, self.start_up.get(path, seconds))

    def of_start_up(self, path: str) -> float:
        """Shortest start-up of a launch path; of another path where this one has not run yet."""
        return self.start_up.get(path) or min(self.start_up.values(), default=4.0)


def measure_durations(rows: Rows, save_steps: int, eval_steps: int) -> Durations:
    """Durations by the times at which a run's rows were written."""
    times = {step: row["time"] for step, row in rows.items() if step >= 1 and "time" in row}
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    after_save = {step for step in gaps if save_steps and (step - 1) % save_steps == 0}
    evaluated = {step for step in gaps if eval_steps and step % eval_steps == 0}
    durations = Durations(longest_gap=max(gaps.values(), default=0.0))
    if plain := [gap for step, gap in gaps.items() if step not in after_save | evaluated]:
        durations.step = statistics.median(plain)
    if seconds := [gaps[step] - durations.step for step in after_save - evaluated]:
        durations.save = max(0.01, statistics.median(seconds))
    if seconds := [gaps[step] - durations.step for step in evaluated - after_save]:
        durations.evaluation = max(0.0, statistics.median(seconds))
    return durations


def run_attempt(
    job: Job,
    context: LaunchContext,
    durations: Durations,
    kill: Kill | None = None,
    target: Target | None = None,
) -> Attempt:
    """Start the run, kill it at its target, and wait until none of its processes is left.

    Args:
        job: What to start.
        context: Where to start it; its time limit holds for the attempt.
        durations: For delays and limits; the attempt's start-up is entered.
        kill, target: None to let the run end.
    """
    monitor, attempt = RunMonitor(job.folder), Attempt(job.path, kill=kill, target=target)
    with RunningJob(job, context, range(job.world_size)) as started:
        trigger = _KillTrigger(kill, target, durations, monitor) if kill and target else None
        while started.poll() is None:
            monitor.update()
            # early in a start-up there is no worker to kill yet
            if trigger and kill and trigger() and (kill.kind != "rank" or _worker(started, kill.rank or 0)):
                attempt.killed = True
                break
            time.sleep(trigger.poll_seconds if trigger else _POLL_SECONDS)
        attempt.seconds = started.seconds
        if attempt.killed and kill:
            attempt.saved_step = monitor.step_being_saved()
            _send_kill(started, kill)
            attempt.violation = _wait_for_exit(started, kill, durations, attempt)
        else:
            attempt.violation = _check_own_end(started)
        attempt.exit_code = started.process.poll()
    attempt.violation = attempt.violation or _check_lock(job.folder)
    monitor.update()
    attempt.last_step = monitor.last_step
    attempt.in_save = attempt.killed and (attempt.saved_step is not None or bool(monitor.temporary_folders()))
    if monitor.first_row_seconds is not None:
        durations.add_start_up(job.path, monitor.first_row_seconds)
    return attempt


class _KillTrigger:
    """Tells when an attempt has reached its target and the delay is over."""

    def __init__(self, kill: Kill, target: Target, durations: Durations, monitor: RunMonitor):
        self.target, self.monitor = target, monitor
        self._reached, self._since = target.where == "start-up", monitor.started
        duration = {
            "start-up": durations.of_start_up(kill.path),
            "step": durations.step,
            "save": durations.save,
            "evaluation": durations.evaluation,
        }[target.where]
        self._wait = kill.delay * duration
        if target.where == "evaluation":
            self._wait += durations.step  # the evaluation begins when its step is done

    @property
    def poll_seconds(self) -> float:
        """Seconds between two calls; fewer close to a save, which is short."""
        near = (self.monitor.last_step or 0) >= self.target.step - 1
        return _POLL_SAVE_SECONDS if self.target.where == "save" and near else _POLL_SECONDS

    def __call__(self) -> bool:
        where, monitor = self.target.where, self.monitor
        if where == "save":
            step = monitor.step_being_saved()
            reached = step is not None and step >= self.target.step
            if not reached and self._reached:  # the save ended before the delay: sooner in the next one
                self._reached, self._wait = False, self._wait / 4
        else:
            row = self.target.step - (where == "evaluation")
            reached = self._reached or (monitor.last_step or 0) >= row
        if not reached:
            return False
        if not self._reached:
            self._reached, self._since = True, time.monotonic()
        if where == "start-up" and monitor.last_step is not None:
            return True
        return time.monotonic() - self._since >= self._wait


def _worker(started: RunningJob, rank: int) -> psutil.Process | None:
    """The launcher's child process that runs the script as this rank."""
    script = SCRIPTS[started.job.path]
    for process in started.find_workers():
        with suppress(psutil.Error):
            is_worker = process.ppid() == started.process.pid and any(
                word.endswith(script) for word in process.cmdline()
            )
            if is_worker and int(process.environ().get("RANK") or 0) == rank:
                return process
    return None


def _send_kill(started: RunningJob, kill: Kill) -> None:
    if kill.kind == "group":
        started.kill()
    elif kill.kind == "rank":
        with suppress(psutil.Error):
            if worker := _worker(started, kill.rank or 0):
                worker.kill()
    else:
        started.find_workers()
        with suppress(ProcessLookupError):
            started.process.send_signal(signal.SIGKILL if kill.kind == "launcher" else signal.SIGTERM)


def _wait_for_exit(
    started: RunningJob, kill: Kill, durations: Durations, attempt: Attempt
) -> Violation | None:
    """Wait until launcher and workers are gone; those left at the limit are a violation, and are killed."""
    sent, limit = time.monotonic(), _exit_limit(kill.kind, durations)
    while time.monotonic() - sent < limit:
        if started.process.poll() is not None and not processes_of(started.job.folder):
            attempt.ended_within = round(time.monotonic() - sent, 2)
            return None
        time.sleep(0.05)
    names = []
    for process in processes_of(started.job.folder):
        rank = "none"
        with suppress(psutil.Error):
            rank = process.environ().get("RANK", rank)
        names.append(f"{process.pid} (rank {rank})")
        with suppress(psutil.Error):
            process.kill()
    cause = {
        "group": "SIGKILL to all processes",
        "rank": f"SIGKILL to rank {kill.rank}",
        "launcher": "SIGKILL to the launcher",
        "term": "SIGTERM to the launcher",
    }[kill.kind]
    who = ", ".join(names) or "the launcher"
    return Violation(f"process {who} was still there {limit:.0f} s after {cause}", key="process")


def _exit_limit(kind: str, durations: Durations) -> float:
    seconds = WORKER_SECONDS if kind == "launcher" else LAUNCHER_SECONDS
    return max(seconds, _SLOW_STEPS * durations.longest_gap + seconds / 2)


def _check_own_end(started: RunningJob) -> Violation | None:
    """A run that was not killed ends with exit code 0 within the time limit."""
    log, code = started.job.log, started.process.returncode
    if started.timed_out:
        return Violation(f"no end after {started.seconds:.0f} s, killed; see {log}", key="time limit")
    if code != 0:
        lines = "; ".join(last_error_lines(log))
        return Violation(f"ended by itself with exit code {code}: {lines}", key="exit code")
    return None


def _check_lock(folder: Path) -> Violation | None:
    """The folder of a run without processes is not locked."""
    if not folder.is_dir():
        return None
    try:
        with FileLock(folder / ".lock", timeout=1):
            return None
    except Timeout:
        return Violation(f"{folder} is still locked though no process of the run is left", key="lock")


@dataclass
class FolderState:
    """A run's folder before an attempt.

    Args:
        checkpoint: Step of the newest committed checkpoint, 0 without any.
        weights: Steps of the committed weights.
        rows, starts: Number of lines of metrics.jsonl and attempts.jsonl.
        temporary: Temporary folders.
    """

    checkpoint: int = 0
    weights: set[int] = field(default_factory=set)
    rows: int = 0
    starts: int = 0
    temporary: list[str] = field(default_factory=list)


def scan_folder(folder: Path) -> FolderState:
    """The present state of a run's folder, which may not exist."""
    checkpoints, weights = (set(committed_folders(folder / name)) for name in OUTPUT_FOLDERS)
    return FolderState(
        checkpoint=max(checkpoints, default=0),
        weights=weights,
        rows=len(_lines(folder / "metrics.jsonl")),
        starts=len(_lines(folder / "attempts.jsonl")),
        temporary=temporary_folders(folder),
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    return list(read_rows(file)) if file.exists() else []


def steps_of_attempt(folder: Path, before: FolderState) -> tuple[list[int], list[int]]:
    """Steps of the training rows of an attempt, and its first steps according to attempts.jsonl."""
    rows, starts = _lines(folder / "metrics.jsonl"), _lines(folder / "attempts.jsonl")
    written = [row["step"] for row in rows[before.rows :] if is_training_row(row)]
    return written, [start["step"] + 1 for start in starts[before.starts :]]


def check_start(folder: Path, before: FolderState) -> Violation | None:
    """The attempt begins right after the newest checkpoint, and its rows omit no step."""
    written, declared = steps_of_attempt(folder, before)
    expected, newest = before.checkpoint + 1, before.checkpoint
    after = f"after the checkpoint of step {newest}" if newest else "without a checkpoint"
    for found in [*declared, *written[:1]]:
        if found != expected:
            return Violation(f"began at step {found}, expected {expected} {after}", found, "step")
    for step, due in enumerate(written, start=expected):
        if due != step:
            return Violation(f"wrote step {due} where step {step} was due", step, "step")
    return None


def check_rows(
    reference: Rows, found: Rows, *, owed: int | None = None, steps: int | None = None
) -> Violation | None:
    """Rows merged by step are the reference's, bit for bit, without times and speeds. Inputs come first.

    Args:
        reference: Rows of the reference run.
        found: Rows of the killed run so far.
        owed: Step whose evaluation a stop signal postponed to the next attempt.
        steps: Number of steps that must be there; None for those up to the last.
    """
    last = steps if steps is not None else max(found, default=-1)
    for step in sorted(step for step in {*reference, *found} if step <= last):
        if step not in found or step not in reference:
            where = "there" if step in found else "missing"
            return Violation(f"step {step}: a row is {where}, the reference's is not", step, "row")
        left, right = reference[step], found[step]
        for key in dict.fromkeys([*(key for key in SAMPLES if key in left), *left, *right]):
            if key.startswith(_MACHINE_KEYS) or (step == owed and key not in right):
                continue
            expected, value = left.get(key, "missing"), right.get(key, "missing")
            if json.dumps(expected) != json.dumps(value):
                text = f"step {step} {key}: expected {shorten(expected)}, found {shorten(value)}"
                return Violation(text, step, key)
    return None


def postponed_evaluation(folder: Path) -> int | None:
    """Step of the newest checkpoint where the next attempt still has to evaluate it."""
    committed = committed_folders(folder / "checkpoints")
    if not committed:
        return None
    run = read_manifest(committed[max(committed)]).run
    return run.step if run.extra.get("evaluation_owed") else None


class FolderVerifier:
    """Verifies committed checkpoints and weights, each checkpoint once."""

    def __init__(self) -> None:
        self._verified: set[tuple[str, int, int]] = set()

    def check(self, folder: Path, *, again: bool = False) -> Violation | None:
        """Every committed checkpoint and folder of weights is whole; `again` rereads verified ones."""
        for step, path in committed_folders(folder / "checkpoints").items():
            file = path / "manifest.json"
            known = (str(path), file.stat().st_ino, file.stat().st_mtime_ns) if file.exists() else None
            if known in self._verified and not again:
                continue
            if problems := checkpoint_problems(path, step):
                return Violation(f"{path} is damaged: {'; '.join(problems)}", step, "checkpoint")
            if known:
                self._verified.add(known)
        for step, path in committed_folders(folder / "weights").items():
            if problem := _weights_problem(path):
                return Violation(f"{path} is damaged: {problem}", step, "weights")
        return None


def checkpoint_problems(path: Path, step: int) -> list[str]:
    """One line for each way in which a folder is not a sound checkpoint of `step`."""
    try:
        content = read_manifest(path)
    except PretrainError as error:
        return [str(error)]
    if content.run.step != step:
        return [f"its manifest says step {content.run.step}"]
    return find_damage(path, content)


def _weights_problem(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files or not (path / "config.json").is_file():
        return "model.safetensors or config.json is missing"
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name}: {error}"
    return ""


def check_temporary(folder: Path, before: FolderState) -> Violation | None:
    """Temporary folders of earlier attempts are removed once this attempt has saved."""
    after = scan_folder(folder)
    saved = {"checkpoints": after.checkpoint > before.checkpoint, "weights": after.weights - before.weights}
    for name in before.temporary:
        if name in after.temporary and saved[name.split("/")[0]]:
            text = f"{folder / name} is of an earlier attempt, and outlived a save"
            return Violation(text, key="temporary")
    return None


def check_stop(folder: Path, last_step: int | None) -> Violation | None:
    """A stop signal loses nothing: the last step with a row is in a checkpoint, as status.json says.

    Args:
        folder: Of the run that was stopped.
        last_step: Of the attempt's rows. Without any nothing is promised.
    """
    if last_step is None:
        return None
    saved = newest_checkpoint(folder)
    if saved != last_step:
        text = f"a stop signal after step {last_step} left step {saved} as the newest checkpoint"
        return Violation(
            f"{text}; do a step and its save take longer than a launcher waits?", last_step, "step"
        )
    found = _status_facts(folder)
    if found not in (("preempted", EXIT_PREEMPTED, last_step), ("finished", 0, last_step)):
        text = f"status.json: expected preempted, 75, step {last_step}, found {', '.join(map(str, found))}"
        return Violation(text, last_step, "status")
    return None


def _status_facts(folder: Path) -> tuple[Any, ...]:
    status = read_status(folder)
    return status.get("state"), status.get("exit_code"), status.get("step")


def check_end(reference: Path, folder: Path, steps: int, *, same_call: bool) -> Violation | None:
    """A finished run has the reference's status, checkpoint and weights. Memory: one tensor at a time.

    Args:
        reference, folder: The two runs.
        steps: Of both.
        same_call: Whether both ran with the same settings; otherwise the model cards may differ.
    """
    found = _status_facts(folder)
    if found != ("finished", 0, steps):
        text = f"status.json: expected finished, 0, step {steps}, found {', '.join(map(str, found))}"
        return Violation(text, steps, "status")
    if left := temporary_folders(folder):
        return Violation(f"{folder / left[0]} is left over at the end", steps, "temporary")
    name = folder_name(steps)
    try:
        violation = _compare_checkpoints(
            reference / "checkpoints" / name, folder / "checkpoints" / name, steps
        )
    except PretrainError as error:
        violation = Violation(str(error), steps, "checkpoint")
    return violation or _compare_weights(reference / "weights", folder / "weights", steps, cards=same_call)


def _compare_checkpoints(reference: Path, found: Path, steps: int) -> Violation | None:
    left, right = read_manifest(reference), read_manifest(found)
    for name, value in manifest_facts(left).items():
        if value != (other := manifest_facts(right)[name]):
            text = f"{found}: {name}: expected {shorten(value, 90)}, found {shorten(other, 90)}"
            return Violation(text, steps, "checkpoint")
    if left.files == right.files:  # the same bytes: the files' digests were verified
        return None
    from llm_pretrain.commands._verify_checkpoints import same_bits

    with CheckpointTensors(reference, left) as expected, CheckpointTensors(found, right) as others:
        for name in left.tensors:
            if not same_bits(expected.read(name), others.read(name)):
                text = f"step {steps}: the checkpoint's tensor {name} is not the reference's, bit for bit"
                return Violation(text, steps, name)
    return None


def manifest_facts(content: Manifest) -> Mapping[str, Any]:
    """What two manifests of equal runs agree on."""
    run = {name: value for name, value in vars(content.run).items() if name not in _LAUNCH_FACTS}
    return {
        "tensors": content.tensors,
        "scalars": content.scalars,
        "optimizer": content.optimizer,
        "scaler": content.scaler,
        **run,
    }


def _compare_weights(reference: Path, found: Path, steps: int, *, cards: bool) -> Violation | None:
    for folder in (folder_name(steps), "best"):
        left, right = (
            {file.name: file for file in path.iterdir()} if path.is_dir() else {}
            for path in (reference / folder, found / folder)
        )
        if not left and not right and folder == "best":
            continue
        if left.keys() != right.keys() or not left:
            name = min(left.keys() ^ right.keys(), default=folder)
            text = f"{found / folder}: expected the reference's files, {name} differs"
            return Violation(text, steps, "weights")
        for name, file in left.items():
            if (cards or name != "README.md") and _sha256(file) != _sha256(right[name]):
                text = f"{right[name]}: expected the reference's bytes, found others"
                return Violation(text, steps, f"weights/{folder}/{name}")
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
