"""Weights & Biases, kept at arm's length: a thread of its own, bounded waits, a warning instead of an error.

Nothing here can stop or hold up training. metrics.jsonl has everything that is logged here, and more.
TensorBoard gets the same numbers under the same keys (`event_files.py`).
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import queue
import secrets
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_pretrain.config import Config, to_dict
from llm_pretrain.tracking.event_files import EventFiles

INIT_SECONDS = 12.0
"""How long wandb may look for its server before the run is recorded offline instead."""
FINISH_SECONDS = 8.0
"""How long wandb may upload after the last row."""
CLOSE_SECONDS = 25.0
"""How long the end of a run waits for wandb, whatever it does."""
STOP_SECONDS = 10.0
"""The same where a signal ends the run: launchers kill after 30 seconds, and the save comes first."""

_logger = logging.getLogger("llm_pretrain.tracking")


class Trackers:
    """The trackers of one run, on the one process where `enabled` is true.

    Args:
        config: The run's configuration; it is recorded, `logging` decides the mode.
        run_folder: The run's folder, in which each tracker makes its own.
        wandb_id: Identity of the wandb run to go on with, None for a new one.
        enabled: False on every process but one: nothing is tracked.
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
        self._worker: _WandbWorker | None = None
        self._event_files: EventFiles | None = None
        if enabled and config.logging.tensorboard:
            self._event_files = EventFiles(Path(run_folder), first_step, warn)
        if not enabled or config.logging.wandb_mode == "disabled":
            return
        alphabet = string.ascii_lowercase + string.digits
        self.wandb_id = wandb_id or "".join(secrets.choice(alphabet) for _ in range(8))
        try:
            # in this thread, since two threads that import packages with cycles can see them half made
            os.environ.setdefault("WANDB_SILENT", "true")
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry can hold up the exit
            import wandb  # noqa: F401
        except Exception as error:
            warn(f"wandb is left out: {_reason(error)}; logging.wandb_mode disabled silences this")
            return
        self._worker = _WandbWorker(config, Path(run_folder), self.wandb_id, warn)
        self._worker.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Hands a row of metrics over and returns at once; only finite numbers are tracked."""
        numbers = {key: value for key, value in row.items() if _is_number(value) and key != "time"}
        if self._worker is not None:
            self._worker.put(numbers)
        if self._event_files is not None:
            self._event_files.log(numbers, row.get("time"))

    def close(self, exit_code: int = 0, *, hurried: bool = False) -> None:
        """Lets the trackers finish, for `CLOSE_SECONDS` at most, `STOP_SECONDS` where `hurried`."""
        if self._event_files is not None:
            self._event_files.close()
            self._event_files = None
        if self._worker is not None:
            self._worker.close(exit_code, STOP_SECONDS if hurried else CLOSE_SECONDS)
            self._worker = None


@dataclasses.dataclass(frozen=True)
class _Finish:
    exit_code: int


class _WandbWorker(threading.Thread):
    """Does everything that wandb could block: start, log, finish."""

    def __init__(self, config: Config, folder: Path, wandb_id: str, warn: Callable[[str], None]):
        super().__init__(name="wandb", daemon=True)
        self._config = config
        self._folder = folder
        self._id = wandb_id
        self._warn = warn
        self._failed = False
        self._exit_hooks: list[Callable[..., object]] = []
        self._queue: queue.SimpleQueue[dict[str, Any] | _Finish] = queue.SimpleQueue()

    def put(self, item: dict[str, Any] | _Finish) -> None:
        if not self._failed:
            self._queue.put(item)

    def close(self, exit_code: int, seconds: float) -> None:
        self.put(_Finish(exit_code))
        self.join(seconds)
        if self.is_alive():
            self._give_up(f"it took more than {seconds:.0f} s to finish")

    def run(self) -> None:
        try:
            run = self._start()
            while isinstance(item := self._queue.get(), dict):
                run.log(item)
            run.finish(exit_code=item.exit_code)
        except BaseException as error:  # whatever it is, training goes on without wandb
            self._give_up(_reason(error))

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            for hook in self._exit_hooks:  # they would wait for its service, or complain that it is gone
                atexit.unregister(hook)
            self._warn(f"wandb is left out from here on: {reason}; metrics.jsonl goes on")

    def _start(self) -> Any:
        mode = self._config.logging.wandb_mode
        with _noting_exit_hooks("wandb", self._exit_hooks):
            return self._start_as(mode)

    def _start_as(self, mode: str) -> Any:
        try:
            return self._init(mode)
        except Exception as error:
            if mode == "offline":
                raise
            self._warn(
                f"wandb is not reached: {_reason(error)}; the run is recorded offline in "
                f"{self._folder / 'wandb'}, for `wandb sync` to send later"
            )
            import wandb

            wandb.teardown()  # its service still holds the id for the run that failed to start
            return self._init("offline")

    def _init(self, mode: str) -> Any:
        import wandb

        wishes = {
            "silent": True,
            "console": "off",
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            # nothing of the user's machine but the configuration and the metrics
            "disable_git": True,
            "disable_code": True,
            "x_save_requirements": False,
        }
        known = wandb.Settings.model_fields  # not every version has every setting
        run: Any = wandb.init(
            mode=mode,  # pyright: ignore[reportArgumentType]  # one of the words that it takes
            dir=str(self._folder),
            project=self._config.logging.wandb_project,
            name=self._config.run.name,
            id=self._id,
            resume="allow",
            config=to_dict(self._config),
            settings=wandb.Settings(**{name: value for name, value in wishes.items() if name in known}),
        )
        # wandb drops rows whose own step goes back, as it does when a run is resumed from a checkpoint
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


@contextmanager
def _noting_exit_hooks(package: str, hooks: list[Callable[..., object]]) -> Iterator[None]:
    """Add to `hooks` what a package's code registers to run at exit; those of others pass unnoticed."""
    register = atexit.register

    def noting(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        if str(getattr(function, "__module__", "")).partition(".")[0] == package:
            hooks.append(function)
        return register(function, *arguments, **options)

    atexit.register = noting  # type: ignore[assignment]  # ours takes the same
    try:
        yield
    finally:
        atexit.register = register


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reason(error: BaseException) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
