"""Every command of README and tutorial, run in order on a copy of the project with an own environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.documents import NIGHT, READMES, ROOT, TUTORIAL, blocks

QUESTION = "What does the function `json.dumps` do?"
RUNS = ("quickstart", "quickstart-chat", "tiny-moe", "tiny-accelerate", "tiny-fsdp", "mine")


def copy_of_the_project(folder: Path) -> Path:
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def with_question(script: str) -> str:
    """The script, whose chat is asked what `question.txt` says."""
    script, chats = re.subn(r"^(llm-pretrain chat .*)$", r"\1 < question.txt", script, flags=re.MULTILINE)
    assert chats == 1
    return script


def run_script(script: str, folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder, env=env, capture_output=True, text=True, timeout=7200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_every_command_of_readme_and_tutorial_runs(tmp_path: Path):
    project = copy_of_the_project(tmp_path / "llm_pretrain")
    script = "".join(blocks(READMES[0]) + blocks(TUTORIAL))
    (project / "question.txt").write_text(QUESTION + "\n")
    assert script.count("--budget 2h") == 1
    script = with_question(script.replace("--budget 2h", "--budget 1.3e14"))  # the shortest ladder
    for code in re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL):
        script += f"python - <<'END'\n{code}END\n"
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment["PATH"] = ":".join(
        part for part in environment["PATH"].split(":") if not (Path(part) / "llm-pretrain").exists()
    )
    run_script(script, project, environment)
    for run in RUNS:
        status = json.loads((project / "runs" / run / "status.json").read_text())
        assert status["state"] == "finished", run
        assert (project / "runs" / run / "report.html").stat().st_size > 10_000
    assert (project / "runs/compared.html").exists()
    assert (project / "runs/quickstart/quickstart.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.slow
def test_a_machine_for_a_night_ends_in_a_chat_as_written_but_for_its_budgets(tmp_path: Path):
    (script,) = blocks(NIGHT)[:1]
    for written, here in (("--budget 2h", "--budget 1.5e14"), ("--time 6h", "--time 8m")):
        assert script.count(written) == 1
        script = script.replace(written, here)
    (tmp_path / "question.txt").write_text(QUESTION + "\n")
    (tmp_path / "texts").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    sources = [each for each in library.rglob("*.py") if not {"test", "site-packages"} & set(each.parts)]
    for number, source in enumerate(sorted(sources)):
        shutil.copy(source, tmp_path / "texts" / f"{number}.txt")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run_script(with_question(script), tmp_path, os.environ | {"PATH": path})
    run = tmp_path / "runs" / "night"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/predicted_loss" in row for row in rows)
