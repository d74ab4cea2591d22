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
"""What `accelerate launch` of one process sets; a daemon of whoever sets both by hand would be stopped."""
_ADOPTERS = ("systemd", "slurmstepd", "tini", "dumb-init", "docker-init", "catatonit", "conmon")
"""Who, besides process 1, takes in processes whose parent has died. Another parent is no reason to stop."""


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
    """Whether this process has a launcher's variables, and one who adopts orphans for a parent.

    Process 1 may be the launcher itself, in a container: a Python program. Or it may have been started by
    one, as a wrapper of this process: then it has the launcher's variables, too.
    """
    elastic = _ELASTIC in os.environ
    if not elastic and not all(name in os.environ for name in _ACCELERATE):
        return False
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is None:  # outside of this container: not for us to judge
            return False
        words = parent.cmdline()
        program = os.path.basename(words[0]).split(":")[0] if words else ""  # slurmstepd: [12.0]
        if "python" in program or (os.getppid() != 1 and program not in _ADOPTERS):
            return False
        with suppress(psutil.AccessDenied):  # another user's cannot be a wrapper of ours
            return not (elastic and _ELASTIC in parent.environ())
        return True
    return False
