"""`llm-pretrain` with ladders of seconds: fewer and shorter runs, forked from this process unless told.

A launch takes five CPU seconds of imports, a fork none. `LAUNCH_RUNS` in the environment launches them as
users do.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from support.fork_server import PR_SET_PDEATHSIG

import train_pretrain
from llm_pretrain import __main__
from llm_pretrain.forecast import budget, family, ladder_training
from llm_pretrain.launch import jobs
from llm_pretrain.launch.jobs import Job, LaunchContext, RunningJob

budget.BRANCHES, budget.SMALLEST_BRANCHES = (2, 4), (2, 3, 4)
budget.SIZE_COUNTS = (3,)
budget.MIN_STEPS = 10
budget.MIN_TOKENS = 1
family.MIN_HEADS = 1
budget.MAX_EPOCHS = 1000.0
ladder_training.MEASURED_SECONDS = 1.0


class ForkedProcess:
    """What a `RunningJob` asks of its process; it dies with this one."""

    def __init__(self, job: Job):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _die_with_parent()
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                code = train_pretrain.main([*job.options, "--run.output_dir", str(job.folder)])
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkedJob(RunningJob):
    """A run of one process without its imports."""

    def __init__(self, job: Job, context: LaunchContext, gpus: Sequence[int] = ()):
        self.job, self.timed_out, self.done, self.started = job, False, False, time.monotonic()
        self._deadline = self.started + context.timeout_seconds
        self._workers = []
        self.process = ForkedProcess(job)  # type: ignore[assignment]  # what is used of Popen


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if "LAUNCH_RUNS" not in os.environ:
    jobs.RunningJob = ForkedJob  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(__main__.main())
