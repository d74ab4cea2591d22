"""`llm-pretrain train`: starts one of the two training scripts through its launcher."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

from llm_pretrain.config.loading import load_config
from llm_pretrain.errors import ConfigError
from llm_pretrain.hardware import gpu_count
from llm_pretrain.launch.jobs import PACKAGE_ROOT, RESUMABLE_PATHS, SCRIPTS, launch_settings

EXAMPLES = """\
examples:
  llm-pretrain train --config quickstart
  llm-pretrain train --nproc 2 --config quickstart --training.max_steps 1000
  llm-pretrain train --launcher accelerate --nproc 2 --config mine.yaml --run.name mine-accelerate
  llm-pretrain train --config quickstart --print_config
"""

_LAUNCHER = (sys.executable, "-P", str(PACKAGE_ROOT / "llm_pretrain" / "launch" / "launcher.py"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; all others are the script's."""
    parser.usage = "%(prog)s [--launcher L] [--nproc N] [--config FILE ...]\n  [--section.field VALUE ...]"
    parser.description = (
        "Starts train_pretrain.py or train_pretrain_accelerate.py, which take all other options; "
        "--print_config\nshows and explains them. On several machines start the launcher itself "
        "(docs/launching.md)."
    )
    parser.allow_abbrev = False  # a script's option may begin like one of these
    parser.set_defaults(script_options=[])
    parser.add_argument(
        "--launcher", choices=RESUMABLE_PATHS, default="torchrun", help="default: %(default)s"
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes (default: one per GPU, else 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the launcher, which gets all signals; its ranks' exit code is the command's."""
    from llm_pretrain.data.loader import open_stores
    from llm_pretrain.launch.process import default_threads

    gpus = gpu_count()
    nproc = (gpus or 1) if arguments.nproc is None else arguments.nproc
    if nproc < 1:
        raise ConfigError(f"--nproc: expected 1 or more, found {nproc}")
    config = load_config(arguments.script_options, prog="llm-pretrain train", world_size=nproc)
    open_stores(config)  # before the launch, since launchers add a traceback to a rank's error
    script = PACKAGE_ROOT / SCRIPTS[arguments.launcher]
    if not script.is_file():
        raise ConfigError(f"--launcher {arguments.launcher}: expected its script at {script}, found none")
    if arguments.launcher == "accelerate":
        # The file is deleted at once, but stays readable as /dev/fd/N until the launcher ends.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            distributed = config.distributed
            settings = launch_settings(distributed.strategy, distributed.zero_stage, nproc, on_gpu=gpus > 0)
            file.write(json.dumps(settings))  # JSON is YAML too
            file.flush()
            descriptor = os.dup(file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.set_inheritable(descriptor, True)
        command = [*_LAUNCHER, "accelerate.commands.launch", "--config_file", f"/dev/fd/{descriptor}"]
        command += ["--num_processes", str(nproc), "--main_process_port", "0"]  # 0: any free port
    elif nproc > 1:
        command = [*_LAUNCHER, "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    else:  # a single process needs no launcher, and its exit code becomes the command's
        command = [sys.executable]
    command += [str(script), *arguments.script_options]
    # the number that ranks choose by default; torchrun prints a warning if the variable is unset
    os.environ.setdefault("OMP_NUM_THREADS", str(default_threads(nproc)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read at a process's start, so ranks cannot set it
    sys.stdout.flush()
    os.execv(sys.executable, command)
