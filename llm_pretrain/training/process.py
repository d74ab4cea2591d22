"""What a training process does before any arithmetic, and how it reports its end.

Threads, determinism, dying with its launcher, and the checks of what the launcher left in the environment
and of how many processes really run. No collective is called here.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from llm_pretrain.config import Config, YamlError, read_yaml_file
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError, ResourceError, StuckError
from llm_pretrain.training.orphans import check_launcher_lives
from llm_pretrain.training.out_of_memory import out_of_memory_in_words
from llm_pretrain.training.peers import lost_contact
from llm_pretrain.training.signals import ignore_stop_signals

INTERRUPTED = 130
"""Exit code of a Ctrl-C before the run began; afterwards it saves and leaves with 75."""
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Names of glibc's `mallopt` options, as malloc.h numbers them."""
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_trained: tuple[int, int] | None = None
"""Process number and threads of the training that this process, or the one it is a fork of, did before."""


def prepare_process(config: Config) -> None:
    """Set what must be the same in every process of either launcher, before any arithmetic.

    Raises:
        ConfigError: the launcher's variables are not whole, or a fork inherited threads that are gone.
        ResourceError: the launcher has died meanwhile.
    """
    check_environment()
    die_with_launcher()
    check_launcher_lives()
    # Accelerate's DDP options know the old name only, and both paths must set the same.
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated", category=FutureWarning)
    keep_freed_memory()
    _set_threads(cpu_threads(config))
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def check_environment() -> None:
    """Stop when only some of a launcher's variables are set, as when they are set by hand.

    Half of them would train one process that was meant to be one of many, or wait for nobody.

    Raises:
        ConfigError: naming the variables that are missing or no number.
    """
    if not any(os.environ.get(name) for name in _PLACE):
        return
    missing = [name for name in (*_PLACE, *_MEETING) if not os.environ.get(name)]
    if missing:
        found = ", ".join(f"{name}={os.environ[name]}" for name in _PLACE if os.environ.get(name))
        raise ConfigError(
            f"launch: expected {', '.join(_PLACE)}, {', '.join(_MEETING)} together in the environment, found "
            f"{found} without {', '.join(missing)}; set or unset all of them"
        )
    for name in ("RANK", "LOCAL_RANK"):
        value = os.environ[name]
        if not value.isdecimal() or int(value) >= int(os.environ["WORLD_SIZE"]):
            raise ConfigError(
                f"{name}: expected 0 to WORLD_SIZE - 1 ({int(os.environ['WORLD_SIZE']) - 1}) in the "
                f"environment, found {value!r}"
            )


def _set_threads(threads: int) -> None:
    """Set the number of threads, so that it stays."""
    global _trained
    if _trained is not None and _trained[0] != os.getpid() and min(threads, _trained[1]) > 1:
        raise ConfigError(
            f"launch: this process is a fork of one that trained with {_trained[1]} threads before, which "
            f"its own {threads} would wait for; restart the notebook's kernel, or set "
            "distributed.cpu_threads to 1"
        )
    torch.set_num_threads(threads)
    # where no launcher has set it, Accelerate counts cores by itself and sets another number of threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    _trained = os.getpid(), threads


def cpu_threads(config: Config) -> int:
    """Threads of this process: as configured, or cores / processes on this machine.

    torchrun and accelerate set different defaults, and another number of threads sums in another order.
    """
    if config.distributed.cpu_threads:
        return config.distributed.cpu_threads
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // local_world_size)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks instead of returning them to the system.

    By default every large tensor is mapped anew, and touching its pages again costs 6 to 8 % of a small
    mixture-of-experts step on a CPU. Elsewhere than on glibc nothing happens.
    """
    if not torch.cuda.is_available() and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def die_with_launcher() -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that no worker is orphaned.

    A process started from a shell is left alone: it may outlive its shell on purpose.
    """
    if sys.platform != "linux" or not (os.environ.get("TORCHELASTIC_RUN_ID") or _launcher_arguments()):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def check_world_size(world_size: int) -> None:
    """Stop when the process group is not as large as the launcher was asked to make it.

    `accelerate launch --cpu --num_processes 2` starts one process without a word, and a process group of
    one in each torchrun worker would train W unconnected models.

    Raises:
        ConfigError: naming both numbers and a command that works.
    """
    asked = max(int(os.environ.get("WORLD_SIZE") or 1), _requested_processes() or 1)
    if asked != world_size:
        raise ConfigError(
            f"launch: {asked} processes were asked for, {world_size} joined the process group; on CPU use "
            "`accelerate launch --config_file configs/accelerate/cpu2.yaml train_pretrain_accelerate.py ...` "
            "or `torchrun --nproc_per_node N train_pretrain.py ...`"
        )


def _launcher_arguments() -> list[str]:
    """Command line of the parent process after `accelerate launch`; empty when it is something else."""
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
    except psutil.Error:
        return []
    for index, word in enumerate(command):
        if word == "launch" and "accelerate" in " ".join(command[:index]):
            return command[index + 1 :]
        if word.endswith(("accelerate-launch", "accelerate.commands.launch")):
            return command[index + 1 :]
    return []


def default_accelerate_file() -> Path:
    """Where `accelerate launch` looks without `--config_file`: below HF_HOME, or the cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def _requested_processes() -> int | None:
    """`--num_processes` of the `accelerate launch` above us, or its file's; None where neither says it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--config_file", "--config-file")
    arguments = _launcher_arguments()
    script = next((i for i, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    known, _ = parser.parse_known_args(arguments[:script])
    if known.num_processes is not None or not arguments:
        return known.num_processes
    try:
        settings = read_yaml_file(known.config_file or default_accelerate_file())
    except (OSError, ValueError, YamlError):
        return None
    count = settings.get("num_processes") if isinstance(settings, dict) else None
    return count if isinstance(count, int) else None


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors into one message and the process's exit code.

    Errors of the user's making print one line (`PretrainError`), once for all ranks where all ranks raise
    the same; anything else is a bug of ours and prints its traceback.
    """
    number = os.environ.get("RANK", "")
    rank = int(number) if number.isdecimal() else 0
    try:
        with out_of_memory_in_words():
            yield
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except PretrainError as error:
        _exit(lost_contact(error, rank) or error, rank)
    except OSError as error:
        _exit(CheckpointError(f"{error.filename or 'input/output'}: {error.strerror or error}"), rank)
    except Exception as error:
        lost = lost_contact(error, rank)
        is_met = torch.distributed.is_initialized()
        if not is_met and (lost or isinstance(error, torch.distributed.DistError)):
            _exit(ResourceError(_no_meeting(error)), rank)
        if lost:
            _exit(lost, rank)
        if not _has_peers():
            raise
        traceback.print_exc()
        _leave(1)


def end_script(exit_code: int) -> None:
    """End a script's own process with this code, at once where it was one of several.

    A back-end's threads may outlive the process group (gloo's do under FSDP and DeepSpeed), and one of them
    still at work when Python takes its libraries down aborts a run that has finished.
    """
    ignore_stop_signals()  # one more would replace the exit code
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        os._exit(exit_code)
    sys.exit(exit_code)


def _exit(error: PretrainError, rank: int) -> None:
    if rank == 0 or not error.shared:
        where = f"rank {rank}: " if rank and not isinstance(error, StuckError) else ""
        for line in str(error).splitlines():
            print(f"error: {where}{line}", file=sys.stderr)
    _leave(error.exit_code)


def _no_meeting(error: Exception) -> str:
    """One line for a process group that did not come about."""
    meeting = ":".join(os.environ.get(name, "?") for name in _MEETING)
    return (
        f"launch: {str(error).splitlines()[0]:.200} (rank {os.environ.get('RANK', '?')} of "
        f"{os.environ.get('WORLD_SIZE', '?')}, meeting at {meeting}); start every rank, with one "
        "address and a free port for all"
    )


def _has_peers() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _leave(exit_code: int) -> None:
    """Exit; at once where other ranks are in the process group, whose clean-up would wait for them.

    A process alone may be a notebook's kernel, which must live on: `SystemExit` ends a cell, not a kernel.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _has_peers():
        os._exit(exit_code)
    sys.exit(exit_code)
