"""No secret of the environment reaches a file or a line of output, however a run ends.

What is typed into the configuration is another matter: it is written to config.yaml, for it is the run's.
"""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.launching import Finished
from support.stopping import begin, nothing_left, row_of, to_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")

RECORDING = (
    *("--logging.wandb_mode", "offline", "--logging.tensorboard", "true", "--logging.report", "true"),
    *("--evaluation.eval_steps", "8", "--evaluation.max_batches", "2"),
    *("--evaluation.sample_prompts", "['one ']"),
)


def hidden_variables() -> dict[str, str]:
    """An environment with secrets of every usual form; each is random, so that a find is no accident."""
    word = secrets.token_hex(12)
    return {
        "WANDB_API_KEY": secrets.token_hex(20),
        "HF_TOKEN": f"hf_{secrets.token_hex(17)}",
        "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30),
        "CANARY_OF_THIS_TEST": secrets.token_hex(24),
        "HTTP_PROXY": f"http://someone:{word}@127.0.0.1:9",
        "HTTPS_PROXY": f"http://someone:{word}@127.0.0.1:9",
        "MLFLOW_TRACKING_PASSWORD": secrets.token_hex(12),
    }


def in_clear(variables: dict[str, str]) -> dict[str, bytes]:
    """The secret part of each."""
    passwords = {
        name: value.split(":")[2].split("@")[0] for name, value in variables.items() if "PROXY" in name
    }
    return {name: value.encode() for name, value in (variables | passwords).items()}


def leaks(folder: Path, output: str, variables: dict[str, str]) -> list[str]:
    """Where a secret stands: file or output, and which."""
    found = [f"output: {name}" for name, secret in in_clear(variables).items() if secret.decode() in output]
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            names = [name for name, secret in in_clear(variables).items() if secret in content]
            found += [f"{path.relative_to(folder)}: {name}" for name in names]
    return found


def run(command: str | Sequence[str], folder: Path, options: Sequence[str], kind: str = "") -> Finished:
    """A run in an environment of secrets, below a folder that takes everything it writes."""
    variables = hidden_variables()
    home = folder / "home"
    home.mkdir(parents=True)
    elsewhere = {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    launch = begin(command, folder / "run", options, **variables, **elsewhere)
    if kind == "stopped":
        row_of(10)(launch)
        to_rank(0, signal.SIGTERM)(launch)
    elif kind == "hanging":
        row_of(10)(launch)
        launch.workers()[1].suspend()
    elif kind == "killed rank":
        row_of(10)(launch)
        launch.workers()[1].kill()
    finished = launch.finish()
    nothing_left(launch)
    assert leaks(folder, finished.output, variables) == []
    return finished


@pytest.mark.slow
def test_a_run_that_records_everything_keeps_secrets(options: list[str], tmp_path: Path):
    finished = run("python", tmp_path, [*options, *RECORDING])
    assert finished.exit_code == 0, finished.output[-4000:]
    written = {path.name for path in finished.folder.rglob("*")}
    assert {"report.html", "samples.jsonl", "manifest.json", "model.safetensors", "debug.log"} <= written
    assert any(name.endswith(".wandb") for name in written)
    assert any(name.startswith("events.out") for name in written)


ENDS = [
    ("online", "torchrun", ["--logging.wandb_mode", "online"]),  # its proxy is one that nobody answers
    ("out of memory", "accelerate", ["--model.hidden_size", "16384", "--model.num_hidden_layers", "90"]),
    ("stopped", "torchrun", []),
    ("hanging", "accelerate", ["--distributed.timeout_seconds", "10"]),
    ("killed rank", "torchrun", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "command", "more"), ENDS, ids=[kind for kind, *_ in ENDS])
def test_a_launched_run_keeps_secrets(
    options: list[str], tmp_path: Path, kind: str, command: str, more: list[str]
):
    """Of a hanging one the stacks of all threads are written down."""
    finished = run(command, tmp_path, [*options, *RECORDING, *more], kind)
    assert (finished.exit_code == 0) == (kind == "online"), finished.output[-4000:]
    if kind == "hanging":
        assert list(finished.folder.glob("stacks-rank*.txt"))
