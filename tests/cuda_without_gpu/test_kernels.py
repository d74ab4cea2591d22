"""Our Triton kernels: their numbers under the interpreter, and their code for two generations of GPUs.

Run as a script with TRITON_INTERPRET=1, which must be set before Triton is imported, it prints the largest
relative error against float64 by type. bf16 is left out: the interpreter multiplies it wrongly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs the package triton; see make test-cuda")

from llm_pretrain.model.kernels import cross_entropy, grouped_mm, loss  # noqa: E402 (need triton)

SIZES = ([5, 0, 70, 1], [0, 0, 3], [64, 64], [0, 130, 0])
"""Rows of each group: empty, less than a tile, exactly one, more than two."""
K, N = 40, 72


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return ((found.double() - expected).norm() / expected.norm()).item()


def _largest(*errors: float) -> float:
    return torch.tensor(errors).max().item()  # NaN if any is, as the built-in is not


def grouped_mm_error(dtype: torch.dtype) -> float:
    """The largest over results and gradients, groups of all sizes, and weights in both memory orders."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for sizes in SIZES:
        for transposed in (False, True):
            x = torch.randn(sum(sizes), K, generator=generator).to(dtype).requires_grad_()
            shape = (len(sizes), N, K) if transposed else (len(sizes), K, N)
            stored = torch.randn(*shape, generator=generator).to(dtype)
            weight = (stored.transpose(1, 2) if transposed else stored).requires_grad_()
            ends = torch.tensor(sizes).cumsum(0).int()
            out = grouped_mm.grouped_mm(x, weight, ends)
            grad = torch.randn(out.shape, generator=generator).to(dtype)
            out.backward(grad)
            x64, weight64 = (each.detach().double().requires_grad_() for each in (x, weight))
            out64 = torch.cat([rows @ part for rows, part in zip(x64.split(sizes), weight64, strict=True)])
            out64.backward(grad.double())
            pairs = ((out, out64), (x.grad, x64.grad), (weight.grad, weight64.grad))
            errors += [_error(*pair) for pair in pairs]
    return _largest(*errors)


def softmax_gradient_error(dtype: torch.dtype) -> float:
    """The largest over losses, squares and gradients; with a z-loss, a masked row, labels in every block."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 2 * cross_entropy._COLUMNS + 77, generator=generator) * 3).to(dtype)
    labels = torch.tensor([0, 4095, 4096, logits.shape[1] - 1, 7])
    mask, scales = torch.tensor([1, 1, 1, 1, 0]).bool(), loss.Scales(0.5, 0.01)
    exact = logits.double().requires_grad_()
    lse = exact.logsumexp(-1)
    losses = torch.where(mask, lse - exact.gather(1, labels[:, None])[:, 0], 0)
    squares = torch.where(mask, lse.square(), 0)
    (scales.loss * losses + scales.z_loss * squares).sum().backward()
    found = loss._softmax_gradient_on_gpu(logits, labels, mask, scales)
    return _largest(_error(found[0], losses), _error(found[1], squares), _error(logits, exact.grad))


def test_the_kernels_compute_what_float64_does():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
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


if __name__ == "__main__":
    checks = (grouped_mm_error, softmax_gradient_error)
    types = (torch.float32, torch.float16)
    print(json.dumps({f"{check.__name__} {dtype}": check(dtype) for check in checks for dtype in types}))
