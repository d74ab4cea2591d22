"""`llm-pretrain parity` whose ranks are forked (`support.fork_server`): the scripts' `main`, without imports.

`PYTHONPATH=.:tests python -m support.forked_parity OPTIONS` takes the options of `llm-pretrain parity`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.fork_server import fork_server, remove_shared
from support.launching import launch

from llm_pretrain.__main__ import main
from llm_pretrain.audit import parity
from llm_pretrain.launch.jobs import Job, LaunchContext, launch_settings


def run_forked(
    jobs: Sequence[Job],
    context: LaunchContext,
    *,
    on_start: Callable[[Job], object] = lambda job: None,
    on_end: Any = lambda started, code: None,
    before: Sequence[tuple[str, list[Any]]] = (),
) -> None:
    """As `run_until`, one job after another; `before` as in `launch`."""
    for job in jobs:
        on_start(job)
        started = time.monotonic()
        file = job.log.with_suffix(".accelerate.yaml")
        settings = launch_settings(job.strategy, context.zero_stage, job.world_size, on_gpu=False)
        file.write_text(json.dumps(settings))
        options = {"accelerate_file": file, "before": before}
        done = launch(job.path, job.world_size, job.folder, job.options, exit_code=None, **options)
        job.log.write_text(done.output)
        on_end(SimpleNamespace(job=job, seconds=time.monotonic() - started, timed_out=False), done.exit_code)


def run_parity(options: Sequence[str], before: Sequence[tuple[str, list[Any]]] = ()) -> int:
    """Exit code of `llm-pretrain parity`; `before` is called in every rank, to inject a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "run_until", partial(run_forked, before=before))
        return main(["parity", *options])


if __name__ == "__main__":
    fork_server()
    try:
        sys.exit(run_parity(sys.argv[1:]))
    finally:
        remove_shared()
