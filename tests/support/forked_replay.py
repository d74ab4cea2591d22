"""`llm-pretrain replay` and `parity` whose ranks are forked (`support.fork_server`), and runs to replay."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.launching import ForkedLaunch

from llm_pretrain.__main__ import main
from llm_pretrain.audit import parity, replay  # noqa: F401 (parity binds RunningJob as it is imported)
from llm_pretrain.checkpoints.manifest import file_digest, read_manifest, write_manifest
from llm_pretrain.launch import jobs
from llm_pretrain.launch.jobs import Job, LaunchContext, Machine, launch_settings

Before = tuple[str, list[Any]]
"""`module:function` and its arguments, called in every rank first: a fault."""


class ForkedJob:
    """As `RunningJob`, with forked ranks."""

    before: Sequence[Before] = ()

    def __init__(self, job: Job, context: LaunchContext, gpus: Sequence[int] = ()):
        self.job, self.timed_out, self.done, self._began = job, False, False, time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        file = job.log.with_suffix(".accelerate.yaml")
        file.write_text(
            json.dumps(launch_settings(job.strategy, context.zero_stage, job.world_size, on_gpu=False))
        )
        self.launch = ForkedLaunch(
            job.path, job.world_size, job.folder, job.options, accelerate_file=file, before=self.before
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        codes = self.launch.poll()
        if codes is None:
            return None
        self.job.log.write_text(self.launch.output)
        return int(any(codes))

    def kill(self) -> None:
        self.launch.ranks.send(signal.SIGKILL)

    def __enter__(self) -> ForkedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.launch.finish()


CONTEXT = LaunchContext(Path(), Machine(0, 2), 600.0)


def launch_until(job: Job, last: int) -> None:
    """Launch a run on forked ranks, and kill them once the checkpoint of a step is committed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "RunningJob", ForkedJob)
        assert not replay.run_leg(job, CONTEXT, last, saves=True)


def run_replay(run: Path, output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and replay.json of a call with forked ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "RunningJob", ForkedJob)
        code = main(["replay", str(run), "--output", str(output), *options])
    return code, json.loads((output / "replay.json").read_text())


def run_parity(options: Sequence[str], before: Sequence[Before] = ()) -> int:
    """Exit code of `llm-pretrain parity` with forked ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "RunningJob", type("FaultyJob", (ForkedJob,), {"before": before}))
        return main(["parity", *options])


def rewrite_rows(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change rows of metrics.jsonl in place; the files' sizes on record stay those of one attempt."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewrite_checkpoint(run: Path, step: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one process, with all digests."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)
    described = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, tensors=described, files={file.name: file_digest(file)}))


def copy_of(run: Path, folder: Path) -> Path:
    """A run's folder, copied as from another machine."""
    return Path(shutil.copytree(run, folder))


def content_of(run: Path) -> dict[str, bytes]:
    """Every file of a run, to see that nothing was written."""
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}
