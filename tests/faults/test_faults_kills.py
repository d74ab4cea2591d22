"""A run killed in a step, at its start-up or in a save ends as one that nobody killed, and dies whole.

The oracle is `chaos`'s own; that it can fail is tested here with a resume that is broken on purpose.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.broken_scripts import write_scripts
from support.launching import TIMEOUT_SECONDS
from support.stopping import begin, wait_until

from llm_pretrain.__main__ import main
from llm_pretrain.audit.chaos import WORKER_SECONDS
from llm_pretrain.launch.jobs import processes_of

SLOW_MACHINE = 3
"""Room in limits that the product promises: these machines have other work."""


def chaos(
    folder: Path, options: list[str], *more: str, asynchronous: bool = False
) -> tuple[int, dict[str, Any]]:
    """Exit code and chaos.json of a call."""
    words = [*options, "--output", str(folder), "--checkpoint.async_save", str(asynchronous).lower()]
    code = main(["chaos", *words, *more])
    return code, json.loads((folder / "chaos.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "world_size", "asynchronous"),
    [("all", 2, True), ("rank", 2, False), ("launcher", 2, True), ("launcher", 1, False)],
)
def test_each_launcher_is_killed_at_each_place(
    kill: str,
    world_size: int,
    asynchronous: bool,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """With an evaluation now and then, so that the best weights are compared too."""
    more = ("--kill", kill, "--world-size", str(world_size))
    evaluated = ("--evaluation.eval_steps", "5", "--evaluation.max_batches", "2")
    code, result = chaos(tmp_path / "chaos", options, *more, *evaluated, asynchronous=asynchronous)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "the killed run ended as the uninterrupted run, bit for bit" in printed
    places = [(each["path"], each["place"].split()[0]) for each in result["attempts"]]
    launchers = ("torchrun", "accelerate")
    assert sorted(places[:-1]) == sorted(product(launchers, ("after", "start-up", "save")))
    assert (tmp_path / "chaos" / "killed" / "weights" / "best").is_dir()


@pytest.mark.slow
def test_a_resume_without_the_optimizer_is_named(options: list[str], tmp_path: Path):
    scripts = write_scripts(tmp_path / "scripts", ("support.process_faults:restore_no_optimizer", []))
    with chdir(scripts):
        code, result = chaos(tmp_path / "chaos", options, "--world-size", "1", "--paths", "torchrun")
    assert (code, result["verdict"]) == (1, "violated")
    *sound, last = result["attempts"]
    assert sound
    assert not any(each["violation"] for each in sound)
    assert last["violation"]["key"].startswith("train/"), last


@pytest.mark.slow
@pytest.mark.parametrize("command", ["torchrun", "accelerate 1"])
def test_workers_that_are_still_starting_end_with_their_launcher(
    command: str, options: list[str], tmp_path: Path
):
    """They import for seconds before they can ask Linux to be told."""
    launch = begin(command, tmp_path / "run", [*options, "--training.max_steps", "5000"])
    size = 1 if command.endswith("1") else 2
    wait_until(launch, lambda: len(launch.workers()) == size, "the workers")
    launch.process.kill()
    launch.process.wait()
    _, left = psutil.wait_procs(launch.members(), WORKER_SECONDS * SLOW_MACHINE)
    for each in left:
        each.kill()
    launch.process.communicate()
    assert not left, "they wait for a launcher that is gone"


@pytest.mark.slow
def test_chaos_itself_leaves_nothing_when_it_is_ended(options: list[str], tmp_path: Path):
    folder = tmp_path / "chaos" / "reference"
    words = [sys.executable, "-m", "llm_pretrain", "chaos", *options, "--output", str(tmp_path / "chaos")]
    command = begin(words, folder, [])
    wait_until(command, (folder / "metrics.jsonl").exists, "the first row")
    assert processes_of(folder)
    os.kill(command.process.pid, signal.SIGTERM)
    output, _ = command.process.communicate(timeout=TIMEOUT_SECONDS)
    assert command.process.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert processes_of(folder) == []
    assert json.loads((tmp_path / "chaos" / "chaos.json").read_text())["verdict"] == "interrupted"
