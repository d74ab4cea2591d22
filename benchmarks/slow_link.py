"""Training over a slow link between two machines: bytes and seconds of a step, and what predicts them.

The machines are two network namespaces on this one, with two processes each, started by `torchrun`. Needs
root on Linux and /dev/net/tun. Bytes are those that the interface of the first machine sends, with headers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.launching import ROOT, SCRIPTS, add_store_option, environment, token_store, training_options
from benchmarks.reporting import SkippedError, report
from benchmarks.two_machines import ADDRESSES, JUMBO, Network, Quality, two_machines, why_not
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import open_stores
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.decoder import full_precision_modules
from llm_pretrain.training.model_setup import build_model

QUICK = ["--steps", "10", "--ways", "ddp"]
WORLD_SIZE, MACHINES = 4, 2
WARMUP_STEPS, NUM_LAYERS = 10, 4
WAYS = {
    "ddp": [],
    "fsdp": ["--distributed.strategy", "fsdp"],
    "hsdp": ["--distributed.strategy", "fsdp", "--distributed.dp_replicate_size", str(MACHINES)],
}
"""Ways to train on the four processes, and their options; with hsdp a replica to each machine."""

MODEL = ["--model.hidden_size", "128", "--model.intermediate_size", "352"]
MODEL += ["--model.num_hidden_layers", str(NUM_LAYERS)]
BATCH = ["--training.micro_batch_size", "2", "--training.precision", "fp32"]
PORT = "29517"
HEADERS = 66
"""Bytes of Ethernet, IP and TCP, with its time stamps, of each frame."""
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Measured:
    """Of a step: bytes from the first machine to the second, and seconds."""

    bytes: float
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s in each direction")
    parser.add_argument("--round_trip", type=float, default=20.0, help="ms")
    parser.add_argument("--steps", type=int, default=20, help="measured")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints bytes and seconds per step of each way, beside their predictions."""
    if reason := why_not():
        raise SkippedError(f"{reason}; it makes two network namespaces")
    if arguments.steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, found {arguments.steps}")
    if arguments.rate <= 0 or arguments.round_trip < 0:
        raise ConfigError(
            f"--rate, --round_trip: expected more than 0 and 0 or more, found {arguments.rate:g} and "
            f"{arguments.round_trip:g}"
        )
    rate, round_trip = arguments.rate * 1e6 / 8, arguments.round_trip / 1e3
    measured: dict[str, Measured] = {}
    with token_store(arguments.store) as store:
        for way in arguments.ways:
            alone = seconds_alone(store, arguments.steps)
            with two_machines(Quality(round_trip / 2, rate=rate)) as network:
                found = measured[way] = train_over(network, way, store, arguments.steps)
            num_bytes, trips = predicted_bytes(way, store), predicted_round_trips(way)
            parts = alone, num_bytes / rate, trips * round_trip
            compare(f"MB per step over the link, `{way}`", found.bytes / 1e6, num_bytes / 1e6, 0.02)
            note = "{:.2f} of computing alone, {:.2f} of bytes, {:.2f} of round trips".format(*parts)
            compare(f"seconds per step, `{way}`", found.seconds, sum(parts), 0.2, note)
    if {"fsdp", "hsdp"} <= set(measured):
        share = measured["hsdp"].bytes / measured["fsdp"].bytes
        report("bytes of `hsdp` / `fsdp`", f"{share:.3f}", bound="≤ 0.5", met=share <= 0.5)


def compare(what: str, found: float, predicted: float, tolerance: float, note: str = "") -> None:
    """Report a figure beside its prediction."""
    off = found / predicted - 1
    figure = f"{found:.2f}, predicted {predicted:.2f}: {off:+.1%}"
    report(what, figure, bound=f"within {tolerance:.0%}", met=abs(off) <= tolerance, note=note)


def options_of(store: Path, folder: Path, steps: int, way: str, processes: int) -> list[str]:
    """Of the script: one micro batch a step and process."""
    return [
        *training_options("tiny-dense", store, folder), *MODEL, *BATCH, *WAYS[way],
        *("--training.global_batch_size", str(2 * processes), "--training.max_steps", str(steps)),
        *("--distributed.cpu_threads", "1", "--logging.report", "false"),
    ]  # fmt: skip


def seconds_alone(store: Path, steps: int) -> float:
    """Mean seconds of a step of as many processes as train over the link, none of which waits for another."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(number) for number in range(WORLD_SIZE)]
        commands = [
            [sys.executable, SCRIPTS["torchrun"], *options_of(store, folder, WARMUP_STEPS + steps, "ddp", 1)]
            for folder in folders
        ]
        with started(commands) as processes:
            for process in processes:
                check_end(process)
        rows = [
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in folders
        ]
    times = [row["perf/step_seconds"] for each in rows for row in each if row["step"] > WARMUP_STEPS]
    return sum(times) / len(times)


def train_over(network: Network, way: str, store: Path, steps: int) -> Measured:
    """Train on both machines, and count from the row of step `WARMUP_STEPS` to the last."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, last = Path(temporary) / "run", WARMUP_STEPS + steps
        options = options_of(store, folder, last, way, WORLD_SIZE)
        commands = [
            network.command(
                machine,
                [
                    *("env", f"GLOO_SOCKET_IFNAME={network.interfaces[machine]}"),
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(MACHINES)),
                    *("--node_rank", str(machine), "--nproc_per_node", str(WORLD_SIZE // MACHINES)),
                    *("--master_addr", ADDRESSES[0], "--master_port", PORT, SCRIPTS["torchrun"], *options),
                ],
            )
            for machine in range(MACHINES)
        ]
        with started(commands) as machines:
            seen = {}
            for step in (WARMUP_STEPS, last):
                wait_for_row(folder / "metrics.jsonl", step, machines)
                seen[step] = time.monotonic(), sent_bytes(machines[0], network.interfaces[0])
            for machine in machines:
                check_end(machine)
    (began, before), (ended, after) = seen.values()
    return Measured((after - before) / steps, (ended - began) / steps)


@contextmanager
def started(commands: Sequence[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes, whose output goes to files; what is left of them at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for number, command in enumerate(commands):
                with (Path(temporary) / str(number)).open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            yield processes
        except (ChildProcessError, subprocess.TimeoutExpired) as error:
            outputs = [file.read_text(errors="replace")[-3000:] for file in sorted(Path(temporary).iterdir())]
            raise SystemExit(f"{error}:\n" + "\n".join(outputs)) from None
        finally:
            for process in processes:
                if process.poll() is None:
                    whole = psutil.Process(process.pid)
                    for each in [*whole.children(recursive=True), whole]:
                        each.kill()
                process.wait()


def check_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that must end well."""
    if process.wait(TIMEOUT_SECONDS):
        raise ChildProcessError(f"process {process.pid} left with exit code {process.returncode}")


def wait_for_row(file: Path, step: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return within some milliseconds after the row of a step is written."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (file.exists() and f'"step": {step},' in file.read_text()):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            raise ChildProcessError(f"step {step} was not reached")
        time.sleep(0.005)


def sent_bytes(process: subprocess.Popen[bytes], interface: str) -> int:
    """What an interface of a process's namespace has sent, headers included."""
    for line in Path(f"/proc/{process.pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise ChildProcessError(f"{interface} has gone")


def predicted_bytes(way: str, store: Path) -> float:
    """Bytes of a step from one machine to the other, by the sizes of its collectives.

    Gloo's collectives are rings in the order of the ranks, of which one edge leads from the first machine to
    the second: it carries (W - 1) / W of what is gathered, and twice that of what is all-reduced. Gloo
    reduce-scatters by an all-reduce. FSDP gathers layers for the forward and for the backward pass, and what
    is in full precision once.
    """
    config = resolved(store)
    with torch.device("meta"):
        model = build_model(config, torch.device("cpu"))
    sizes = {parameter: parameter.nbytes for parameter in model.parameters()}
    in_full = {each for module in full_precision_modules(model) for each in module.parameters()}
    whole, full = sum(sizes.values()), sum(sizes[each] for each in in_full)
    edge = (WORLD_SIZE - 1) / WORLD_SIZE
    payload = {
        "ddp": 2 * edge * whole,
        "fsdp": edge * (2 * (whole - full) + full) + 2 * edge * whole,
        "hsdp": whole,  # two pairs of ranks, each of which all-reduces half of the gradients
    }[way]
    return payload * (1 + HEADERS / (JUMBO - HEADERS))


def resolved(store: Path) -> Config:
    """The configuration of all ways, with the store's vocabulary."""
    config = load_config(options_of(store, Path("run"), WARMUP_STEPS, "ddp", 1))
    return resolve_model(config, open_stores(config)[0].vocab_size)


def predicted_round_trips(way: str) -> float:
    """Round trips of a step in which processes wait, whatever the rate.

    Of Gloo's rings every other hop leads to the other machine, and a sender waits until the receiver has
    announced itself: an all-reduce of a few numbers takes as many round trips as it has ranks (86 ms of 4
    ranks and 43 ms of 2 at 20 ms), a gather half as many. Small all-reduces are those of the counts, the
    sums and the stop signals, and the norm's where it is summed over machines.
    """
    ring, pair, gather = WORLD_SIZE, MACHINES, WORLD_SIZE / 2
    return {
        "ddp": (1 + 3) * ring,  # all gradients are one bucket
        "fsdp": (2 * NUM_LAYERS + 1) * gather + (NUM_LAYERS + 1 + 4) * ring,
        "hsdp": (NUM_LAYERS + 1) * pair + 3 * ring,
    }[way]
