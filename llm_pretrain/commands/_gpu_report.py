"""`doctor --gpu`: runs checks and measurements one after another, and writes their results into two files.

Each section is a process of its own with a time limit, so that a crash or a hang in CUDA ends only that one.
After each, `gpu-report.json` is replaced, and `gpu-report.html`, which shows its content and contains it:

    llm_pretrain   version
    minutes        time limit of the report
    seconds        time since its start
    gpus           number of GPUs
    sections       in the order in which they run, each with
      name, title
      state        passed, failed, stopped (at its limit), skipped, not started (too little time was left),
                   waiting
      reason       why it was stopped, skipped or not started; else empty
      seconds      its duration
      problems     lines; none if it passed
      tables       each with a title, heads, and rows of cells: numbers, texts, true, false, null

`Cleaner` removes values of environment variables, folders, addresses, and names of users and hosts.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_pretrain import __version__
from llm_pretrain.commands._launch_options import choose_output, say, write_result
from llm_pretrain.commands._launching import (
    PACKAGE_ROOT,
    Machine,
    exit_on_signals,
    last_error_lines,
    launch_environment,
    run_limited,
    this_machine,
)
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import read_json, replace_text
from llm_pretrain.tracking import render_page

State = Literal["passed", "failed", "stopped", "skipped", "not started", "waiting"]
_MINUTES = 10.0
"""Time limit of the report for which the sections' limits are given; a longer one extends theirs too."""
_RESERVE_SECONDS = 5.0
"""Time that is left for ending a stopped section and for writing the report."""
_LINES, _LINE_CHARACTERS, _CELL_CHARACTERS = 20, 400, 300
"""Most problems of a section, and most characters of a problem and of a table's cell."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|COOKIE", re.IGNORECASE)
"""Found in the names of variables whose values are secrets."""
_SECRET_CHARACTERS, _VALUE_CHARACTERS = 4, 8
"""Least characters of a variable's value that is removed, for a secret and for any other. A shorter value
could be a part of an ordinary word."""


@dataclass(frozen=True)
class Section:
    """A part of the report, and the process that it runs in: `python -m MODULE ARGUMENT RESULT.json`.

    Args:
        name: Its name in the JSON file.
        title: Its title in the page.
        argument: Its name for the module.
        limit: Seconds after which it is killed.
        least: It is not started if fewer seconds are left.
        needs: Least number of GPUs.
        module: The module that it runs.
        checkout: A file that it needs, relative to the checkout's root; empty if it needs the package only.
    """

    name: str
    title: str
    argument: str
    limit: float
    least: float
    needs: int = 0
    module: str = "llm_pretrain.commands._gpu_sections"
    checkout: str = ""

    def missing(self, machine: Machine) -> str:
        """Why it cannot run on a machine; empty if it can."""
        if machine.gpus < self.needs:
            return "no GPU here" if not machine.gpus else f"needs {self.needs} GPUs, found {machine.gpus}"
        if self.checkout and not (PACKAGE_ROOT / self.checkout).exists():
            return f"needs {self.checkout} of a checkout; the installed package does not have it"
        return ""


def sections(machine: Machine) -> list[Section]:
    """The report's sections, the most valuable first; without a GPU, steps of tiny presets are added."""
    steps = ("gpt2-124m", "mixture", "qwen3-0.6b")
    tiny = () if machine.gpus else ("tiny-dense", "tiny-moe")
    tests: dict[str, Any] = {"needs": 1, "checkout": "tests/model/test_model_gpu.py"}
    step: dict[str, Any] = {"module": "benchmarks.gpu_profile", "checkout": "benchmarks/gpu_profile.py"}
    return [
        Section("facts", "Machine and versions", "facts", limit=60, least=5),
        Section("kernels", "Kernels against their definitions", "kernels", limit=180, least=15),
        Section("parity", "Both scripts, bit for bit", "parity", limit=340, least=30),
        *(Section(f"step {name}", f"Steps of {name}", name, 120, 20, **step) for name in tiny),
        *(Section(f"step {name}", f"Steps of {name}", name, 150, 40, needs=1, **step) for name in steps),
        Section("device", "Copies and matrix products", "device_speed", limit=60, least=10, needs=1),
        Section("all-reduce", "Sums over all GPUs", "all_reduce", 90, 15, needs=2 if machine.gpus else 0),
        Section("tests", "Tests that need a GPU", "gpu_tests", limit=240, least=30, **tests),
        Section("launch tests", "Tests that train on GPUs", "launch_tests", limit=400, least=40, **tests),
    ]  # fmt: skip


@dataclass
class Result:
    """The result of a section; the module's docstring describes the fields."""

    name: str
    title: str
    state: State = "waiting"
    reason: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)


class Cleaner:
    """Removes what identifies a person or a network from texts: folders, names, addresses, variables' values.

    Args:
        environment: Environment variables and their values.
        names: Names of users and hosts.
    """

    def __init__(self, environment: Mapping[str, str], names: Sequence[str]):
        hidden = {value: f"${name}" for name, value in environment.items() if _is_private(name, value)}
        self._values = sorted(hidden.items(), key=lambda item: -len(item[0]))  # one may contain another
        words = "|".join(re.escape(name) for name in names if len(name) > 1)
        self._names = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])") if words else None

    def text(self, text: str) -> str:
        """The text without them; a path keeps its last part, and one in this package its place there."""
        text = text.replace(f"{PACKAGE_ROOT}{os.sep}", "")
        for value, name in self._values:
            text = text.replace(value, name)
        text = re.sub(r"//[^/\s@]+@", "//…@", text)  # user and password in a URL
        # a user's home itself, then the folders of any other absolute path
        text = re.sub(r"(?<![\w.])/(?:home|root|Users)(?:/[\w.-]+)?(?=[\s'\",;:()]|$)", "…", text)
        text = re.sub(r"(?<![\w.])(?:\$\w+)?/(?:[^\s/'\",;()<>]+/)+", "…/", text)
        text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", text)
        return self._names.sub("NAME", text) if self._names else text

    def clean(self, value: Any) -> Any:
        """A JSON value, all of its texts cleaned and shortened."""
        if isinstance(value, Mapping):
            return {key: self.clean(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        return self.text(value)[:_CELL_CHARACTERS] if isinstance(value, str) else value


def _is_private(name: str, value: str) -> bool:
    """Whether a variable's value is removed: all but short ones, versions and texts with spaces."""
    if _SECRET.search(name):
        return len(value) >= _SECRET_CHARACTERS
    is_version = re.fullmatch(r"v?\d+(\.\d+)+\S{0,16}", value) is not None
    return len(value) >= _VALUE_CHARACTERS and not is_version and " " not in value


def this_cleaner() -> Cleaner:
    """The cleaner for this machine and its user."""
    names = [socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn(), Path.home().name]
    with suppress(KeyError, OSError):
        names.append(getpass.getuser())
    return Cleaner(os.environ, [name for name in names if name not in ("localhost", "root", "")])


def write_gpu_report(minutes: float, output: str | None) -> int:
    """Run all sections within `minutes`, and write the report into the folder `output` (None: a new one).

    Returns:
        The exit code: 1 if a section failed or was stopped, else 0.

    Raises:
        ConfigError: `minutes` is not positive and finite.
        OutputError: `output` has files in it.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes: expected more than 0, found {minutes:g}")
    machine, folder = this_machine(), choose_output(output, "gpu-report")
    folder.mkdir(parents=True, exist_ok=output is not None)
    report = Report(sections(machine), machine, minutes, folder)
    with exit_on_signals():
        report.run()
    say(f"\n{report.summary()}")
    for each in report.failed():
        for line in each.problems[:3]:
            say(f"  {each.name}: {line}")
    page = folder / "gpu-report.html"
    say(f"Please send {page}, one file with everything; gpu-report.json beside it has the same for programs.")
    return 1 if report.failed() else 0


class Report:
    """Runs sections and keeps their results.

    Args:
        parts: The sections to run, in this order.
        machine: This machine.
        minutes: Time limit for all of them together.
        folder: Receives the two files.
    """

    def __init__(self, parts: Sequence[Section], machine: Machine, minutes: float, folder: Path):
        self.sections, self.machine, self.minutes, self.folder = parts, machine, minutes, folder
        self.cleaner, self.started = this_cleaner(), time.monotonic()
        self.results = [Result(each.name, each.title) for each in parts]

    def run(self) -> None:
        """Run every section that can run here and in the time left, and write the files after each."""
        say(f"{len(self.sections)} parts in at most {self.minutes:g} minutes, {self.machine.gpus} GPUs")
        for number, (section, result) in enumerate(zip(self.sections, self.results, strict=True), 1):
            heading = f"[{number}/{len(self.sections)}] {section.title}"
            remaining = self.minutes * 60 - _RESERVE_SECONDS - (time.monotonic() - self.started)
            limit = min(section.limit * max(1.0, self.minutes / _MINUTES), remaining)
            if why := section.missing(self.machine):
                result.state, result.reason = "skipped", why
            elif limit < section.least:
                result.state = "not started"
                result.reason = f"takes {section.least:.0f} s or more, {max(0.0, remaining):.0f} s were left"
            else:
                say(f"{heading}, up to {limit:.0f} s …")
                self._run_section(section, result, limit)
            reason = f": {result.reason}" if result.reason else ""
            say(f"{heading}: {result.state}, {result.seconds:.0f} s{reason}")
            self.write()

    def _run_section(self, section: Section, result: Result, limit: float) -> None:
        """Run a section's process, and fill in `result` from what it wrote, even if it was killed."""
        before = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-report-", ignore_cleanup_errors=True) as temporary:
            file, log = Path(temporary) / "result.json", Path(temporary) / "log"
            command = [sys.executable, "-m", section.module, section.argument, str(file)]
            environment = launch_environment(PACKAGE_ROOT) | {"TMPDIR": temporary, "PYTHONWARNINGS": "ignore"}
            code = run_limited(command, seconds=limit, log=log, cwd=PACKAGE_ROOT, environment=environment)
            found: dict[str, Any] = {"problems": [], "tables": []}
            with suppress(OSError, ValueError):
                found = read_json(file)
            result.tables, problems = self.cleaner.clean(found["tables"]), list(found["problems"])
            if code is None:
                result.state, result.reason = "stopped", f"took longer than {limit:.0f} s"
                problems.append(f"{result.reason}; {_last_line(log)}")
            elif code:
                problems += [_ended(code), *last_error_lines(log)]
        result.problems = [self.cleaner.text(line)[:_LINE_CHARACTERS] for line in problems[:_LINES]]
        if result.state == "waiting":
            result.state = "failed" if problems else "passed"
        result.seconds = round(time.monotonic() - before, 1)

    def failed(self) -> list[Result]:
        """Sections that failed or were stopped."""
        return [each for each in self.results if each.state in ("failed", "stopped")]

    def summary(self) -> str:
        """`7 of 10 parts passed; failed: parity; skipped: step mixture`."""
        names: dict[str, list[str]] = {}
        for each in self.results:
            names.setdefault(each.state, []).append(each.name)
        others = [f"{state}: {', '.join(found)}" for state, found in names.items() if state != "passed"]
        passed = f"{len(names.get('passed', []))} of {len(self.results)} parts passed"
        return "; ".join([passed, *others])

    def content(self) -> dict[str, Any]:
        """The JSON file's content."""
        return {
            "llm_pretrain": __version__,
            "minutes": self.minutes,
            "seconds": round(time.monotonic() - self.started, 1),
            "gpus": self.machine.gpus,
            "sections": [asdict(each) for each in self.results],
        }

    def write(self) -> None:
        """Write both files."""
        content = self.content()
        write_result(self.folder / "gpu-report.json", content)
        page = render_page("gpu_report.html", data=content, summary=self.summary(), **content)
        replace_text(self.folder / "gpu-report.html", page)


def _ended(code: int) -> str:
    """`ended with exit code 1` or `ended by SIGSEGV`, from the return code of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def _last_line(log: Path) -> str:
    """The last line of a stopped process's output, in words."""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return f"its last line: {lines[-1].strip()}" if lines else "it printed nothing"
