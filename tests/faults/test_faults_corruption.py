"""A bit that flips on one rank of a whole run: what its files, its last line and the commands say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corruption_plan import ALWAYS, MATRIX
from support.launching import Finished, launch

from llm_pretrain.__main__ import main
from llm_pretrain.errors import CorruptionError
from llm_pretrain.tracking.report import write_report

pytestmark = pytest.mark.slow

CHECKED = ("--training.check_every", "3", "--training.max_steps", "8", "--checkpoint.save_steps", "4")
SAVED = 4


def run(
    launcher: str, folder: Path, options: list[str], exit_code: int, kind: str, *arguments: Any
) -> Finished:
    before = [("support.process_faults:flip_a_bit", [kind, *arguments])]
    return launch(launcher, 2, folder / "run", [*options, *CHECKED], exit_code=exit_code, before=before)


def checks(finished: Finished) -> dict[int, str]:
    return {step: row["train/check"] for step, row in finished.rows.items() if "train/check" in row}


def losses(finished: Finished) -> dict[int, float]:
    return {step: row["train/loss"] for step, row in finished.rows.items() if "train/loss" in row}


def verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """What `verify` returns and prints, and the report's text."""
    capsys.readouterr()
    code = main(["verify", str(folder)])
    page = write_report([folder], folder / "page.html").read_text()
    return code, capsys.readouterr().out, page


@pytest.mark.parametrize(
    ("launcher", "kind", "arguments", "step", "name"),
    [
        ("accelerate", "gradient", (5, ALWAYS), 6, f"gradient of {MATRIX} differs"),
        # the last step is checked
        ("torchrun", "moment", (8,), 8, f"exp_avg of {MATRIX} differs between ranks"),
    ],
)
def test_a_fault_that_stays_ends_the_run(
    launcher: str, kind: str, arguments: tuple, step: int, name: str, options: list[str], tmp_path: Path
):
    finished = run(launcher, tmp_path, options, 1, kind, *arguments)  # the launcher's own
    folder = tmp_path / "run"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["exit_code"] == CorruptionError.exit_code
    assert status["reason"].startswith(f"training.check_every: silent data corruption at step {step}, rank ")
    assert f"the last checked checkpoint is {folder}/checkpoints/step-{SAVED:08}" in status["reason"]
    assert name in status["reason"]
    (fault,) = status["faults"]
    assert (fault["step"], fault["transient"]) == (step, False)
    assert 1 in fault["ranks"]
    assert status["checked"] == {6: 4, 8: 6}[step]
    assert checks(finished).keys() == {3, 4, 6} - ({6} if step == 6 else set())


def test_a_fault_that_goes_away_is_on_record(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    finished = run("torchrun", tmp_path, options, 0, "gradient", 6, 1)
    folder = tmp_path / "run"
    sound = launch("torchrun", 2, tmp_path / "sound", [*options, *CHECKED])
    assert losses(finished) == losses(sound)
    assert checks(finished) == {**dict.fromkeys((3, 4, 8), "passed"), 6: "transient"}
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["checked"]) == ("finished", 8)
    assert [(fault["step"], fault["ranks"], fault["transient"]) for fault in status["faults"]] == [
        (6, [1], True)
    ]
    assert status["reason"] == "silent data corruption was found in 1 of its checks, last at step 6"
    assert finished.output.splitlines()[-1].startswith(
        "warning: silent data corruption was found in 1 of its"
    )
    line = f"silent data corruption at step 6, rank 1: gradient of {MATRIX} differs when computed again, once"
    code, printed, page = verified(folder, capsys)
    assert code == 74
    assert line in " ".join(printed.split())
    assert line.capitalize()[:40] in page
    code, printed, page = verified(tmp_path / "sound", capsys)
    assert code == 0
    assert "computed twice              4 of the rows' steps, the last is step 8" in printed
    assert "corruption" not in page.lower().replace("check_every", "").split("<script")[0]
