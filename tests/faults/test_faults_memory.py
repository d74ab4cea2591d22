"""Memory that runs out, by real limits: one line of sizes and what to change, exit code 71, nothing left."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.launching import ROOT, Finished
from support.launching import launch as launch_ranks
from support.stopping import COMMANDS, Launch, begin, no_traceback_of_ours, nothing_left, wait_until

pytestmark = pytest.mark.skipif(not hasattr(psutil, "RLIMIT_AS"), reason="limits of other processes: Linux")

LIMIT = 1_500_000_000
"""Bytes of address space; the libraries take half of them."""
HUNGRY = ("--training.micro_batch_size", "1536", "--training.global_batch_size", "3072")
HUGE = (
    *("--model.hidden_size", "12288", "--model.num_hidden_layers", "96", "--model.num_attention_heads", "96"),
    *("--model.intermediate_size", "32768", "--model.num_experts", "0"),
    *("--model.router_bias_update_rate", "0"),
)
"""145 billion parameters."""


def limited(command: str, limit: int = LIMIT) -> list[str]:
    """The command below a limit of address space, which its children inherit."""
    code = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)"
    return [
        sys.executable,
        "-c",
        f"{code}; os.execv(sys.argv[2], sys.argv[2:])",
        str(limit),
        *COMMANDS[command],
    ]


def check_line(launch: Launch, finished: Finished, *, rank: int = 0) -> str:
    """One line, the same in status.json, exit code 71, nothing left; returns the line."""
    errors = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    start = "error: " + (f"rank {rank}: " if rank else "") + "out of memory"
    (line,) = [line for line in errors if "out of memory" in line] or [f"none of {finished.output[-4000:]}"]
    assert line.startswith(start), line
    status = finished.status
    assert (status["state"], status["exit_code"]) == ("failed", 71), status
    assert status["reason"] == line.removeprefix("error: ").removeprefix(f"rank {rank}: ")
    assert re.search(r"[\d,]+ parameters take [\d.]+ .iB", line), line
    no_traceback_of_ours(finished.output)
    nothing_left(launch)
    return line


BEFORE = r"out of memory before the model was built: 14\d,[\d,]+ parameters take 2\.1 TiB"
STEP = r"allocate.*training.micro_batch_size 1024 instead of 1536 \(the result stays\), training.activation"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "limit", "more", "pattern"),
    [
        ("python", LIMIT, HUNGRY, STEP),
        *((command, 4_000_000_000, HUGE, BEFORE) for command in ("torchrun", "accelerate")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_one_line(
    options: list[str], tmp_path: Path, command: str, limit: int, more: Sequence[str], pattern: str
):
    """A step, and a model beyond the machine, which is refused in seconds."""
    launch = begin(limited(command, limit), tmp_path / "run", [*options, *more])
    finished = launch.finish()
    assert re.search(pattern, check_line(launch, finished))
    assert finished.exit_code == 71 or not command.startswith("python")
    assert more == HUNGRY or not (launch.folder / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "rank"), [("torchrun", 1), ("accelerate", 0)])
def test_one_rank_of_two_takes_the_other_with_it(options: list[str], tmp_path: Path, command: str, rank: int):
    hungry = ("--training.micro_batch_size", "6144", "--training.global_batch_size", "12288")
    launch = begin(command, tmp_path / "run", [*options, *hungry])
    wait_until(launch, lambda: len(launch.workers()) == 2, "both ranks")
    limit = 2 * LIMIT  # a library short of memory while it is loaded may just die
    launch.workers()[rank].rlimit(psutil.RLIMIT_AS, (limit, limit))
    finished = launch.finish()
    assert finished.exit_code != 0
    check_line(launch, finished, rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "rank", "saves"), [("torchrun", 1, "false"), ("accelerate", 0, "true")])
def test_a_save_that_needs_too_much(options: list[str], tmp_path: Path, command: str, rank: int, saves: str):
    """Which is no trouble of a disk: the run ends, on every rank."""
    before = [("support.process_faults:ask_for_too_much_in_saves", [rank])]
    options = [*options, "--checkpoint.async_save", saves]
    status = launch_ranks(command, 2, tmp_path / "run", options, exit_code=1, before=before).status
    assert (status["state"], status["exit_code"]) == ("failed", 71)
    assert status["reason"].startswith("out of memory: ")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


LIMITED_SAVES = """
import os, resource, sys
sys.path.insert(0, {root!r})
import psutil, torch
from llm_pretrain.launch import process
from llm_pretrain.training.saving import CheckpointManager
save = CheckpointManager.save
def limited(*arguments, **options):
    room = psutil.Process().memory_info().vms + (96 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        torch.empty(400 << 20, dtype=torch.uint8)
    except RuntimeError:
        os.write(1, b"400 MiB are refused\\n")
    try:
        save(*arguments, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
CheckpointManager.save = limited
process.M_MMAP_MAX = process.M_TRIM_THRESHOLD = 0  # names no option: freed blocks go back
import {script}
{script}.exit_process({script}.main())
"""
"""A script whose saves get hardly more address space than the run has when they begin."""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["python", "accelerate"])
def test_a_save_takes_no_memory_of_its_own(options: list[str], tmp_path: Path, command: str):
    """Room of 96 MiB, for the largest tensor in bf16 (59 MiB), is enough for a state of 470 MiB."""
    *launcher, path = COMMANDS[command]
    script = tmp_path / "limited.py"
    script.write_text(LIMITED_SAVES.format(root=str(ROOT), script=Path(path).stem))
    options = [*options, "--model.hidden_size", "256", "--model.vocab_size", "120000"]
    options += ["--training.micro_batch_size", "1", "--training.global_batch_size", "2"]
    options += ["--training.max_steps", "4", "--checkpoint.save_steps", "3"]
    # freed memory that is kept, and an arena of 64 MiB for each thread, are not the save's
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    launch = begin([*launcher, str(script)], tmp_path / "run", options, **allocator)
    finished = launch.finish()
    assert finished.status["state"] == "finished", finished.output[-4000:]
    assert "400 MiB are refused" in finished.output, "the limit leaves room for a copy"
    no_traceback_of_ours(finished.output)
    nothing_left(launch)
