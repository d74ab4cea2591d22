"""Whether the launcher that started this process is gone, and another process has adopted it.

For the time before the process could ask Linux to be told of it: importing takes seconds.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import psutil

from llm_pretrain.errors import ResourceError

_ELASTIC = "TORCHELASTIC_RUN_ID"
"""torchrun's, and that of `accelerate launch` with several processes, to its workers alone."""
_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")
"""What `accelerate launch` of one process sets; who sets both by hand has its processes adopted by nobody."""


def check_launcher_lives() -> None:
    """Stop a worker whose launcher died while the worker was starting.

    It would wait for a meeting that never comes, or, alone, train on with nobody to end it.

    Raises:
        ResourceError: the launcher is gone.
    """
    if sys.platform == "linux" and is_orphan():
        error = ResourceError(
            f"launch: expected the launcher that started this process, found process {os.getppid()} in its "
            "place; the launcher was killed, start it again"
        )
        error.shared = True
        raise error


def is_orphan() -> bool:
    """Whether this process has a launcher's variables, and a parent that is neither one nor started by one.

    Launchers are Python programs. Another parent is a wrapper, which has the launcher's variables too, or
    it is `init`, or another process that adopts orphans, and has them not.
    """
    elastic = _ELASTIC in os.environ
    if not elastic and not (all(name in os.environ for name in _ACCELERATE) and os.getppid() == 1):
        return False
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is None:  # outside of this container: not for us to judge
            return False
        words = parent.cmdline()
        if words and "python" in os.path.basename(words[0]):
            return False
        with suppress(psutil.AccessDenied):  # another user's cannot be a wrapper of ours
            return not (elastic and _ELASTIC in parent.environ())
        return True
    return False
