"""What Inductor generates for whole layers and the loss head: machine code for two generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_steps import DENSE, MOE, fake_batch, fake_config, fake_model
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from llm_pretrain.training.step import Objective

pytest.importorskip("triton", reason="needs the package triton; see make test-cuda")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's tracing does what its warnings advise against

HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[tuple[int, int], ...], int]] = {
    "dense": (DENSE | {"qk_norm": True}, {}, (HOPPER, AMPERE), 24),
    "moe": (MOE, {}, (HOPPER, AMPERE), 35),
    "fp8": (DENSE, {"float8": True}, (HOPPER, ADA), 30),  # below 8.9 there are no such products
    "head": (DENSE, {"loss_implementation": "full"}, (HOPPER, AMPERE), 4),
}
"""Model, training settings, capabilities, and the least number of Triton kernels."""


def machine_code(case: str, capability: tuple[int, int]) -> dict[str, int]:
    """Bytes of each kernel that Inductor generates for one layer, or for the loss head; no graph breaks."""
    from fake_inductor import Inductor, on_capability  # its import of Inductor warns

    counters.clear()
    shape, training, _, _ = CASES[case]
    config = fake_config(shape | {"num_hidden_layers": 1}, training=training)
    inductor = Inductor(to_machine_code=True)
    with on_capability(*capability), inductor.installed(), FakeTensorMode(allow_non_fake_inputs=True):
        decoder = fake_model(config)
        (decoder.lm_head if case == "head" else decoder.model.layers[0]).compile(backend=inductor)
        batch = fake_batch(config)
        with torch.autocast("cuda", torch.bfloat16):
            output = decoder(**batch.model_inputs())
        Objective(config, 1)(output, batch.num_loss_tokens).backward()
    assert not counters["graph_break"]
    return inductor.machine_code


@pytest.mark.parametrize(
    ("case", "capability"), [(case, each) for case in CASES for each in CASES[case][2]], ids=str
)
def test_every_generated_kernel_becomes_machine_code(case: str, capability: tuple[int, int]):
    found = machine_code(case, capability)
    assert len(found) >= CASES[case][3]
    assert min(found.values()) > 1000
