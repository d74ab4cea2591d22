"""Every way to start the two scripts trains the same numbers, to the last bit, at one number of processes.

Each way runs once, for a few steps of the tiny mixture of experts; docs/launching.md has the table of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.fork_server import free_port
from support.launching import (
    ACCELERATE_SCRIPT,
    ROOT,
    TORCHRUN_SCRIPT,
    Finished,
    assert_same_tensors,
    checkpoint_tensors,
    environment,
    finish,
    kill_outright,
    start_command,
)

from llm_pretrain.hardware import usable_cores

pytestmark = pytest.mark.slow

STEPS, PROCESSES = 4, 2
HERE = "127.0.0.1"
TORCHRUN, ACCELERATE = str(TORCHRUN_SCRIPT), str(ACCELERATE_SCRIPT)
RUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
SPAWN = [sys.executable, str(ROOT / "examples" / "spawn.py"), "--processes", str(PROCESSES)]
PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""Where other programs share the cores, threads that spin while they wait take them from one another."""
TWO_MACHINES = ROOT / "examples" / "multi_node"


@dataclass(frozen=True)
class Part:
    """One of the commands that make a launch together: a machine's, or a single rank's."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def by_hand(script: str, port: str) -> list[Part]:
    """The variables that a launcher would set, without the number of processes on this machine."""
    shared = {"MASTER_ADDR": HERE, "MASTER_PORT": port, "WORLD_SIZE": str(PROCESSES)}
    return [
        Part([sys.executable, script], shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(PROCESSES)
    ]


def example_torchrun(port: str) -> list[Part]:
    """examples/multi_node/torchrun.sh on two machines, both of them this one."""
    shared = {"FIRST": HERE, "PORT": port, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return [
        Part([str(TWO_MACHINES / "torchrun.sh")], shared | {"MACHINE": str(machine)}) for machine in range(2)
    ]


def c10d(port: str) -> list[Part]:
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{HERE}:{port}", "--rdzv_id", "launchers"]
    return [Part([*RUN, "--nnodes", "2", *meeting, "--nproc_per_node", "1", TORCHRUN])] * 2


def accelerate_machines(*options: str) -> list[Part]:
    """Two launches of Accelerate with one process each, told apart by their number."""
    machines = [*LAUNCH, *options, "--num_processes", "2", "--main_process_ip", HERE, "--machine_rank"]
    return [Part([*machines, str(machine), ACCELERATE]) for machine in range(2)]


ACCELERATE_FILE = ("--config_file", str(TWO_MACHINES / "accelerate.yaml"))
WAYS: dict[str, Callable[[str], list[Part]]] = {
    "run": lambda port: [Part([*RUN, "--nproc_per_node", "2", "--master_port", port, TORCHRUN])],
    "variables by hand": lambda port: by_hand(TORCHRUN, port),
    "variables by hand, accelerate": lambda port: by_hand(ACCELERATE, port),
    "run, accelerate": lambda port: [Part([*RUN, "--standalone", "--nproc_per_node", "2", ACCELERATE])],
    "accelerate flags": lambda port: [
        Part([*LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", port, ACCELERATE])
    ],
    "spawn": lambda port: [Part([*SPAWN, Path(TORCHRUN).name])],
    "spawn, accelerate": lambda port: [Part([*SPAWN, Path(ACCELERATE).name])],
}
"""name: the commands, given a free port."""
MACHINES: dict[str, Callable[[str], list[Part]]] = {
    "torchrun": example_torchrun,
    "torchrun c10d": c10d,
    "accelerate": lambda port: accelerate_machines(*ACCELERATE_FILE, "--main_process_port", port),
    "accelerate flags": lambda port: accelerate_machines(
        "--multi_gpu", "--num_machines", "2", "--main_process_port", port
    ),
}
ALONE = {
    "accelerate script": [sys.executable, ACCELERATE],
    "accelerate launch": [*LAUNCH, "--cpu", "--num_processes", "1", ACCELERATE],
    "run, accelerate": [*RUN, "--standalone", "--nproc_per_node", "1", ACCELERATE],
}


def run(parts: list[Part], folder: Path, options: Sequence[str]) -> Finished:
    """Start all parts together, and wait until each has left with 0."""
    processes = [
        start_command(part.command, folder, options, variables=PATIENT | dict(part.variables))
        for part in parts
    ]
    try:
        finished = [finish(process, folder) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                kill_outright(process)
    for each in finished:
        assert each.exit_code == 0, f"exit code {each.exit_code}:\n{each.output[-6000:]}"
    return finished[0]


def assert_same(left: Finished, right: Finished) -> None:
    """The same rows and the same parameters and moments, bit for bit."""
    rows = left.exact_rows()
    assert set(rows) == set(range(STEPS + 1))
    assert rows == right.exact_rows()
    assert_same_tensors(checkpoint_tensors(left.folder, STEPS), checkpoint_tensors(right.folder, STEPS))


@pytest.fixture(scope="module")
def options(masked_store: Path) -> list[str]:
    """The notebook's. `distributed.cpu_threads` is left to its default, which every way must come to."""
    return [
        *("--config", str(ROOT / "configs" / "tiny-moe.yaml")),
        *("--data.sources", f"[{{store: {masked_store}}}]", "--training.max_steps", str(STEPS)),
        *("--training.precision", "fp32"),
    ]


@pytest.fixture(scope="module")
def reference(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`torchrun --standalone` on two processes."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc_per_node", str(PROCESSES), TORCHRUN]
    return run([Part(command)], tmp_path_factory.mktemp("reference") / "run", options)


@pytest.fixture(scope="module")
def alone(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`python train_pretrain.py`."""
    return run([Part([sys.executable, TORCHRUN])], tmp_path_factory.mktemp("alone") / "run", options)


@pytest.mark.parametrize("name", WAYS)
def test_every_launcher_trains_the_same(name: str, reference: Finished, options: list[str], tmp_path: Path):
    finished = run(WAYS[name](str(free_port())), tmp_path / "run", options)
    assert_same(finished, reference)
    assert finished.status["world_size"] == PROCESSES
    engine = "accelerate" if "accelerate" in name else "torchrun"
    assert finished.status["launcher"] == engine


@pytest.mark.parametrize("name", MACHINES)
def test_two_machines_train_the_same(name: str, reference: Finished, options: list[str], tmp_path: Path):
    """Each of the two believes that the machine is its own, so the number of threads is said."""
    threads = ["--distributed.cpu_threads", str(max(1, usable_cores() // PROCESSES))]
    finished = run(MACHINES[name](str(free_port())), tmp_path / "run", [*options, *threads])
    assert_same(finished, reference)
    assert finished.status["world_size"] == PROCESSES


@pytest.mark.parametrize("name", ALONE)
def test_one_process_trains_the_same(name: str, alone: Finished, options: list[str], tmp_path: Path):
    finished = run([Part(ALONE[name])], tmp_path / "run", options)
    assert_same(finished, alone)
    assert finished.status["launcher"] == "accelerate"


def executed(notebook: Path, start: Path, more: str, parameters: str) -> str:
    """Run a notebook in a fresh kernel that starts in `start`; returns what `more`, added last, printed."""
    content = nbformat.read(notebook, as_version=4)
    assert all(not cell.get("outputs") for cell in content.cells), "outputs are stripped"
    (cell,) = [cell for cell in content.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source += "\n" + parameters
    content.cells.append(nbformat.v4.new_code_cell(more))
    resources = {"metadata": {"path": str(start)}}
    NotebookClient(content, timeout=300, kernel_name="python3", resources=resources).execute()
    return "".join(output.get("text", "") for output in content.cells[-1].outputs)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_notebook_trains_the_same(
    masked_store: Path,
    tmp_path: Path,
    reference: Finished,
    alone: Finished,
    monkeypatch: pytest.MonkeyPatch,
):
    """From examples/, with two processes and then with the kernel itself, which outlives a failed run."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    for name, value in (environment() | PATIENT).items():
        monkeypatch.setenv(name, value)
    paths = f'store, runs = Path("{masked_store}"), Path("{tmp_path}")'
    parameters = f'{paths}\nsteps, port = {STEPS}, "{free_port()}"'
    failing = (
        "try:\n    main(['--config', 'missing.yaml'])\n"
        "except SystemExit as left:\n    print('left with', left.code, Path.cwd())\n"
    )
    printed = executed(ROOT / "examples" / "notebook.ipynb", ROOT / "examples", failing, parameters)
    assert "left with 2" in printed
    assert str(ROOT) in printed
    two, one = (Finished(0, "", tmp_path / name) for name in ("two", "one"))
    assert (two.status["world_size"], one.status["world_size"]) == (2, 1)
    assert [run.status["state"] for run in (two, one)] == ["finished", "finished"]
    assert_same(two, reference)
    assert_same(one, alone)
