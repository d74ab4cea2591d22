"""The counts of `benchmarks.gpu.kernels` against MFU's FLOPs and against bytes counted by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from fake_steps import DENSE, MOE, fake_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llm_pretrain.model.layers import Linear, RMSNorm
from llm_pretrain.model.sizes import count_parameters, flops_per_token

pytest.importorskip("triton", reason="needs the package triton; see make test-cuda")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's tracing does what its warnings advise against


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_a_step_has_the_flops_that_mfu_counts_and_the_optimizer_its_bytes(model: dict[str, Any]):
    from benchmarks.gpu.kernels import step_launches

    config = fake_config(model, training={"global_batch_size": 2})
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    launches = step_launches(config, squares=rows * length**2)
    expected = flops_per_token(config.model, length) * rows * length
    assert sum(each.mfu_flops for each in launches) == pytest.approx(expected, rel=0.02)
    sizes: dict[str, float] = defaultdict(float)
    for each in launches:
        sizes[each.part] += each.bytes
    parameters = count_parameters(config.model).total
    # parameter, gradient and two moments are read, all but the gradient written
    assert sizes["optimizer"] == pytest.approx(7 * 4 * parameters, rel=0.01)
    # gradients are read for their norms, then read and written
    assert sizes["clipping"] == pytest.approx(3 * 4 * parameters, rel=0.02)


TOKENS, SIZE, WIDTH = 2048, 512, 1024


class Block(nn.Module):
    """A residual addition, its norm and a product."""

    def __init__(self):
        super().__init__()
        self.norm, self.product = RMSNorm(SIZE, 1e-6), Linear(SIZE, WIDTH)

    def forward(self, residual: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + out
        return residual, self.product(self.norm(residual))


def block_bytes() -> int:
    """What is counted for the forward pass of a compiled `Block`."""
    from fake_inductor import Inductor

    inductor, device = Inductor(), torch.device("cuda", 0)
    with inductor.installed(), FakeTensorMode(allow_non_fake_inputs=True), device:
        block = Block()
        block.compile(backend=inductor)
        residual, out = torch.empty(1, TOKENS, SIZE), torch.empty(1, TOKENS, SIZE, dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            block(residual, out)
    return sum(each.bytes for each in inductor.kernels)


def expected_bytes() -> int:
    """The same by hand, in bf16 autocast with fp32 parameters."""
    norm = TOKENS * SIZE * (4 + 2 + 4 + 2) + 4 * SIZE  # residual, out; their sum, its norm; the norm's weight
    cast = SIZE * WIDTH * (4 + 2)
    product = 2 * (TOKENS * SIZE + SIZE * WIDTH + TOKENS * WIDTH)
    return norm + cast + product


def test_norm_and_residual_have_the_bytes_counted_by_hand():
    assert block_bytes() == expected_bytes()
