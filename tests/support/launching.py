"""Starts the two scripts as users do, and reads what they wrote. Judge a run by its files, not its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from support.fork_server import (
    ROOT,
    RUN_FOLDER,
    SCRIPTS,
    Forked,
    Request,
    fork_server,
    own_environment,
    python_path,
)

import train_pretrain
from llm_pretrain.checkpoints.manifest import read_manifest
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.runs.rows import read_metrics

TORCHRUN_SCRIPT = ROOT / "train_pretrain.py"
ACCELERATE_SCRIPT = ROOT / "train_pretrain_accelerate.py"
TIMEOUT_SECONDS = 300
"""For one launch on a slow day."""

NO_REPORT = ("--logging.report", "false")
"""Before a launch's own options, which win: a report is 5 MB."""

EXACT_KEYS = ("train/loss", "train/aux_loss", "train/z_loss", "train/router_z_loss", "train/grad_norm")
EXACT_KEYS += ("train/learning_rate", "train/loss_tokens", "train/tokens", "train/skipped", "train/spike")
EXACT_KEYS += ("train/loss_scale", "data/batch_sha256", "moe/load", "eval/loss", "eval/bits_per_byte")
EXACT_KEYS += ("eval/predicted_loss", "eval/predicted_low", "eval/predicted_high")

CPU_FILE = ROOT / "configs" / "accelerate" / "cpu2.yaml"
"""What launches two processes of Accelerate without a GPU."""


def launch_command(
    launcher: str, world_size: int, *, gpu: bool = False, accelerate_file: Path = CPU_FILE
) -> list[str]:
    """Command up to the script's options: torchrun or accelerate, with `world_size` processes."""
    if launcher == "torchrun":
        if world_size == 1:
            return [sys.executable, str(TORCHRUN_SCRIPT)]
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        return [*run, str(world_size), str(TORCHRUN_SCRIPT)]
    run = [sys.executable, "-m", "accelerate.commands.launch"]
    if world_size == 1:
        return [*run, *([] if gpu else ["--cpu"]), "--num_processes", "1", str(ACCELERATE_SCRIPT)]
    file = ["--config_file", str(accelerate_file), "--main_process_port", "0"]
    return [*run, *file, "--num_processes", str(world_size), str(ACCELERATE_SCRIPT)]


def environment(*, gpu: bool = False) -> dict[str, str]:
    """The test process's environment, without what a launcher would take for its own."""
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return own_environment() | hidden | {"PYTHONPATH": python_path(ROOT), "PYTHONWARNINGS": "ignore"}


@dataclass
class Finished:
    """A launch that ended: exit code, what it printed, and its run folder."""

    exit_code: int
    output: str
    folder: Path

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    @property
    def rows(self) -> dict[int, dict]:
        """Rows of metrics.jsonl by step, the later attempt's where a step stands twice."""
        return {row["step"]: row for row in read_metrics(self.folder / "metrics.jsonl")}

    @property
    def attempts(self) -> list[dict]:
        """Rows of attempts.jsonl: one per start."""
        return [json.loads(line) for line in (self.folder / "attempts.jsonl").read_text().splitlines()]

    def raw_steps(self) -> list[int]:
        """Steps in the order in which rows were appended, over all attempts."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def exact_rows(self) -> dict[int, dict]:
        """What must be equal between launchers and after a resume; leaves out speed and memory."""
        return {
            step: {key: value for key, value in row.items() if key in EXACT_KEYS or "/source/" in key}
            for step, row in self.rows.items()
        }


def start_command(
    command: Sequence[str],
    folder: Path,
    options: Sequence[str],
    *,
    gpu: bool = False,
    variables: Mapping[str, str] | None = None,
    preexec: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Start a script by its command up to its options, in a session of its own."""
    return subprocess.Popen(
        [*command, *NO_REPORT, "--run.output_dir", str(folder), *options],
        cwd=ROOT,
        env=environment(gpu=gpu) | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=preexec,  # noqa: PLW1509 (no thread runs beside the tests)
    )


def start(
    launcher: str,
    world_size: int,
    folder: Path,
    options: Sequence[str],
    *,
    gpu: bool = False,
    accelerate_file: Path = CPU_FILE,
    variables: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a script; `prefix` is a command that starts the launcher."""
    command = launch_command(launcher, world_size, gpu=gpu, accelerate_file=accelerate_file)
    return start_command([*prefix, *command], folder, options, gpu=gpu, variables=variables)


def kill_outright(process: subprocess.Popen[str]) -> None:
    """`kill -9` of the launcher and all that it started, at once.

    torchrun gives every worker a session of its own: a signal to the launcher's process group does not
    reach them, and they would take their time to save.
    """
    launcher = psutil.Process(process.pid)
    for member in [*launcher.children(recursive=True), launcher]:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def finish(process: subprocess.Popen[str], folder: Path, timeout: float = TIMEOUT_SECONDS) -> Finished:
    """Wait for a started script; end all of its processes if it hangs."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_outright(process)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout} s; it printed:\n{output[-4000:]}") from None
    return Finished(process.returncode, output, folder)


def launch(
    launcher: str,
    world_size: int,
    folder: Path,
    options: Sequence[str],
    *,
    exit_code: int | None = 0,
    gpu: bool = False,
    accelerate_file: Path = CPU_FILE,
    variables: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    real: bool = False,
    before: Sequence[tuple[str, list[Any]]] = (),
) -> Finished:
    """Run a script to its end and check its exit code (None: any).

    The ranks are forked (`support.fork_server`) unless a `real` launcher, a GPU or a prefix is asked for.
    `before` is called in every rank before the script's `main`, to inject a fault.
    """
    if real or gpu or prefix:
        assert not before
        how: dict[str, Any] = {"gpu": gpu, "accelerate_file": accelerate_file, "prefix": prefix}
        process = start(launcher, world_size, folder, options, variables=variables, **how)
        finished = finish(process, folder)
    else:
        how = {"accelerate_file": accelerate_file, "variables": variables, "before": before}
        finished = ForkedLaunch(launcher, world_size, folder, options, **how).finish()
    if exit_code is not None:
        assert finished.exit_code == exit_code, f"exit code {finished.exit_code}:\n{finished.output[-6000:]}"
    return finished


def script_request(
    launcher: str,
    world_size: int,
    folder: Path,
    options: Sequence[str],
    /,  # a request has a `folder` too
    *,
    accelerate_file: Path = CPU_FILE,
    **more: Any,
) -> Request:
    """A launcher's script on forked ranks; `more` are fields of `Request`."""
    # the launcher's own options stand between its name and the script
    own = launch_command(launcher, world_size, accelerate_file=accelerate_file)[3:-1]
    argv = [*NO_REPORT, "--run.output_dir", str(folder), *options]
    fields = {"launcher": launcher, "launcher_options": own if launcher == "accelerate" else []}
    target = "support.fork_server:run_script"
    return Request(target, [SCRIPTS[launcher], argv], world_size, **fields | more)


class ForkedLaunch:
    """A script started on forked ranks; `launch` waits for its end, tests of faults act on it before."""

    def __init__(
        self,
        launcher: str,
        world_size: int,
        folder: Path,
        options: Sequence[str],
        *,
        accelerate_file: Path = CPU_FILE,
        variables: Mapping[str, str] | None = None,
        before: Sequence[tuple[str, list[Any]]] = (),
    ):
        self.launcher, self.folder = launcher, folder
        self._output = Path(os.environ[RUN_FOLDER]) / f"output-{uuid.uuid4().hex}"
        self._output.touch()
        more = {"variables": dict(variables or {}), "before": list(before), "output": str(self._output)}
        request = script_request(
            launcher, world_size, folder, options, accelerate_file=accelerate_file, **more
        )
        self.ranks: Forked = fork_server().start(request)

    @property
    def output(self) -> str:
        """What the ranks have printed so far."""
        return self._output.read_text(errors="replace")

    def poll(self) -> list[int] | None:
        """The ranks' exit codes, or None while one still runs."""
        return self.ranks.poll()

    def finish(self) -> Finished:
        """Wait for the end; the exit code is what the launcher would leave with."""
        try:
            codes = self.ranks.wait(TIMEOUT_SECONDS)
        except TimeoutError:
            raise AssertionError(f"no end in time; it printed:\n{self.output[-4000:]}") from None
        is_script = self.launcher == "torchrun" and len(codes) == 1
        output = self.output
        self._output.unlink()
        return Finished(codes[0] if is_script else int(any(codes)), output, self.folder)


def train(*arguments: str) -> int:
    """Run the torchrun script's `main` in this process (no report unless asked); returns its exit code."""
    try:
        return train_pretrain.main([*NO_REPORT, *arguments])
    except SystemExit as exit_:
        return int(exit_.code or 0)


def run_options(
    preset: str, store: Path | str, settings: str = "", *more: str, folder: Path | str | None = None
) -> list[str]:
    """The command line of a small run in fp32 on one thread, into `folder` unless the launch names one.

    `settings` are pairs such as "training.max_steps=6 checkpoint.save_steps=2". `more` comes last, and wins.
    """
    return [
        *("--config", str(ROOT / "configs" / f"{preset}.yaml"), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.precision", "fp32", "--distributed.cpu_threads", "1"),
        *(["--run.output_dir", str(folder)] if folder else []),
        *(f"--{pair}" for pair in settings.split()),
        *more,
    ]


def tiny_options(store: Path, folder: Path) -> list[str]:
    """Of a run of the tiny mixture of experts, with two micro batches a step."""
    return run_options("tiny-moe", store, "training.global_batch_size=8", folder=folder)


def train_tiny(store: Path, folder: Path, *arguments: str) -> Finished:
    """A finished run of `tiny_options`, trained in this process."""
    code = train(*tiny_options(store, folder), *arguments)
    assert code == 0
    return Finished(code, "", folder)


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a full-precision checkpoint, whole, over all of its files."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    content = read_manifest(path)
    tensors = {
        name: torch.empty(facts["shape"], dtype=getattr(torch, facts["dtype"]))
        for name, facts in content.tensors.items()
    }
    assert tensors, f"no tensors in {path}"
    read_tensors(tensors, path, sorted(content.files))
    return tensors


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Same names, same bits."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{len(different)} of {len(left)} tensors differ: {different[:5]}"
