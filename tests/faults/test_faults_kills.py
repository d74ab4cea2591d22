"""A run killed in a step, at its start-up or in a save ends as one that nobody killed, and dies whole.

The oracle is `chaos`'s own; that it can fail is tested here with resumes that are broken on purpose.
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

SAVES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
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
@SAVES
@pytest.mark.parametrize(("kill", "world_size"), [("all", 2), ("rank", 2), ("launcher", 2), ("launcher", 1)])
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


MISTAKES = {
    "from zero": ("find_no_checkpoint", "step", "began at step 1, expected 9"),
    "without the optimizer": ("restore_no_optimizer", "train/", ""),
    "without the position in the data": ("restore_no_position", "data/batch_sha256", ""),
    "from an older checkpoint": (
        "find_an_older_checkpoint",
        "step",
        "began at step {older}, expected {next}",
    ),
}
"""name: the function of `support.process_faults`, the key by which it is seen, and what is said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_resume_fails_and_is_named(name: str, options: list[str], tmp_path: Path):
    """Even a start from zero, which repeats the rows."""
    mistake, key, text = MISTAKES[name]
    scripts = write_scripts(tmp_path / "scripts", (f"support.process_faults:{mistake}", []))
    with chdir(scripts):
        code, result = chaos(tmp_path / "chaos", options, "--world-size", "1", "--paths", "torchrun")
    assert (code, result["verdict"]) == (1, "violated")
    *sound, last = result["attempts"]
    assert sound
    assert not any(each["violation"] for each in sound)
    violation, before = last["violation"], sound[-1]["checkpoint"]
    assert violation["key"].startswith(key), last
    assert violation["text"].startswith(text.format(older=before - 3, next=before + 1))
    if name == "without the optimizer":  # the loss of the first step is still the right one
        assert before < violation["step"] <= before + 3
    elif name == "without the position in the data":
        assert violation["step"] == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["torchrun", "accelerate", "accelerate 1"])
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_chaos_itself_leaves_nothing_when_it_is_ended(number: int, options: list[str], tmp_path: Path):
    folder = tmp_path / "chaos" / "reference"
    words = [sys.executable, "-m", "llm_pretrain", "chaos", *options, "--output", str(tmp_path / "chaos")]
    command = begin(words, folder, [])
    wait_until(command, (folder / "metrics.jsonl").exists, "the first row")
    assert processes_of(folder)
    os.kill(command.process.pid, number)
    output, _ = command.process.communicate(timeout=TIMEOUT_SECONDS)
    assert command.process.returncode == 128 + number, output
    assert "Traceback" not in output
    assert processes_of(folder) == []
    assert json.loads((tmp_path / "chaos" / "chaos.json").read_text())["verdict"] == "interrupted"
