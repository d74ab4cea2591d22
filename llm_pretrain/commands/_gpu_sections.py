"""Sections of `doctor --gpu`, each run in a process of its own that `_gpu_report.py` starts.

    python -m llm_pretrain.commands._gpu_sections NAME RESULT.json

The steps of presets are sections too, in `benchmarks/gpu_profile.py`. Without a GPU, the sections that can
run there use the CPU.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from llm_pretrain.commands._launch_options import write_result
from llm_pretrain.commands._launching import PACKAGE_ROOT, launch_environment, this_machine
from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import read_json

_SMI_TIMEOUT = 30
_SMI_FIELDS = (
    *("name", "driver_version", "vbios_version", "memory.total", "memory.used", "mig.mode.current"),
    *("persistence_mode", "compute_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"),
    *("pcie.link.gen.max", "pcie.link.width.current", "clocks.max.sm", "clocks.max.mem", "power.limit"),
)
_SMI_LOAD = (
    *("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu"),
    "clocks_throttle_reasons.active",
)
"""Fields that change with the load."""
_VARIABLES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH", "PYTORCH_", "TRITON_", "NVIDIA_TF32", "OMP_")
"""Beginnings of the names of variables that change what runs; the names are reported, their values not."""
_VOCABULARY = 4096
"""Vocabulary size of the model whose kernels are checked."""
_COPY_BYTES, _PRODUCT_SIZE, _REPEATS = 256 << 20, 8192, 5
"""Bytes of a copy on a GPU, rows and columns of a product's matrices there, and times each is measured."""
_REDUCED_MIB = {"cuda": (1, 16, 64, 256), "cpu": (1, 16)}
"""Sizes of the tensors that are all-reduced."""
_TEST = re.compile(r"^(tests/\S+?\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
"""A line in which pytest reports a test."""

distributed: Any = torch.distributed
"""Untyped: pyright does not see all names that torch documents as exported."""


class Findings:
    """Problems and tables of a section; each addition rewrites the file, so that a killed section keeps them.

    Args:
        file: The result that the report reads.
    """

    def __init__(self, file: Path):
        self.file, self.problems, self.tables = file, list[str](), list[dict[str, Any]]()
        self._write()

    def problem(self, line: str) -> None:
        """Add a line that makes the section fail."""
        self.problems.append(line)
        self._write()

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[object]] = ()) -> None:
        """Add a table; its cells are JSON values."""
        self.tables.append({"title": title, "heads": list(heads), "rows": [list(row) for row in rows]})
        self._write()

    def row(self, *cells: object) -> None:
        """Add a row to the last table."""
        self.tables[-1]["rows"].append(list(cells))
        self._write()

    def _write(self) -> None:
        write_result(self.file, {"problems": self.problems, "tables": self.tables})


def nvidia_smi(fields: Sequence[str] = _SMI_LOAD) -> list[dict[str, str]]:
    """One dictionary for each GPU: nvidia-smi's name of a field, with its unit, to the value as text.

    Fields that the driver does not know are left out. The list is empty if nvidia-smi is missing or fails.
    """
    query = ["nvidia-smi", "--format=csv", f"--query-gpu={','.join(fields)}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if unknown := re.search(r'Field "([\w.]+)" is not a valid field', done.stdout + done.stderr):
        return nvidia_smi([field for field in fields if field != unknown[1]]) if unknown[1] in fields else []
    if done.returncode:
        return []
    heads, *rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(heads, row, strict=False)) for row in rows]


def facts(findings: Findings) -> None:
    """Versions, devices, peer access between GPUs, and the fields of nvidia-smi."""
    from llm_pretrain.checkpoints import environment
    from llm_pretrain.commands.doctor import machine_facts

    machine = this_machine()
    gpus = machine.gpus
    versions: dict[str, object] = {
        **{name: value for name, value in machine_facts(machine) if name not in ("threads", "disk")},
        **environment(torch.device("cuda", 0) if gpus else torch.device("cpu")),
        "cores": machine.cores,
    }
    versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if gpus and distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, import_module("torch.cuda.nccl").version()))
    versions["variables that are set"] = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    findings.table("Versions", ["what", "value"], [[name, _text(value)] for name, value in versions.items()])
    if not gpus:
        if seen := nvidia_smi(["name"]):
            findings.problem(f"nvidia-smi shows {len(seen)} GPUs, torch {torch.__version__} finds none")
        return
    properties = [torch.cuda.get_device_properties(number) for number in range(gpus)]
    heads = ["GPU", "name", "capability", "memory GiB", "free GiB", "SMs", "L2 MiB"]
    findings.table("GPUs", heads)
    for number, each in enumerate(properties):
        memory = [size / 2**30 for size in (each.total_memory, torch.cuda.mem_get_info(number)[0])]
        capability = f"{each.major}.{each.minor}"
        findings.row(
            number, each.name, capability, *memory, each.multi_processor_count, each.L2_cache_size / 2**20
        )
    if rows := nvidia_smi(_SMI_FIELDS):
        findings.table("nvidia-smi", ["field", *(f"GPU {number}" for number in range(len(rows)))])
        for field in rows[0]:
            findings.row(field, *(row.get(field) for row in rows))
    findings.table("Peer access, from row to column", ["GPU", *map(str, range(gpus))])
    for one in range(gpus):
        reached = [other == one or torch.cuda.can_device_access_peer(one, other) for other in range(gpus)]
        findings.row(one, *("yes" if each else "no" for each in reached))
    if gpus > 1 and (links := _topology()):
        findings.table("nvidia-smi topo -m", ["links"], [[line] for line in links])


def _topology() -> list[str]:
    """Lines of nvidia-smi's table of links between GPUs; none if it fails."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).expandtabs(8)
    return [line.rstrip() for line in plain.splitlines() if line.startswith((" ", "GPU", "NIC"))]


def _text(value: object) -> object:
    """A list as one text; any other value as it is."""
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else value


def kernels(findings: Findings) -> None:
    """Check every implementation of every part against its definition, in every type of products."""
    from llm_pretrain.config import multiplies_in_bf16
    from llm_pretrain.model import FIXED, PARTS, Kernels, Part, check_kernels, resolved_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"fp32": torch.float32}
    names = get_type_hints(Kernels)
    asked: list[tuple[Part, str]] = []
    for part in PARTS:
        known = (FIXED[part],) if part in FIXED else get_args(names[part])
        asked.extend((part, name) for name in known if name != "auto")
    if device.type == "cuda":
        bf16 = {"bf16": torch.bfloat16} if multiplies_in_bf16() else {}
        dtypes = {**bf16, "fp16": torch.float16, **dtypes}
        asked.append(("compile", FIXED["compile"]))
    heads = ["part", "kernel", "by default", "type", "error", "of gradients", "bound", "seconds", "verdict"]
    findings.table(f"Kernels on {device.type}", heads)
    for precision, dtype in dtypes.items():
        for part, name in asked:
            config, refused = _kernel_config(part, name, precision, device)
            default = resolved_kernels(config.model, Kernels(), device, dtype)
            is_default = part in FIXED or getattr(default, part) == name
            if refused:
                findings.row(
                    part, name, is_default, precision, None, None, None, None, f"not here: {refused}"
                )
                continue
            chosen = default if part in FIXED else replace(Kernels(), **{part: name})
            for check in check_kernels(config.model, chosen, device, dtype, parts=[part]):
                findings.row(
                    part, check.implementation, is_default, precision, check.forward_error,
                    check.backward_error, check.bound, check.seconds, check.problem or "agrees",
                )  # fmt: skip
                if check.problem:
                    findings.problem(f"{part} {check.implementation} in {precision} {check.problem}")
            _synchronize()  # after an illegal access this raises, which ends the section with its cause


def _kernel_config(part: str, name: str, precision: str, device: torch.device) -> tuple[Config, str]:
    """A small mixture of experts for a check, and why it cannot use this kernel here; empty if it can."""
    from llm_pretrain.config import load_config, resolve_model
    from llm_pretrain.training import build_model

    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 16}
    options = ["--config", "tiny-moe", "--model.first_k_dense_replace", "1"]
    options += [word for field, size in sizes.items() for word in (f"--model.{field}", str(size))]
    options += ["--training.precision", precision]
    plain = resolve_model(load_config(options, needs_data=False), _VOCABULARY)
    if part in ("norm", "optimizer"):  # without a setting
        return plain, ""
    setting = "training.compile" if part == "compile" else f"training.{part}_implementation"
    try:
        named = resolve_model(load_config([*options, f"--{setting}", name], needs_data=False), _VOCABULARY)
        build_model(named, device)
    except ConfigError as error:
        return plain, error.problems[0]
    return plain, ""


def _synchronize() -> None:
    """Wait for all GPUs."""
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.synchronize(number)


def parity(findings: Findings) -> None:
    """Both scripts on one and on all GPUs (without GPUs on one and two processes), bit for bit."""
    widest = this_machine().gpus or 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = str(PACKAGE_ROOT / "llm_pretrain" / "**" / "*.py")
        tokenizer, store, output = (str(folder / name) for name in ("tokenizer", "store", "parity"))
        steps: list[list[str]] = [
            ["tokenizer", "--input", sources, "--vocab_size", "1024", "--output", tokenizer],
            ["prepare", "--input", sources, "--tokenizer", tokenizer, "--output", store],
            [
                *("parity", "--config", "tiny-moe", "--data.sources", f"[{{store: {store}}}]"),
                *("--world-size", ",".join(dict.fromkeys(["1", str(widest)])), "--steps", "10"),
                *("--training.global_batch_size", str(8 * widest), "--training.micro_batch_size", "4"),
                *("--training.precision", "bf16" if torch.cuda.is_available() else "fp32"),
                *("--output", output, "--timeout", "100"),
            ],
        ]
        for step in steps:
            command = [sys.executable, "-m", "llm_pretrain", *step]
            if code := subprocess.run(command, check=False).returncode:
                findings.problem(f"llm-pretrain {step[0]} ended with exit code {code}")
        found = read_json(Path(output) / "parity.json")
    heads = ["path", "W", "A", "B", "precision", "mesh", "verdict", "largest differences", "seconds"]
    findings.table(f"Both scripts, deterministic: {found['verdict']}", heads)
    for cell in found["cells"]:
        largest = ", ".join(
            f"{key} {value:.2g}" for key, value in cell["largest_differences"].items() if value
        )
        verdict = "reference" if cell["reference"] else cell["verdict"]
        split = cell["world_size"], cell["accumulation"], cell["micro_batch_size"]
        findings.row(cell["path"], *split, cell["precision"], cell["mesh"], verdict, largest, cell["seconds"])
        first = cell["first_difference"]
        differs = [f"differs first at {first}"] if first and cell["verdict"] == "differs" else []
        for line in [*differs, *cell["failure"]]:
            findings.problem(f"{cell['path']} W={cell['world_size']}: {line}")


def _seconds(action: Callable[[], object]) -> float:
    """Least time of `_REPEATS` calls of an action, each until all GPUs have finished, after a first call."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        action()
        _synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def device_speed(findings: Findings, device: str = "cuda", count: int | None = None) -> None:
    """Speed of copies between host and GPUs and among GPUs, and of products of large matrices.

    Args:
        device: Type of the devices; on a CPU, for tests, copies and matrices are small.
        count: Number of devices; None takes all GPUs.
    """
    devices = [torch.device(device, number) for number in range(count or torch.cuda.device_count())]
    size = _COPY_BYTES if device == "cuda" else 1 << 20
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = pageable.pin_memory() if device == "cuda" else pageable.clone()
    findings.table("Copies in GB/s (10⁹ bytes)", ["from", "to", "GB/s"])
    copies = [torch.zeros(size, dtype=torch.uint8, device=each) for each in devices]
    for number, own in enumerate(copies):
        for name, host in (("host, pinned", pinned), ("host, pageable", pageable)):
            findings.row(name, f"GPU {number}", size / _seconds(_copy(host, own)) / 1e9)
            findings.row(f"GPU {number}", name, size / _seconds(_copy(own, host)) / 1e9)
        # twice the size: its memory is read and written
        findings.row(f"GPU {number}", "itself", 2 * size / _seconds(_copy(own, own.clone())) / 1e9)
        for other, theirs in enumerate(copies):
            if other != number:
                speed = size / _seconds(_copy(own, theirs)) / 1e9
                findings.row(f"GPU {number}", f"GPU {other}", speed)
    edge = _PRODUCT_SIZE if device == "cuda" else 128
    findings.table(f"Products of matrices of {edge}² in TFLOP/s", ["GPU", "type", "TFLOP/s"])
    for number, place in enumerate(devices):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            matrix = torch.randn(edge, edge, device=place, dtype=dtype)
            speed = 2 * edge**3 / _seconds(lambda x=matrix: x @ x) / 1e12
            findings.row(number, str(dtype).removeprefix("torch."), speed)


def _copy(source: Tensor, target: Tensor) -> Callable[[], Tensor]:
    return lambda: target.copy_(source, non_blocking=True)


def all_reduce(findings: Findings) -> None:
    """Speed of all-reduce over all GPUs by NCCL, without a GPU over two processes by Gloo."""
    processes = this_machine().gpus or 2
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    module = ["-m", __spec__.name, "all_reduce_rank", str(findings.file)]
    command = [*launch, str(processes), *module]
    environment = launch_environment(PACKAGE_ROOT) | {"OMP_NUM_THREADS": "1"}
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(code)


def all_reduce_rank(file: Path) -> None:
    """One rank of `all_reduce`; rank 0 writes the findings."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    findings = Findings(file) if rank == 0 else None
    if findings:
        heads = ["MiB", "milliseconds", "GB/s of the algorithm", "GB/s of the bus"]
        findings.table(f"All-reduce of fp32 over {ranks} {device.type}s by {backend}", heads)
    for mebibytes in _REDUCED_MIB[device.type]:
        tensor = torch.ones((mebibytes << 20) // 4, device=device.type)
        seconds = _seconds(lambda x=tensor: distributed.all_reduce(x))
        if findings:
            # each call of `_seconds` has multiplied every element by the number of ranks
            if not bool((tensor == float(ranks) ** (_REPEATS + 1)).all()):
                findings.problem(f"sums of ones over {ranks} ranks in {mebibytes} MiB are wrong")
            speed = (mebibytes << 20) / seconds / 1e9
            findings.row(mebibytes, seconds * 1e3, speed, speed * 2 * (ranks - 1) / ranks)
    distributed.destroy_process_group()


def gpu_tests(findings: Findings) -> None:
    """The tests marked `gpu` that do not launch whole trainings."""
    _run_tests(findings, launches=False)


def launch_tests(findings: Findings) -> None:
    """The tests marked `gpu` that launch whole trainings."""
    _run_tests(findings, launches=True)


def _run_tests(findings: Findings, *, launches: bool) -> None:
    """Run the checkout's tests marked `gpu`: those in `tests/distributed` launch trainings."""
    marked = [
        path.relative_to(PACKAGE_ROOT).as_posix()
        for path in sorted((PACKAGE_ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    chosen = [name for name in marked if ("distributed" in name) == launches]
    findings.table("Tests", ["test", "result"])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "--tb=line", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, *chosen], cwd=PACKAGE_ROOT, env=launch_environment(PACKAGE_ROOT), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    for name, result, line in _test_results(process.stdout):
        if name:
            findings.row(name, result)
        if line:
            findings.problem(line)
    if (code := process.wait()) and not findings.problems:
        findings.problem(f"pytest ended with exit code {code}")


def _test_results(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Parse and print pytest's output as it comes.

    Yields:
        Name and result of a test, and a line about it if it failed. A line of `--tb=line` comes at the end of
        the output and names no test: its name and result are empty.
    """
    for line in lines:
        print(line, end="", flush=True)
        if match := _TEST.match(line):
            name, result = match[1], match[2].lower()
            yield name, result, f"{name} {result}" if result in ("failed", "error") else ""
        elif re.match(r"^\S+\.py:\d+: ", line) and "Warning" not in line:
            yield "", "", line.strip()[:300]


SECTIONS: dict[str, Callable[[Findings], None]] = {
    each.__name__: each
    for each in (facts, kernels, parity, device_speed, all_reduce, gpu_tests, launch_tests)
}


def main() -> None:
    """Run the section that the command line names."""
    name, file = sys.argv[1], Path(sys.argv[2])
    if name == all_reduce_rank.__name__:
        all_reduce_rank(file)
    else:
        SECTIONS[name](Findings(file))


if __name__ == "__main__":
    main()
