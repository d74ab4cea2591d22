"""Forked ranks are what a launcher would start: environment, exit codes, signals, the end of all with one."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from support.fork_server import Request, fork_server
from support.launching import CPU_FILE, ROOT, TIMEOUT_SECONDS, environment
from support.probes import ACCELERATE, TORCHRUN

OWN = ("MASTER_", "TORCHELASTIC_", "OMP_", "OLDPWD", "PWD", "SHLVL", "_", "LLM_PRETRAIN_", "PYTEST_")
OWN += ("PYTHONPATH", "OPENBLAS_", "TORCH_NCCL", "TORCHINDUCTOR_", "KMP_", "CUDA_MODULE_LOADING")
"""Variables that differ from launch to launch, or that libraries set."""


def run(target: str, *arguments: object, world_size: int = 2, **options: object) -> list[int]:
    request = Request(target, list(arguments), world_size, **options)  # type: ignore[arg-type]
    return fork_server().run(request, TIMEOUT_SECONDS)


def test_exit_codes_are_the_ranks_own():
    assert run("builtins:int", 7) == [7, 7]
    assert run("builtins:print") == [0, 0]
    assert run("sys:exit", 75, world_size=1) == [75]
    assert run("operator:truediv", 1, 0, world_size=1) == [1]


def test_output_goes_to_a_file(tmp_path: Path):
    output = tmp_path / "output"
    assert run("builtins:print", "one", "two", output=str(output)) == [0, 0]
    assert output.read_text() == "one two\n" * 2


def test_a_rank_that_is_killed_ends_the_others():
    running = fork_server().start(Request("time:sleep", [TIMEOUT_SECONDS], 2, end_seconds=0.1))
    assert running.poll() is None
    running.send(signal.SIGKILL, rank=0)
    assert running.wait(TIMEOUT_SECONDS) == [-signal.SIGKILL, -signal.SIGTERM]


def test_ranks_end_where_nobody_waits_any_more():
    running = fork_server().start(Request("time:sleep", [TIMEOUT_SECONDS], 2))
    with pytest.raises(TimeoutError):
        running.wait(0.1)


def test_faults_come_before_the_target(tmp_path: Path):
    faults = [("os:putenv", ["A_FAULT", "1"])]
    request = Request("subprocess:call", [["sh", "-c", "exit $A_FAULT"]], 1, before=faults)
    assert fork_server().run(request, TIMEOUT_SECONDS) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_environment_is_the_launcher_s(launcher: str, tmp_path: Path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import json, os, sys\n"
        "def main(folder):\n"
        "    open(f\"{folder}/{os.environ['RANK']}.json\", 'w').write(json.dumps(dict(os.environ)))\n"
        "if __name__ == '__main__':\n    main(sys.argv[1])\n"
    )
    options = ["--config_file", str(CPU_FILE), "--num_processes", "2", "--main_process_port", "0"]
    launch = [*ACCELERATE, *options] if launcher == "accelerate" else [*TORCHRUN, "--nproc_per_node", "2"]
    real, forked = tmp_path / "real", tmp_path / "forked"
    for folder in (real, forked):
        folder.mkdir()
    subprocess.run([*launch, str(probe), str(real)], check=True, env=environment(), cwd=ROOT)
    request = Request(
        "builtins:exec",
        [f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import probe; probe.main({str(forked)!r})"],
        2,
        launcher=launcher,
        launcher_options=options if launcher == "accelerate" else [],
    )
    assert fork_server().run(request, TIMEOUT_SECONDS) == [0, 0]
    for rank in range(2):
        expected, found = (json.loads((each / f"{rank}.json").read_text()) for each in (real, forked))
        expected, found = (
            {name: value for name, value in each.items() if not name.startswith(OWN)}
            for each in (expected, found)
        )
        assert found == expected
