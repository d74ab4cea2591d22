"""A script for launchers: a process that waits for a stop signal, with and without a mistake put in.

Run as `LAUNCHER stop_probe.py FOLDER VARIANT...`; FOLDER holds config.yaml. Rank r takes the r-th variant. It
leaves its process id in FOLDER/VARIANT.pid, and the signal that stopped it in FOLDER/VARIANT.signal.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from support.mutation import Edit, mutated

import llm_pretrain.training.process as process
import llm_pretrain.training.signals as signals
from llm_pretrain.config import load_config

PROCESS, SIGNALS = "llm_pretrain/training/process.py", "llm_pretrain/training/signals.py"
VARIANTS = {
    "ours": [],
    "not told of the launcher's death": [Edit(PROCESS, "    die_with_launcher()\n", "")],
    "no SIGUSR1": [Edit(SIGNALS, "signal.SIGINT, signal.SIGUSR1)", "signal.SIGINT)")],
}


def main(folder: Path, variants: list[str]) -> int:
    variant = variants[int(os.environ.get("RANK", "0"))]
    config = load_config(["--config", str(folder / "config.yaml")])
    with mutated(*VARIANTS[variant]):
        process.prepare_process(config)
        with signals.StopRequest() as stop:
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
