"""`llm-pretrain doctor --gpu`: sections that fail lose no other, and no file says who ran it where."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llm_pretrain.__main__ import main
from llm_pretrain.commands import _gpu_report, _gpu_sections
from llm_pretrain.commands._gpu_report import Cleaner, Report, Section, sections
from llm_pretrain.commands._gpu_sections import Findings, nvidia_smi
from llm_pretrain.commands._launching import Machine, run_limited

CPU = Machine(gpus=0, cores=2)
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "SHORT_PASSWORD": "xy7z",
    "CANARY": "9f8e7d6c5b4a39281706",
    "HTTP_PROXY": "http://someone:pass-of-proxy@10.1.2.3:8080",
}
TABLE = {"title": "A table <b>", "heads": ["what", "value"], "rows": [["speed", 1.5], ["missing", None]]}


def fake_processes(monkeypatch: pytest.MonkeyPatch, endings: Mapping[str, tuple[int | None, str, dict]]):
    """Sections that end as told: exit code (None: stopped), output, and the result that they wrote."""

    def run(command: list[str], *, log: Path, **_: Any) -> int | None:
        code, output, found = endings[command[3]]
        log.write_text(output)
        if found:
            Path(command[4]).write_text(json.dumps(found))
        return code

    monkeypatch.setattr(_gpu_report, "run_limited", run)


def report_of(
    folder: Path, *names: str, minutes: float = 10, machine: Machine = CPU, **fields: Any
) -> Report:
    parts = [Section(name, f"About {name}", name, limit=60, least=1, **fields) for name in names]
    report = Report(parts, machine, minutes, folder)
    report.run()
    return report


def test_a_section_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    endings = {
        "good": (0, "", {"problems": [], "tables": [TABLE]}),
        "wrong": (0, "", {"problems": ["two <script>numbers</script> differ"], "tables": []}),
        "raising": (1, "Traceback (most recent call last):\nValueError: no such thing\n", {}),
        "crashing": (-11, "", {"problems": [], "tables": [TABLE]}),
        "hanging": (None, "step 3\nstep 4\n", {"problems": [], "tables": [TABLE]}),
        "last": (0, "", {"problems": [], "tables": [TABLE]}),
    }
    fake_processes(monkeypatch, endings)
    report = report_of(tmp_path, *endings)
    written = json.loads((tmp_path / "gpu-report.json").read_text())
    found = {each["name"]: each for each in written["sections"]}
    states = {name: each["state"] for name, each in found.items()}
    assert states == {
        **{"good": "passed", "wrong": "failed", "raising": "failed", "crashing": "failed"},
        **{"hanging": "stopped", "last": "passed"},
    }
    assert found["raising"]["problems"] == ["ended with exit code 1", "ValueError: no such thing"]
    assert found["crashing"]["problems"][0] == "ended by SIGSEGV"
    assert found["hanging"]["problems"] == ["took longer than 60 s; its last line: step 4"]
    assert (
        found["hanging"]["tables"] == found["crashing"]["tables"] == [TABLE]
    )  # what they had written by then
    assert [each.name for each in report.failed()] == ["wrong", "raising", "crashing", "hanging"]
    page = (tmp_path / "gpu-report.html").read_text()
    assert "two &lt;script&gt;numbers&lt;/script&gt; differ" in page
    assert "<script>numbers" not in page
    assert "ValueError: no such thing" in page
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data) == written


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (None, 1)])
def test_the_exit_code_says_whether_a_part_failed(
    code: int | None, exit_code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    parts = [Section("one", "One", "one", 60, 1), Section("other", "Other", "one", 60, 1, needs=99)]
    monkeypatch.setattr(_gpu_report, "sections", lambda machine: parts)
    fake_processes(monkeypatch, {"one": (code, "error: it is broken\n", {})})
    assert main(["doctor", "--gpu", "--output", str(tmp_path / "out")]) == exit_code
    output = capsys.readouterr().out
    assert "other" in output
    assert "skipped: " in output
    assert ("error: it is broken" in output) == bool(exit_code)
    assert output.splitlines()[-1].startswith(f"Please send {tmp_path / 'out' / 'gpu-report.html'}")


def test_what_does_not_fit_into_the_time_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_processes(monkeypatch, {})
    report = report_of(tmp_path, "one", "other", minutes=0.05)
    assert [each.state for each in report.results] == ["not started", "not started"]
    assert all("s were left" in each.reason for each in report.results)
    assert not report.failed()


def test_a_section_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    skipped = {each.name: each.missing(CPU) for each in sections(CPU)}
    assert {name for name, why in skipped.items() if why == "no GPU here"} == {
        *("step gpt2-124m", "step mixture", "step qwen3-0.6b"),
        *("device", "tests", "launch tests"),
    }
    assert "needs 2 GPUs, found 1" in [each.missing(Machine(1, 8)) for each in sections(Machine(1, 8))]
    assert not any(each.missing(Machine(2, 8)) for each in sections(Machine(2, 8)))
    monkeypatch.setattr(_gpu_report, "PACKAGE_ROOT", tmp_path)  # as installed, without the checkout
    lacking = {
        each.name for each in sections(Machine(2, 8)) if "of a checkout" in each.missing(Machine(2, 8))
    }
    steps = {"step gpt2-124m", "step mixture", "step qwen3-0.6b"}
    assert lacking == {*steps, "tests", "launch tests"}


def test_no_file_says_who_ran_it_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    home = tmp_path / "home" / "alice"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node17.example.org")
    lines = [
        *(f"could not use {value} of {name}" for name, value in SECRETS.items()),
        f"{home}/llm/train.py:12: in main",
        "no connection to node17.example.org (10.20.30.40): alice@node17 https://alice@example.org/x/y",
    ]
    tables = [{"title": lines[-1], "heads": ["what"], "rows": [[line] for line in lines]}]
    endings = {
        "told": (0, "", {"problems": lines, "tables": tables}),
        "raised": (1, "\n".join(f"OSError: {line}" for line in lines[-4:]), {}),
        "hung": (None, lines[0], {}),
    }
    fake_processes(monkeypatch, endings)
    (tmp_path / "out").mkdir()
    report_of(tmp_path / "out", *endings)
    for file in ("gpu-report.json", "gpu-report.html"):
        text = (tmp_path / "out" / file).read_text()
        hidden = [*SECRETS.values(), "pass-of-proxy", "alice", "node17", str(tmp_path), "10.20.30.40"]
        assert [each for each in hidden if each in text] == []
        assert "train.py:12: in main" in text


def test_cleaning_leaves_facts_as_they_are():
    environment = {"NCCL_VERSION": "2.27.5-1", "GPU_NAME": "NVIDIA H200 NVL", "HOME": "/home/bob"}
    facts = ["torch 2.13.0+cu129", "NCCL 2.27.5-1", "NVIDIA H200 NVL", "3 tokens/s", "Linux-6.8.0-1015-aws"]
    cleaner = Cleaner(environment, ["bob", "host-1"])
    assert cleaner.clean(facts) == facts
    assert cleaner.text("bobsled, /home/bob, /home/bob/x/y.py") == "bobsled, $HOME, …/y.py"
    assert cleaner.text("/home/eve /data/eve/x/y.py:3") == "… …/y.py:3"


def test_a_limit_ends_a_process_and_its_children(tmp_path: Path):
    log = tmp_path / "log"
    options: dict[str, Any] = {"log": log, "cwd": tmp_path, "environment": dict(os.environ)}
    sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run_limited([sys.executable, "-c", sleep], seconds=0.5, **options) is None
    assert run_limited([sys.executable, "-c", "print('said'); exit(3)"], seconds=60, **options) == 3
    assert "said" in log.read_text()


def test_findings_are_on_disk_at_once(tmp_path: Path):
    findings = Findings(tmp_path / "result.json")
    findings.table("Speeds", ["what", "GB/s"])
    findings.row("copies", float("nan"))
    findings.problem("too slow")
    table = {"title": "Speeds", "heads": ["what", "GB/s"], "rows": [["copies", "nan"]]}
    assert json.loads(findings.file.read_text()) == {"problems": ["too slow"], "tables": [table]}


def test_nvidia_smi_is_asked_for_what_it_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = tmp_path / "nvidia-smi"
    unknown = 'Field "power.draw" is not a valid field to query.'
    lines = [f"case $2$3 in *power.draw*) echo '{unknown}'; exit 2;; esac", "echo 'clocks.sm [MHz], name'"]
    lines += [f"echo '{clock} MHz, NVIDIA H200'" for clock in (1980, 345)]
    script.write_text("\n".join(["#!/bin/sh", *lines]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    rows = nvidia_smi(["clocks.sm", "power.draw", "name"])
    assert rows[1] == {"clocks.sm [MHz]": "345 MHz", "name": "NVIDIA H200"}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia_smi() == []


def test_results_of_tests_are_read_line_by_line():
    lines = [
        "tests/model/test_a.py::test_one[bf16 x] PASSED     [ 50%]\n",
        "tests/model/test_a.py::test_other FAILED     [100%]\n",
        "=== FAILURES ===\n",
        "tests/model/test_a.py:12: AssertionError: 1 != 2\n",
    ]
    found = list(_gpu_sections._test_results(lines))
    assert [(name, result) for name, result, _ in found if name] == [
        ("tests/model/test_a.py::test_one[bf16 x]", "passed"),
        ("tests/model/test_a.py::test_other", "failed"),
    ]
    problems = [line for _, _, line in found if line]
    assert problems == ["tests/model/test_a.py::test_other failed", lines[3].strip()]


def test_copies_and_products_are_measured_wherever_a_device_is(tmp_path: Path):
    findings = Findings(tmp_path / "result.json")
    _gpu_sections.device_speed(findings, "cpu", count=1)
    assert [len(table["rows"]) for table in findings.tables] == [5, 3]
    assert all(row[-1] > 0 for table in findings.tables for row in table["rows"])


def test_time_must_be_positive(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--gpu", "--minutes", "0"]) == 2
    assert "--minutes: expected more than 0, found 0" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_the_rest_of_the_report_is_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The command, end to end on a CPU."""
    for name, value in SECRETS.items():
        if name != "HTTP_PROXY":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--gpu", "--minutes", "30", "--output", str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "gpu-report.json").read_text()
    assert [name for name, value in SECRETS.items() if value in written] == []
    found = {each["name"]: each for each in json.loads(written)["sections"]}
    ran = {name for name, each in found.items() if each["state"] == "passed"}
    assert ran == {"facts", "kernels", "parity", "step tiny-dense", "step tiny-moe", "all-reduce"}
    assert {each["reason"] for name, each in found.items() if name not in ran} == {"no GPU here"}
    verdicts = [row[6] for row in found["parity"]["tables"][0]["rows"]]
    assert verdicts == ["reference", "identical", "within bound", "identical"]
    for name in ("step tiny-dense", "step tiny-moe"):
        measured = {row[0]: row[2] for row in found[name]["tables"][0]["rows"]}
        assert measured["tokens per second"] > 0
        assert len(found[name]["tables"][1]["rows"]) > 10
