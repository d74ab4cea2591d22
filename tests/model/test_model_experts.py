"""The experts' kernels against each other: every routing, every choice, with `torch.compile`."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.kernels import choice as kernels
from llm_pretrain.model.kernels import experts, layers
from llm_pretrain.model.kernels.choice import Kernels, describe_kernels, experts_requirement
from llm_pretrain.model.kernels.experts import (
    experts_reference,
    grouped_experts,
    streamed_experts,
    top_experts,
    triton_experts,
)
from llm_pretrain.model.kernels.layers import ACTIVATIONS, SILU, Activation
from llm_pretrain.model.moe import MoeFeedForward
from llm_pretrain.training.model_setup import build_model

H, INNER, E = 32, 16, 6
KERNELS = {
    "reference": experts_reference,
    "streamed": streamed_experts,
    "grouped": grouped_experts,
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}


def looped_grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """What CUDA's kernel computes, and what it asks of its operands."""
    assert offs.dtype == torch.int32
    assert offs.tolist() == sorted(offs.tolist())
    assert offs[-1] == len(left)
    for operand in (left, right):
        strides = [stride for stride in operand.stride() if stride > 1]
        assert all(stride * operand.element_size() % 16 == 0 for stride in strides)
    bounds = zip([0, *offs.tolist()[:-1]], offs.tolist(), right.unbind(0), strict=True)
    return torch.cat([left[start:stop] @ weight for start, stop, weight in bounds])


@pytest.fixture
def looped(monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", looped_grouped_mm)


def routing(case: str) -> Tensor:
    """int64 [T, K]; `ragged` has an empty expert and sizes that are padded."""
    generator = torch.Generator().manual_seed(3)
    if case == "one token":
        return torch.tensor([[4, 1]])
    if case == "one expert":
        return torch.full((70, 1), 3)
    if case == "one expert for all beside others":
        return torch.stack([torch.full((150,), 2), torch.arange(150) % 2 * 5], 1)
    odds = torch.tensor([0.5, 0.1, 0.02, 1.0, 0.0, 0.3])
    return (torch.rand(333, E, generator=generator) * odds).topk(3).indices


def outcome(kernel: str, case: str, dtype: torch.dtype, activation: Activation = SILU) -> list[Tensor]:
    """Output and the gradients of x, gate_up, down and weights; parameters in fp32, products in `dtype`."""
    generator = torch.Generator().manual_seed(5)
    chosen = routing(case)
    shapes = [(len(chosen), H), (E, 2 * INNER, H), (E, H, INNER), tuple(chosen.shape)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out = KERNELS[kernel](*inputs, chosen, dtype, activation)
    out.backward(torch.randn(out.shape, generator=generator))
    return [out.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.usefixtures("looped")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("case", "hidden_act"),
    [
        *(("ragged", name) for name in ACTIVATIONS),
        ("one token", "silu"),
        ("one expert", "silu"),
        ("one expert for all beside others", "silu"),
    ],
)
@pytest.mark.parametrize("kernel", ["streamed", "grouped"])
def test_kernels_give_the_references_outputs_and_gradients(kernel, case, hidden_act, dtype):
    activation = ACTIVATIONS[hidden_act]
    ours = outcome(kernel, case, dtype, activation)
    theirs = outcome("reference", case, torch.float32, activation)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - reference).norm() <= TOLERANCE[dtype] * reference.norm()
    unused = sorted(set(range(E)) - set(routing(case).flatten().tolist()))
    assert unused
    assert not ours[2][unused].any()
    assert not ours[3][unused].any()


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_streamed_kernel_repeats_bit_for_bit_whichever_library_multiplies(dtype, library, monkeypatch):
    monkeypatch.setattr(layers, "prefers_onednn", lambda: library)
    first, second = outcome("streamed", "ragged", dtype), outcome("streamed", "ragged", dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mine, reference in zip(first, outcome("reference", "ragged", torch.float32), strict=True):
        assert (mine - reference).norm() <= TOLERANCE[dtype] * reference.norm()


def test_no_tokens_give_no_output_and_zero_gradients():
    gate_up, down = torch.ones(E, 2 * INNER, H, requires_grad=True), torch.ones(E, H, INNER)
    out = streamed_experts(
        torch.zeros(0, H), gate_up, down, torch.zeros(0, 2), torch.zeros(0, 2).long(), torch.float32
    )
    assert out.shape == (0, H)
    out.sum().backward()
    assert not gate_up.grad.any()


def test_rows_of_low_type_are_summed_in_fp32():
    """In bf16 256 + 1 is 256, seven times over; 263 rounds to 264."""
    rows = experts._Rows([8], torch.zeros(8, dtype=torch.int64), torch.arange(8)[None])
    total = experts._Sum(rows, torch.zeros(1, 4), torch.bfloat16)
    part = experts._Part(0, rows.token, torch.ones(8, 1))
    total.add(part, torch.tensor([256.0] + [1.0] * 7)[:, None].bfloat16(), torch.ones(1, 4).bfloat16())
    assert total.total().tolist() == [[264.0] * 4]


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_both_libraries_multiply_alike(transposed, monkeypatch):
    left, right = (torch.randn(40, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    left, right = (x.t() if is_t else x for x, is_t in zip((left, right), transposed, strict=True))
    expected = (left.double() @ right.double()).float()
    for library in (True, False):
        monkeypatch.setattr(layers, "prefers_onednn", lambda library=library: library)
        out = torch.empty(40, 40)
        assert layers.product(left, right, out) is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_linear_by_onednn_has_linears_gradients(monkeypatch):
    monkeypatch.setattr(layers, "prefers_onednn", lambda: True)
    found = []
    for apply in (layers.linear, F.linear):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = apply(x, weight)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        found.append((out, x.grad, weight.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=H,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=E,
    num_experts_per_tok=2,
    moe_intermediate_size=INNER,
)


def test_grouped_is_refused_by_name_where_it_cannot_run():
    config = Config(model=CONFIG)
    training = dataclasses.replace(config.training, experts_implementation="grouped", precision="bf16")
    config = dataclasses.replace(config, training=training)
    with pytest.raises(ConfigError) as error:
        build_model(config, torch.device("cpu"))
    assert str(error.value) == (
        "training.experts_implementation: expected auto, streamed or reference, found grouped, which needs a "
        "CUDA device instead of cpu"
    )
    dense = dataclasses.replace(CONFIG, num_experts=0)
    assert experts_requirement(dense, Kernels(experts="grouped"), torch.device("cpu"), torch.float32) is None


WIDER = {"moe_intermediate_size": 20}
MANY = {"num_experts": 1024}
"""What torch's grouped product cannot compute, beside types other than bf16 and older GPUs."""


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "needed"),
    [
        ((9, 0), torch.bfloat16, {}, None),
        ((10, 0), torch.bfloat16, {}, None),
        ((9, 0), torch.float32, {}, "products in bfloat16 instead of float32"),
        ((9, 0), torch.float16, {}, "products in bfloat16 instead of float16"),
        ((9, 0), torch.bfloat16, WIDER, "in multiples of 8 instead of 32 and 20"),
        ((9, 0), torch.bfloat16, MANY, "fewer than 1024 experts instead of 1024"),
        ((8, 0), torch.bfloat16, {}, "compute capability 9.0 instead of 8.0"),
        ((7, 5), torch.float16, {}, "products in bfloat16 instead of float16"),
    ],
)
def test_triton_multiplies_where_torch_cannot(capability, dtype, changes, needed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    config, cuda = dataclasses.replace(CONFIG, **changes), torch.device("cuda")
    shape = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
    assert (needed is None) == (experts.triton_reason(cuda, dtype, shape) is None)
    for has_triton in (False, True):
        monkeypatch.setattr(layers, "HAS_TRITON", has_triton)
        found = experts_requirement(config, Kernels(experts="grouped"), cuda, dtype)
        runs = needed is None or (has_triton and capability >= (8, 0))
        assert (found is None) == runs
        assert runs or needed in found
        kernel = kernels.experts_kernel(Kernels(), cuda, dtype, shape)
        by_torch_or_triton = grouped_experts if needed is None else triton_experts
        assert kernel is (by_torch_or_triton if runs else streamed_experts)


def test_the_kernels_in_use_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(layers, "HAS_TRITON", True)
    cuda = torch.device("cuda", 7)
    assert describe_kernels(CONFIG, Kernels(), cuda, torch.bfloat16) == (
        "attention varlen, loss full, experts grouped by Triton "
        "(torch's kernel needs compute capability 9.0 instead of 8.0)"
    )
    dense = dataclasses.replace(CONFIG, num_experts=0, vocab_size=6400)
    assert (
        describe_kernels(dense, Kernels(), torch.device("cpu"), torch.float32) == "attention sdpa, loss fused"
    )
    reference = describe_kernels(CONFIG, Kernels(experts="reference"), torch.device("cpu"), torch.float32)
    assert reference.endswith("experts reference")


def layer_outcome(kernel: str, compiled: bool) -> list[Tensor]:
    config = dataclasses.replace(CONFIG, hidden_act="relu2", n_shared_experts=1)
    layer = MoeFeedForward(config, Kernels(experts=kernel))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    hidden = torch.randn(2, 12, H, generator=generator).requires_grad_()
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the only type that a compiled grouped_mm takes
        out, sums = run(hidden, torch.ones(2, 12, dtype=torch.bool))
    (out.square().sum() + sums.aux_loss + sums.z_loss).backward()
    return [out.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())]


# torch's own tracing does what its warnings advise against: with autograd functions, and after a graph's end
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["streamed", "grouped"])
def test_a_compiled_layer_of_experts_gives_the_same_numbers(kernel, monkeypatch):
    """Only the streamed kernel stays out of the graph."""
    monkeypatch.setattr(kernels, "grouped_requirement", lambda *_: None)
    torch._dynamo.reset()
    counters.clear()
    compiled = layer_outcome(kernel, compiled=True)
    assert counters["frames"]["ok"] >= 1
    breaks = list(counters["graph_break"])
    assert all("streamed_experts" in each for each in breaks), breaks
    assert bool(breaks) == (kernel == "streamed")
    for mine, theirs in zip(compiled, layer_outcome(kernel, compiled=False), strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (6, 6), (3, 1)])
@pytest.mark.parametrize("signed", [False, True])
def test_the_chosen_experts_are_those_of_the_highest_scores(experts, top_k, signed):
    scores = torch.rand(2, 50, experts, generator=torch.Generator().manual_seed(experts)) - signed * 0.5
    chosen = top_experts(scores, top_k)
    assert chosen.dtype == torch.int64
    expected = scores.topk(top_k).indices
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)


def test_of_equal_scores_no_expert_is_chosen_twice():
    for scores in (torch.zeros(3, 8), torch.tensor([[0.0, -0.0, 1.0, 1.0, 1.0, -1.0]]), torch.zeros(0, 4)):
        assert all(len(set(row)) == 3 for row in top_experts(scores, 3).tolist())
