"""Steps on real ranks of small meshes hold and exchange what the simulated ones do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llm_pretrain.launch.jobs import PACKAGE_ROOT, launch_environment

RANKS = Path(__file__).parent.parent / "support" / "simulated_meshes.py"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-dense"])
def test_small_meshes_are_as_simulated(preset):
    options = ["--config", f"configs/{preset}.yaml", "--model.vocab_size", "512"]
    environment = launch_environment(PACKAGE_ROOT, gpus="") | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(RANKS), json.dumps(options)]
    done = subprocess.run(
        command, check=True, env=environment, cwd=PACKAGE_ROOT, stdout=subprocess.PIPE, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 6
    for each in rows:
        assert each["simulated"] == each["real"], each["mesh"]
        assert len(each["real"]["collectives"]) > 10
