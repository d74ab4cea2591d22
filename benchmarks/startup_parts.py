"""One training step that says where its start-up went: `python -m benchmarks.startup_parts OPTIONS`.

Run by the benchmark `startup`. It imports nothing that the training script does not, and prints CPU seconds
per part, the clock's seconds after the imports and the data's memory as a line of JSON, last of all. No
benchmark by itself.
"""

from __future__ import annotations

import time

_interpreter = time.process_time()

import functools  # noqa: E402  # the clock starts before them
import json  # noqa: E402
from collections import defaultdict  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class Parts:
    """CPU seconds by the part of the start-up."""

    def __init__(self, interpreter: float):
        self.seconds: dict[str, float] = defaultdict(float, interpreter=interpreter)

    def watch(self, part: str, owner: Any, *names: str) -> None:
        """Count what calls of `owner.name` take from now on; they must not nest."""
        for name in names:
            setattr(owner, name, self._watched(part, getattr(owner, name)))

    def _watched(self, part: str, function: Any) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.process_time() - before

        return watched


class Memory:
    """By how many bytes the process's memory, what it maps included, grew at most in a function's calls.

    Linux counts the peak of the process, so that a call is seen whose peak is above what was there before.
    """

    def __init__(self) -> None:
        self.peak = 0

    def watch(self, owner: Any, name: str) -> None:
        """Look at calls of `owner.name` from now on."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with suppress(OSError):  # the peak so far is forgotten, where the system allows it
                Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            try:
                return function(*args, **kwargs)
            finally:
                self.peak = max(self.peak, _status("VmHWM") - before)

        setattr(owner, name, watched)


def _status(name: str) -> int:
    """Bytes of an entry of /proc/self/status; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    """Trains as the command line says; prints the parts."""
    parts = Parts(_interpreter)
    before = time.process_time()
    import torch  # noqa: F401  # timed alone

    parts.seconds["import torch"] = time.process_time() - before
    before = time.process_time()
    import train_pretrain
    from llm_pretrain.training import decision, trainer

    parts.seconds["other imports"] = time.process_time() - before
    imported = time.perf_counter()
    memory = Memory()
    memory.watch(trainer, "global_batches")
    parts.watch("config", train_pretrain, "load_config")
    parts.watch("data", trainer, "open_stores", "global_batches")
    parts.watch("model", trainer, "build_model", "initialize_weights")
    parts.watch("optimizer", trainer, "build_optimizer")
    parts.watch("first step", trainer.Trainer, "_step", "_evaluate_and_write")

    after: dict[str, float] = {}

    def step_is_over(own: decision.Decision, step: int) -> None:
        if "the rest" not in parts.seconds:
            parts.seconds["the rest"] = time.process_time() - sum(parts.seconds.values())
            after.update(after_imports=time.perf_counter() - imported, data_memory=memory.peak)
        check_divergence(own, step)

    check_divergence = decision.Decision.check_divergence
    decision.Decision.check_divergence = step_is_over  # type: ignore[method-assign]  # what follows a step
    exit_code = train_pretrain.main()
    print(json.dumps({"cpu": parts.seconds, **after}))
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
