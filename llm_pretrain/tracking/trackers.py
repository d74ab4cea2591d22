"""Shows the rows of a run as they come: on the console, in Weights & Biases, in TensorBoard.

None of these stops or delays training. After an output error (a closed pipe, say) the console shows nothing
more. wandb runs in a separate thread, and waits for it are bounded. A tracker that fails is dropped with one
warning; metrics.jsonl has everything that trackers get.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import printable
from llm_pretrain.runs.rows import expert_summary, finite_number
from llm_pretrain.text import duration, quantity, size_text, type_and_reason

Row = Mapping[str, Any]


class Console:
    """Messages and progress of one run.

    Lines go to standard output, warnings and the bar to standard error. On a terminal, the line of a row has
    as many figures as fit.

    Args:
        config: The run's configuration; the progress bar shows its name.
        enabled: True on one process only; other processes show nothing.
        start_step: Step from which the run starts.
        max_steps: Step at which the run ends.
    """

    def __init__(self, config: Config, *, enabled: bool, start_step: int, max_steps: int):
        self._enabled = enabled
        self._step = start_step
        self._max_steps = max_steps
        self._first: tuple[float, int] | None = None
        self._bar, self._figures = None, ""
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            # some terminals (in containers, say) report 0 columns and rows, with which tqdm shows nothing
            has_size = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            self._bar = tqdm(
                desc=config.run.name[:20],
                initial=start_step,
                total=max_steps,
                bar_format="{desc}:{percentage:4.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
                dynamic_ncols=has_size,
                ncols=None if has_size else 120,
                nrows=None if has_size else 24,
            )

    def info(self, text: str) -> None:
        """Print a line to standard output."""
        self._write(text, sys.stdout)

    def warning(self, text: str) -> None:
        """Print a warning to standard error."""
        self._write(f"warning: {text}", sys.stderr)

    def row(self, row: Row) -> None:
        """Show a row of metrics: training, evaluation or both."""
        if not self._enabled:
            return
        step = row["step"]
        if any(key.startswith(("train/", "perf/")) for key in row):
            remaining = self._remaining_seconds(row)
            eta = [f"eta {duration(remaining)}"] if remaining is not None else []
            first, parts = [*_first_parts(row), *eta], [*_training_parts(row), *_expert_parts(row)]
            self._figures = "  ".join(first)
            self.step(step)
            self.info(_fitting([f"step {step}/{self._max_steps}", *first, *parts]))
        if evaluation := list(_evaluation_parts(row)):
            self.info(_fitting([f"step {step}/{self._max_steps}", *evaluation, *source_parts(row)]))

    def step(self, step: int) -> None:
        """Move the bar to a step that is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures, refresh=False)
            self._bar.update(step - self._bar.n)

    def evaluating(self, done: int, total: int) -> None:
        """Show in the bar how many batches of an evaluation are done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"evaluation {done}/{total}")

    def close(self) -> None:
        """Close the progress bar and show nothing more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._enabled = False

    def _remaining_seconds(self, row: Row) -> float | None:
        """Seconds left at the mean speed since the first row; for the first row, at that row's step time."""
        now, step = time.monotonic(), row["step"]
        left = self._max_steps - step
        if self._first is None:
            self._first = (now, step)
        elapsed, steps = now - self._first[0], step - self._first[1]
        if steps > 0:
            return elapsed / steps * left
        seconds = finite_number(row.get("perf/step_seconds"))
        return None if seconds is None else seconds * left

    def _write(self, text: str, stream: TextIO) -> None:
        if not self._enabled:
            return
        text = printable(text)
        try:
            if self._bar is not None:
                self._bar.write(text, file=stream)
            else:
                print(text, file=stream, flush=True)
        except (OSError, ValueError):  # a closed pipe or file, or a character that the terminal lacks
            self._enabled = False


def _fitting(parts: Sequence[str]) -> str:
    """The parts in a line; without the last ones that a terminal on standard output has no room for."""
    width = 0
    with suppress(OSError, ValueError):  # a closed or replaced standard output
        width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    ends = accumulate(len(part) + 2 for part in parts)
    return "  ".join(part for part, end in zip(parts, ends, strict=True) if not width or end - 2 < width)


def _first_parts(row: Row) -> Iterator[str]:
    if row.get("train/skipped"):
        yield f"skipped ({row['train/skipped']})"
    if "train/loss" in row:
        yield f"loss {_number(row['train/loss'], '.4f')}"
    if (speed := finite_number(row.get("perf/tokens_per_second"))) is not None:
        yield f"{quantity(speed)} tok/s"


def _training_parts(row: Row) -> Iterator[str]:
    if "train/learning_rate" in row:
        yield f"lr {_number(row['train/learning_rate'], '.2e')}"
    if "train/grad_norm" in row:
        yield f"grad {_number(row['train/grad_norm'], '.3g')}"
    if (memory := finite_number(row.get("perf/memory_bytes"))) is not None:
        yield f"mem {size_text(memory)}"
    if (mfu := finite_number(row.get("perf/mfu"))) is not None:
        yield f"mfu {mfu:.0%}"


def _expert_parts(row: Row) -> Iterator[str]:
    found = expert_summary(row)
    if "experts/load_max" in found:
        yield f"load {found['experts/load_max']:.2f}x"
    if "experts/dead" in found:
        yield f"dead {found['experts/dead']:.0f}"
    if "experts/entropy_mean" in found:
        yield f"entropy {found['experts/entropy_mean']:.2f}"


def _evaluation_parts(row: Row) -> Iterator[str]:
    labels = {
        "eval/loss": "eval loss",
        "eval/predicted_loss": "predicted",
        "eval/perplexity": "perplexity",
        "eval/bits_per_byte": "bits/byte",
    }
    for key, label in labels.items():
        if key in row:
            yield f"{label} {_number(row[key], '.2f' if key == 'eval/perplexity' else '.4f')}"


def source_parts(row: Row) -> Iterator[str]:
    """Name and evaluation loss of each source of a mixture."""
    for key, loss in row.items():
        if key.startswith("eval/source/") and key.endswith("/loss"):
            yield f"{key.split('/')[2]} {_number(loss, '.4f')}"


def _number(value: object, spec: str) -> str:
    known = finite_number(value)
    return "-" if known is None else format(known, spec)


INIT_SECONDS = 12.0
"""How long wandb may try to reach its server before the run is recorded offline instead."""
FINISH_SECONDS = 8.0
"""How long wandb may upload after the last row."""
CLOSE_SECONDS = 25.0
"""Upper bound on the time that the end of a run waits for wandb."""
STOP_SECONDS = 10.0
"""Upper bound when a signal ends the run: launchers kill after 30 seconds, and the save comes first."""

_logger = logging.getLogger("llm_pretrain.tracking")


class Trackers:
    """The trackers of one run.

    Args:
        config: The run's configuration. Its `logging` section selects the trackers, and wandb records it.
        run_folder: The run's folder; each tracker writes into a subfolder.
        wandb_id: Id of the wandb run to resume, None for a new one.
        enabled: True on one process only; other processes track nothing.
        first_step: The first step that will be logged.
        warn: Shows a warning; by default through `logging`.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        wandb_id: str | None,
        enabled: bool,
        *,
        first_step: int = 0,
        warn: Callable[[str], None] = _logger.warning,
    ):
        self.wandb_id = wandb_id
        self._wandb: _WandbThread | None = None
        self._tensorboard: _TensorBoard | None = None
        if enabled and config.logging.tensorboard:
            self._tensorboard = _TensorBoard(Path(run_folder), first_step, warn)
        if not enabled or _wandb_mode(config) == "disabled":
            return
        alphabet = string.ascii_lowercase + string.digits
        new_id = os.environ.get("WANDB_RUN_ID") or "".join(secrets.choice(alphabet) for _ in range(8))
        self.wandb_id = wandb_id or new_id
        try:
            # in this thread, since two threads can see packages with import cycles half initialised
            os.environ.setdefault("WANDB_SILENT", "true")
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry can delay the exit
            import wandb  # noqa: F401
        except Exception as error:
            warn(f"wandb is left out: {type_and_reason(error)}; logging.wandb_mode disabled silences this")
            return
        self._wandb = _WandbThread(config, Path(run_folder), self.wandb_id, warn)
        self._wandb.start()

    def log(self, row: Row) -> None:
        """Pass a row of metrics to the trackers and return at once; only finite numbers are tracked."""
        numbers = {
            key: value for key, value in row.items() if key != "time" and finite_number(value) is not None
        }
        if self._wandb is not None:
            self._wandb.put(numbers)
        if self._tensorboard is not None:
            self._tensorboard.log(numbers, row.get("time"))

    def close(self, exit_code: int = 0, *, hurried: bool = False) -> None:
        """Finish the trackers within `CLOSE_SECONDS`, or within `STOP_SECONDS` if `hurried`."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.close(exit_code, STOP_SECONDS if hurried else CLOSE_SECONDS)
            self._wandb = None


def _wandb_mode(config: Config) -> str:
    return config.logging.wandb_mode or os.environ.get("WANDB_MODE", "").lower() or "offline"


class _TensorBoard:
    """Writes metrics as TensorBoard scalars into `tensorboard/` in the run's folder, one file per attempt.

    TensorBoard drops what an earlier attempt wrote from `first_step` on.
    """

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]):
        self._warn = warn
        self._writer: Any = None
        with self._dropped_on_error():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step, flush_secs=10)

    def log(self, numbers: Mapping[str, float], when: float | None) -> None:
        """Add a row; `when` is in Unix seconds, by default now."""
        if self._writer is None:
            return
        with self._dropped_on_error():
            for key, value in numbers.items():
                if key != "step":
                    self._writer.add_scalar(key, value, int(numbers["step"]), walltime=when)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        with self._dropped_on_error():
            if writer is not None:
                writer.close()

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            self._warn(
                f"TensorBoard is left out from here on: {type_and_reason(error)}; metrics.jsonl goes on"
            )


class _WandbThread(threading.Thread):
    """Runs every call of wandb that can block: init, log of rows in the queue, finish with an exit code."""

    def __init__(self, config: Config, folder: Path, wandb_id: str, warn: Callable[[str], None]):
        super().__init__(name="wandb", daemon=True)
        self._config = config
        self._folder = folder
        self._id = wandb_id
        self._warn = warn
        self._failed = False
        self._exit_hooks: list[Callable[..., object]] = []
        self._queue: queue.SimpleQueue[dict[str, Any] | int] = queue.SimpleQueue()

    def put(self, item: dict[str, Any] | int) -> None:
        if not self._failed:
            self._queue.put(item)

    def close(self, exit_code: int, seconds: float) -> None:
        self.put(exit_code)
        self.join(seconds)
        if self.is_alive():
            self._give_up(f"it took more than {seconds:.0f} s to finish")

    def run(self) -> None:
        try:
            with _recorded_exit_hooks("wandb", self._exit_hooks):
                run = self._start()
            while isinstance(item := self._queue.get(), dict):
                run.log(item)
            run.finish(exit_code=item)
        except BaseException as error:  # training goes on without wandb whatever the error
            self._give_up(type_and_reason(error))

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            for hook in self._exit_hooks:  # a hook would wait for wandb's service, or print that it is gone
                atexit.unregister(hook)
            self._warn(f"wandb is left out from here on: {reason}; metrics.jsonl goes on")

    def _start(self) -> Any:
        mode = _wandb_mode(self._config)
        try:
            return self._init(mode)
        except Exception as error:
            if mode == "offline":
                raise
            self._warn(
                f"wandb is not reached: {type_and_reason(error)}; the run is recorded offline in "
                f"{self._folder / 'wandb'}, for `wandb sync` to send later"
            )
            import wandb

            wandb.teardown()  # its service still holds the id of the run that failed to start
            return self._init("offline")

    def _init(self, mode: str) -> Any:
        import wandb

        wanted = {
            "silent": True,
            "console": "off",
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            # record nothing of the user's machine but the configuration and the metrics
            "disable_git": True,
            "disable_code": True,
            "x_save_requirements": False,
        }
        known = wandb.Settings.model_fields  # not every version has every setting
        run: Any = wandb.init(
            mode=mode,  # pyright: ignore[reportArgumentType]  # the config allows only wandb's modes
            dir=str(self._folder),
            project=self._config.logging.wandb_project or os.environ.get("WANDB_PROJECT") or "llm_pretrain",
            name=os.environ.get("WANDB_NAME") or self._config.run.name,
            id=self._id,
            resume="allow",
            config=to_dict(self._config),
            settings=wandb.Settings(**{name: value for name, value in wanted.items() if name in known}),
        )
        with suppress(ImportError, AttributeError):  # of no public module
            # without them an import in the training's thread would raise if wandb's service is gone
            from wandb.sdk.lib.import_hooks import unregister_all_post_import_hooks

            unregister_all_post_import_hooks()
        # wandb drops rows whose own step decreases, as it does when a run resumes from a checkpoint
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


@contextmanager
def _recorded_exit_hooks(package: str, hooks: list[Callable[..., object]]) -> Iterator[None]:
    """A block that appends to `hooks` the functions that `package` registers with `atexit` meanwhile."""
    register = atexit.register

    def recording(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        if str(getattr(function, "__module__", "")).partition(".")[0] == package:
            hooks.append(function)
        return register(function, *arguments, **options)

    atexit.register = recording  # type: ignore[assignment]  # same arguments and result
    try:
        yield
    finally:
        atexit.register = register
