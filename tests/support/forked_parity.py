"""`llm-pretrain parity` whose ranks are forked (`support.fork_server`): the scripts' `main`, without imports.

`PYTHONPATH=.:tests python -m support.forked_parity OPTIONS` takes the options of `llm-pretrain parity`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fork_server import fork_server, remove_shared
from support.launching import launch

from llm_pretrain.__main__ import main
from llm_pretrain.commands import parity
from llm_pretrain.commands._launching import Job, LaunchContext, launch_settings


def run_forked(
    jobs: Sequence[Job], context: LaunchContext, *, on_start: Callable[[Job], None], on_end: Any
) -> None:
    """As `run_concurrently`, one job after another."""
    for job in jobs:
        on_start(job)
        started = time.monotonic()
        file = job.log.with_suffix(".accelerate.yaml")
        settings = launch_settings(job.strategy, context.zero_stage, job.world_size, on_gpu=False)
        file.write_text(json.dumps(settings))
        done = launch(
            job.path, job.world_size, job.folder, job.options, exit_code=None, accelerate_file=file
        )  # fmt: skip
        job.log.write_text(done.output)
        on_end(SimpleNamespace(job=job, seconds=time.monotonic() - started, timed_out=False), done.exit_code)


def run_parity(options: Sequence[str]) -> int:
    """Exit code of `llm-pretrain parity`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "run_concurrently", run_forked)
        return main(["parity", *options])


if __name__ == "__main__":
    fork_server()
    try:
        sys.exit(run_parity(sys.argv[1:]))
    finally:
        remove_shared()
