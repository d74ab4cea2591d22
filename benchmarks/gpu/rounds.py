"""Runs a round on this machine's GPU: its parts, each with a time limit, whatever became of the others.

Round 1 is first contact (kernels, tests, both scripts, waits of the host), round 2 speed beside other
training loops, round 3 where a step's time goes. The machine needs no network: `make gpu-pack` makes what it
lacks. A round ends itself after --seconds. Results are appended as they come: results.jsonl has a line for
each, log.txt the end of each part's output, summary.txt the table that is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import ROOT, python_path
from benchmarks.reporting import SkippedError, end
from llm_pretrain.errors import ConfigError, OutputError

PACKED, WHEELS = ROOT / ".gpu", ROOT / ".whl"
"""What `make gpu-pack` makes: stores and counts, and wheels that the GPU machine lacks."""
_LOG_BYTES = 300_000
_SUMMARY_CHARACTERS = 11_400
"""The summary stays readable where only the end of a remote command's output is shown."""
_DRY_PATIENCE = 6
"""Factor on the limits on CPUs."""


@dataclass
class Part:
    """A part of a round.

    Args:
        name: Unique in the round.
        function: `module.function` of this package; it is called with a `parts.Context` and `words`.
        words: Its arguments.
        limit: Seconds.
        least: It is not started if fewer seconds are left.
    """

    name: str
    function: str
    words: tuple[str, ...]
    limit: float
    least: float = 15.0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    state: str = "waiting"


_MOE, _JOINED = "finegrained-moe-136m", "joined=data.isolate_documents:false"
_FLOAT8, _CHECKPOINTING = (
    "float8=training.float8:true",
    "checkpointing=training.activation_checkpointing:true",
)
_EAGER = "uncompiled=training.compile:off"


def _speed(name: str, case: str, *variants: str, limit: float) -> list[Part]:
    return [Part(name, "speed.variants", (case, *variants), limit)]


def _peer(kind: str, case: str, limit: float) -> list[Part]:
    return [Part(f"{kind}-{case.split('-')[0]}", "peers.measure", (kind, case), limit)]


def rounds() -> dict[str, list[list[Part]]]:
    """The groups of each round, in order; the parts of a group run at the same time."""
    facts = Part("facts", "contact.facts", (), 60, 5)
    return {
        "1": [
            [facts],
            [Part("kernels", "contact.kernels", (), 150),
             Part("tests", "contact.tests", ("4", "units"), 160)],
            [Part("start-gpt2", "contact.start", ("gpt2-124m", "30"), 150)],
            [Part("launches", "launches.compare", ("tiny-moe", "tiny-dense", "quickstart"), 220),
             Part("waits", "contact.waits", ("tiny-dense", "tiny-moe", "quickstart"), 110)],
            [Part("start-moe", "contact.start", ("tiny-moe", "30"), 90)],
            [Part("launch-tests", "contact.tests", ("7", "launches"), 200, 40)],
        ],
        "2": [
            [facts],
            _speed("ours-gpt2", "gpt2-124m", "default", _JOINED, limit=170),
            _peer("nanogpt", "gpt2-124m", 90),
            _speed("ours-qwen3", "qwen3-0.6b", "default", _JOINED, limit=180),
            _peer("loop", "qwen3-0.6b", 90),
            _peer("trainer", "gpt2-124m", 90),
            _speed("ours-moe", _MOE, "default", "twin", limit=120),
            _peer("trainer", "qwen3-0.6b", 130),
            _speed("memory-gpt2", "gpt2-124m", _EAGER, "peers_size=training.micro_batch_size:32", limit=80),
            _speed("memory-qwen3", "qwen3-0.6b", _EAGER, "peers_size=training.micro_batch_size:2", limit=80),
            _speed("ours-minimind3", "minimind3-64m", "default", _JOINED, limit=100),
            _peer("loop", "gpt2-124m", 80),
            _speed("ours-mixture", "mixture", "default", "twin", limit=150),
        ],
        "3": [
            [facts],
            [Part("where-gpt2", "where.measure", ("gpt2-124m",), 100)],
            [Part("where-qwen3", "where.measure", ("qwen3-0.6b",), 120)],
            [Part("where-moe", "where.measure", (_MOE,), 100)],
            _speed("variants-gpt2", "gpt2-124m", "default", _EAGER, _FLOAT8, _CHECKPOINTING, _JOINED,
                   "sdpa=training.attention_implementation:sdpa",
                   "logits=training.loss_implementation:full,training.micro_batch_size:32", limit=220),
            _speed("variants-qwen3", "qwen3-0.6b", "default", _FLOAT8, _CHECKPOINTING, _JOINED, limit=150),
            [Part("where-mixture", "where.measure", ("mixture",), 100)],
            _speed("variants-moe", _MOE, "default", "triton=training.experts_implementation:triton", _EAGER,
                   limit=110),
        ],
    }  # fmt: skip


_RATIOS = [
    ("gpt2-124m", "nanogpt", 1.1), ("gpt2-124m", "trainer", 1.5), ("gpt2-124m", "loop", None),
    ("qwen3-0.6b", "loop", 1.3), ("qwen3-0.6b", "trainer", 1.5),
]  # fmt: skip
"""Case, peer, and the least ratio of our speed on joined documents to the peer's that is aimed at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("round", nargs="?", default="1", choices=list(rounds()), help="default: 1")
    parser.add_argument("parts", nargs="*", metavar="PART", help="these parts only (default: all)")
    parser.add_argument("--dry", action="store_true", help="on CPUs with tiny shapes: does every part run?")
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("OUT") or "runs/gpu"), metavar="FOLDER",
        help="for the results (default: $OUT, or runs/gpu)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, help="end after so many (default: 470; --dry: 3600)")


def run(arguments: argparse.Namespace) -> int:
    """Run the round and print its summary last; 1 if a part did not pass, else 0."""
    import torch

    groups = [
        [part for part in group if not arguments.parts or part.name in arguments.parts]
        for group in rounds()[arguments.round]
    ]
    parts = [part for group in groups for part in group]
    if unknown := sorted(set(arguments.parts) - {part.name for part in parts}):
        known = ", ".join(part.name for group in rounds()[arguments.round] for part in group)
        raise ConfigError(f"PART: expected some of {known}, found {', '.join(unknown)}")
    if not arguments.dry and not torch.cuda.is_available():
        raise SkippedError("needs a CUDA device, found none; --dry runs it on the CPU with tiny shapes")
    if not arguments.dry and not (PACKED / "stores").is_dir():
        raise ConfigError(f"{PACKED / 'stores'}: expected packed stores, found none; run make gpu-pack")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{arguments.output}: expected a folder that can be made, found: {error.strerror}"
        raise OutputError(f"--output {found}") from error
    results = arguments.output / "results.jsonl"
    before = results.stat().st_size if results.exists() else 0  # earlier calls' rows are not of this one
    with tempfile.TemporaryDirectory(prefix="gpu-round-") as work:
        _Round(arguments.output.absolute(), Path(work), arguments.dry).run(groups, arguments.seconds)
    end()
    is_judged = not arguments.dry and torch.cuda.get_device_name() != "idle GPU"  # tests/idle_gpu
    text = summary(results, parts, before, is_judged=is_judged)
    (arguments.output / "summary.txt").write_text(text + "\n")
    print(text, flush=True)
    return int(any(part.state != "passed" for part in parts))


class _Round:
    """Starts parts as processes and records what became of them.

    Args:
        output: Folder of the results.
        work: Folder for temporary files.
        is_dry: Whether it runs on CPUs.
    """

    def __init__(self, output: Path, work: Path, is_dry: bool):
        self.output, self.work, self.is_dry = output, work, is_dry
        self.results, self.log = output / "results.jsonl", output / "log.txt"
        self.results.touch()
        self.environment = self._environment()

    def run(self, groups: list[list[Part]], seconds: float | None) -> None:
        """Run all groups; on SIGTERM or Ctrl-C end the parts that run, and no more are started."""
        deadline = time.monotonic() + (seconds or (3600 if self.is_dry else 470))
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for group in groups:
                self._run_group(group, deadline)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)
            for part in (part for group in groups for part in group if part.state == "running"):
                _kill(part)
                self._look_at(part)

    def _run_group(self, group: list[Part], deadline: float) -> None:
        for part in group:
            left = deadline - time.monotonic()
            if left < part.least:
                part.state = f"not started, {max(0.0, left):.0f} s were left"
                continue
            part.limit = min(part.limit * (_DRY_PATIENCE if self.is_dry else 1), left)
            self._start(part)
        while running := [part for part in group if part.state == "running"]:
            time.sleep(0.2)
            for part in running:
                self._look_at(part)

    def _start(self, part: Part) -> None:
        context = {
            "part": part.name, "function": part.function, "words": part.words, "is_dry": self.is_dry,
            "output": str(self.output), "work": str(self.work),
        }  # fmt: skip
        with (self.work / f"{part.name}.log").open("wb") as log:
            part.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.parts", json.dumps(context)], cwd=ROOT,
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        part.started, part.state = time.monotonic(), "running"
        print(f"{time.strftime('%H:%M:%S')} {part.name}: up to {part.limit:.0f} s", flush=True)

    def _look_at(self, part: Part) -> None:
        """Record the part's end, once it has ended or its limit has passed."""
        assert part.process is not None
        code, seconds = part.process.poll(), time.monotonic() - part.started
        if code is None and seconds <= part.limit:
            return
        _kill(part)  # or what it has left running
        if code is None:
            part.state = f"stopped at its limit of {part.limit:.0f} s"
        else:
            part.state = "passed" if code == 0 else f"failed with exit code {code}"
        row = {"part": part.name, "what": "state", "value": part.state, "seconds": round(seconds, 1)}
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        text = (self.work / f"{part.name}.log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        with self.log.open("a") as file:
            file.write(f"\n=== {part.name}: {part.state}, {seconds:.0f} s\n{text}\n")
        print(f"{time.strftime('%H:%M:%S')} {part.name}: {part.state}, {seconds:.0f} s", flush=True)
        if part.state != "passed":
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
            print("".join(f"    {line[:200]}\n" for line in lines[-6:]), end="", flush=True)

    def _environment(self) -> dict[str, str]:
        """The parts' environment, which their children inherit; carried wheels are unpacked onto its path."""
        path = python_path()
        if wheels := sorted(WHEELS.glob("*.whl")):
            site = self.work / "wheels"
            for wheel in wheels:
                zipfile.ZipFile(wheel).extractall(site)
            # compiled now: compiled when a test imports it, a package's SyntaxWarning would fail the test
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-j", "0", str(site)],
                check=False,
            )
            path += f"{os.pathsep}{site}"
        quiet = {"PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        # no part has time to wait for another's threads on the CPUs of a dry round
        dry = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.is_dry else {}
        return os.environ | {"PYTHONPATH": path} | quiet | offline | dry


def _kill(part: Part) -> None:
    """End the part and whatever it started."""
    assert part.process is not None
    children: list[psutil.Process] = []
    if part.process.poll() is None:
        with suppress(psutil.Error):
            children = psutil.Process(part.process.pid).children(recursive=True)
    with suppress(OSError):
        os.killpg(part.process.pid, signal.SIGKILL)  # the session that it was started in
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    part.process.wait()


def summary(results: Path, parts: list[Part], before: int = 0, *, is_judged: bool = True) -> str:
    """The table of results that are shown, our speed over the peers', and what became of each part.

    Args:
        results: The file of all results.
        parts: Of the round.
        before: Bytes of the file that earlier calls have written.
        is_judged: Whether goals are shown.
    """
    rows: list[dict[str, Any]] = [json.loads(line) for line in results.read_bytes()[before:].splitlines()]
    names = {part.name for part in parts}
    shown = [row for row in [*rows, *_ratios(rows)] if row.get("show") and row["part"] in names | {""}]
    lines = [_line(row if is_judged else row | {"goal": None}) for row in shown]
    head = ["| part | what | value | goal | more |", "|---|---|---|---|---|"]
    states = ["", *(f"{part.name}: {part.state}" for part in parts)]
    room = _SUMMARY_CHARACTERS - sum(len(line) + 1 for line in [*head, *states])
    kept: list[str] = []
    for line in reversed(lines):  # the last ones, if not all have room; results.jsonl has all
        room -= len(line) + 1
        if room < 0:
            break
        kept.insert(0, line)
    return "\n".join(["", *head, *kept, *states])


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of our speed over each peer's, on joined documents as the peers train, and on isolated ones; and
    of a peer's peak memory over ours at the same micro batch."""
    sides = {(row["case"], row["side"]): row for row in rows if "side" in row}
    found = []

    def add(what: str, ratio: float, goal: float | None) -> None:
        found.append({"part": "", "what": what, "value": ratio, "goal": goal, "show": True})

    for case, peer, least in _RATIOS:
        if (theirs := sides.get((case, peer))) is None:
            continue
        for side, goal in (("joined", least), ("default", None)):
            if ours := sides.get((case, side)):
                add(f"{case}: tokens/s of ours ({side}) / {peer}", ours["value"] / theirs["value"], goal)
        for side in ("joined", "peers_size"):
            ours = sides.get((case, side), {})
            if ours.get("peak_gib") and theirs["micro_batch"].split(",")[0] == ours["micro_batch"]:
                add(f"{case}: peak memory of {peer} / ours", theirs["peak_gib"] / ours["peak_gib"], 1.0)
    return found


def _line(row: dict[str, Any]) -> str:
    goal, value = row.get("goal"), row["value"]
    judged = f"≥ {_cell(goal)}: {'met' if value >= goal else '**missed**'}" if goal else ""
    known = {"part", "t", "what", "value", "unit", "show", "goal", "case", "side"}
    more = "; ".join(f"{key} {_cell(row[key])}" for key in row if key not in known and row[key] is not None)
    unit = row.get("unit") or ""
    cells = [row["part"], row["what"][:90], f"{_cell(value)[:160]} {unit}".rstrip(), judged, more[:170]]
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return " · ".join(map(_cell, value))
    return str(value)
