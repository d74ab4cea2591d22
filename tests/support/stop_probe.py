"""A script for launchers: a process that waits for a stop signal, with and without a mistake put in.

Run as `LAUNCHER stop_probe.py FOLDER VARIANT...`; FOLDER holds config.yaml. Rank r takes the r-th variant. It
leaves its process id in FOLDER/VARIANT.pid, and the signal that stopped it in FOLDER/VARIANT.signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import llm_pretrain.launch.process as process
from llm_pretrain.config.loading import load_config

VARIANTS: dict[str, tuple[str, Any] | None] = {
    "ours": None,
    "not told of the launcher's death": ("die_with_launcher", lambda: None),
    "no SIGUSR1": ("STOP_SIGNALS", (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)),
}
"""name: what of `distributed.process` is replaced."""


def main(folder: Path, variants: list[str]) -> int:
    variant = variants[int(os.environ.get("RANK", "0"))]
    config = load_config(["--config", str(folder / "config.yaml")])
    with pytest.MonkeyPatch.context() as patch:
        if mistake := VARIANTS[variant]:
            patch.setattr(process, *mistake)
        process.prepare_process(config)
        with process.SignalHandler() as stop:
            ready = folder / f"{variant}.pid"
            ready.with_suffix(".starting").write_text(str(os.getpid()))
            ready.with_suffix(".starting").rename(ready)
            end = time.monotonic() + 600
            while not stop.requested and time.monotonic() < end:
                time.sleep(0.02)
    (folder / f"{variant}.signal").write_text(stop.signal.name if stop.signal else "none")
    return 75


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
