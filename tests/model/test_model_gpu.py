"""The CUDA paths against the CPU's: attention within documents, grouped experts, the loss head."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels.choice import AUTO, Kernels
from llm_pretrain.model.moe import MoeFeedForward
from llm_pretrain.training.model_setup import initialize_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.05,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
SUMS = ("loss_sum", "z_loss_sum", "aux_loss_sum", "router_z_loss_sum")


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(0))
    document = torch.zeros(3, 64, dtype=torch.int64)
    document[0, 20:] = 1
    document[2, 5:] = 1
    document[2, 6:] = 2
    offsets = torch.tensor([0, 20, 64, 128, 133, 134, 192], dtype=torch.int32)
    layout = {"document_ids": document, "document_offsets": offsets}
    return {"input_ids": ids, "labels": ids.roll(-1, 1), **layout}


def run(
    device: str, dtype: torch.dtype | None, config: ModelConfig = CONFIG, kernels: Kernels = AUTO
) -> tuple[list, dict]:
    model = Decoder(config, kernels=kernels)
    initialize_weights(model, 0)
    model.to(device)
    batch = {name: value.to(device) for name, value in inputs().items()}
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        out = model(**batch)
    sum(getattr(out, name) for name in SUMS).backward()
    gradients = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}
    return [getattr(out, name).double().cpu() for name in SUMS], gradients


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(None, 1e-3), (torch.bfloat16, 5e-2), (torch.float16, 2e-2)]
)
@pytest.mark.parametrize(
    ("experts", "kernels"),
    [
        *((experts, AUTO) for experts in (0, 16, 64)),
        *((0, Kernels(attention=kind)) for kind in ("sdpa", "varlen")),
        (0, Kernels(loss="fused", z_loss_coef=1.0)),
    ],
)
def test_cuda_equals_cpu(dtype, tolerance, experts, kernels):
    if kernels.attention == "varlen" and dtype is None:
        pytest.skip("flash attention has no fp32")
    config = dataclasses.replace(CONFIG, num_experts=experts)
    expected_sums, expected = run("cpu", None, config)
    sums, gradients = run("cuda", dtype, config, kernels)
    for ours, theirs in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm() + 1e-9, name


def test_experts_without_tokens_get_zero_gradients():
    config = dataclasses.replace(CONFIG, num_experts=512, num_experts_per_tok=1)
    _, gradients = run("cuda", torch.bfloat16, config)
    unused = gradients["model.layers.0.mlp.experts.down_proj"].flatten(1).abs().amax(1) == 0
    assert unused.sum() >= 512 - 3 * 64
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_deterministic_algorithms_repeat_bit_for_bit():
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run("cuda", torch.bfloat16), run("cuda", torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_experts_compile_whole_and_give_the_same_numbers():
    layer = MoeFeedForward(CONFIG).cuda()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden, mask = torch.randn(3, 64, CONFIG.hidden_size), torch.ones(3, 64, dtype=torch.bool, device="cuda")
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, sums = run(hidden.cuda(), mask)
        (out.float().square().sum() + sums.aux_loss).backward()
        found.append([out.detach(), *(parameter.grad for parameter in layer.parameters())])
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()
