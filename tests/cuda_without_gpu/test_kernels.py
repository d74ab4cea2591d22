"""Our Triton kernels: their numbers under the interpreter, and their code for two generations of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton; see make test-cuda")


def errors() -> dict[str, float]:
    """Relative errors by type, from a process in which Triton interprets its kernels."""
    script = Path(__file__).with_name("interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)


def test_the_kernels_compute_what_float64_does():
    found = errors()
    assert len(found) == 4
    for name, error in found.items():
        assert error < (1e-3 if name.endswith("float16") else 1e-6), name


def machine_code(kernel: Any, dtype: str, capability: int, constants: dict[str, Any]) -> Any:
    """The kernel compiled for a GPU; the types of its pointers are chosen by the arguments' names."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"ends": "*i32", "tile_ends": "*i32", "tile_group": "*i32", "labels": "*i64"}
    pointers |= dict.fromkeys(("lse", "target", "softmax_scale", "target_scale"), "*fp32")
    pointers |= dict.fromkeys(("x", "weight", "out", "left", "right", "logits"), f"*{dtype}")
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernels_compile_to_machine_code(capability: int, dtype: str):
    from llm_pretrain.model.kernels import cross_entropy, grouped_mm

    tile = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "PRECISION": "ieee"}
    row = {"COLUMNS": cross_entropy._COLUMNS}
    for kernel, constants in (
        (grouped_mm._rows_times_weights_kernel, tile),
        (grouped_mm._rows_times_rows_kernel, tile),
        (cross_entropy._log_partition_kernel, row),
        (cross_entropy._gradient_kernel, row),
    ):
        compiled = machine_code(kernel, dtype, capability, constants)
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 99 * 1024  # what every GPU since capability 8.0 has for a block
