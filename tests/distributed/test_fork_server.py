"""Forked ranks have the environment that a launcher gives to its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.fork_server import Request, fork_server
from support.launching import CPU_FILE, ROOT, TIMEOUT_SECONDS, environment
from support.probes import ACCELERATE, TORCHRUN

OWN = ("MASTER_", "TORCHELASTIC_", "OMP_", "OLDPWD", "PWD", "SHLVL", "_", "LLM_PRETRAIN_", "PYTEST_")
OWN += ("PYTHONPATH", "OPENBLAS_", "TORCH_NCCL", "TORCHINDUCTOR_", "KMP_", "CUDA_MODULE_LOADING")
"""Variables that differ from launch to launch, or that libraries set."""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_environment_is_the_launcher_s(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # what Accelerate leaves in a process that has looked for a GPU, as other tests' have
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
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
