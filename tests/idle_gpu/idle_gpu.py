"""GPUs that do nothing, for commands that torch's CUDA build runs: `python tests/idle_gpu COMMAND...`.

A library stands in the place of CUDA's driver, its runtime, cuBLAS and NCCL. Device memory is host memory,
and kernels do nothing. All else is torch's own: its dispatcher, allocator and process groups, and its
compiler, whose kernels Triton turns into machine code. A command runs from end to end, but its numbers mean
nothing.

Variables of the environment set the GPUs: IDLE_GPU_COUNT (1), IDLE_GPU_GIB of memory (80), of which
IDLE_GPU_TAKEN_MIB are other processes' (0), IDLE_GPU_CAPABILITY, the major number (9), and
IDLE_GPU_DRIVER, for `environment(driver=...)` alone. With IDLE_GPU_CACHING=1 a command has torch's caching
allocator, without which torch counts no memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.[ch]"))


def build() -> Path:
    """Folder of the compiled library, from a cache by sources and torch's folder.

    Raises:
        RuntimeError: there is no C compiler, or torch is no CUDA build.
    """
    spec = importlib.util.find_spec("torch")
    packages = Path(spec.origin).parent.parent if spec and spec.origin else FOLDER
    headers = next(packages.glob("nvidia/cu*/include/driver_types.h"), None)
    compiler = os.environ.get("CC") or shutil.which("cc")
    if headers is None or compiler is None:
        missing = "a torch built for CUDA" if headers is None else "a C compiler (cc)"
        raise RuntimeError(f"idle GPU: expected {missing} for {sys.executable}, found none")
    facts = b"".join([*(file.read_bytes() for file in SOURCES), os.fsencode(headers)])
    key = hashlib.sha256(facts).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"llm_pretrain-idle-gpu-{os.getuid()}" / key
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        # Triton has the few headers that those of the runtime include from elsewhere
        include = (headers.parent, packages / "triton/backends/nvidia/include")
        files = [str(file) for file in SOURCES if file.suffix == ".c"]
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libcuda.so.1", *files]
        subprocess.run([*command, *(f"-I{each}" for each in include), "-o", str(unfinished)], check=True)
        unfinished.rename(library)
    return folder


def environment(*, caching: bool = False, self_check: bool = False, **settings: int) -> dict[str, str]:
    """Variables with which a process has idle GPUs.

    Args:
        caching: Keep torch's caching allocator. Without it every new tensor is zeros, and so are losses; with
            it freed memory comes back with what it held.
        self_check: Keep the check of kernels, which no kernel passes here.
        settings: Of the GPUs, such as `count=2` for IDLE_GPU_COUNT. With a `driver`, CUDA's own runtime asks
            it, and torch finds no device that it can use.
    """
    folder = build()
    variables = {f"IDLE_GPU_{name.upper()}": str(value) for name, value in settings.items()}
    if "driver" in settings:
        return variables | {"LD_LIBRARY_PATH": str(folder)}
    variables |= {"LD_PRELOAD": str(folder / "libcuda.so.1"), "TRITON_LIBCUDA_PATH": str(folder)}
    # kernels that were chosen by their speed here are no one else's
    variables |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if not caching:
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if not self_check:
        paths = [str(FOLDER / "hook"), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def main(command: list[str]) -> int:
    """Replace this process by a command that has idle GPUs; returns only to refuse."""
    if not command:
        print("usage: python tests/idle_gpu COMMAND...", file=sys.stderr)
        return 2
    try:
        os.execvpe(command[0], command, os.environ | environment(caching="IDLE_GPU_CACHING" in os.environ))
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
