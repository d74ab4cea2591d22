"""The loss head in chunks against whole logits: sums, gradients, precision, promises that are not kept."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import loss as loss_kernels
from llm_pretrain.model.kernels.choice import Kernels, loss_kernel
from llm_pretrain.model.kernels.loss import LossSums, cross_entropy_sums
from llm_pretrain.training.model_setup import initialize_weights

VOCAB, COEFFICIENT = 1500, 0.01


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 7 rows of 1500 and a shorter last one, the softmax two rows at a time."""
    monkeypatch.setattr(loss_kernels, "CPU_CHUNK", 7 * VOCAB)
    monkeypatch.setattr(loss_kernels, "CPU_SOFTMAX_ELEMENTS", 2 * VOCAB)


def inputs(dtype: torch.dtype = torch.float32, masked: float = 0.3, length: int = 19) -> tuple[Tensor, ...]:
    """hidden [2, length, 16], weight [1500, 16], labels and mask."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, length, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (2, length), generator=generator)
    mask = torch.rand(2, length, generator=generator) >= masked
    return hidden, weight, labels.masked_fill(~mask, -100), mask


def fused(*tensors) -> LossSums:
    return loss_kernels.fused_linear_cross_entropy(*tensors)


def full(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, _: float = 0.0) -> LossSums:
    return cross_entropy_sums(F.linear(hidden, weight), labels, mask)


def gradients(head, tensors: tuple[Tensor, ...], on_loss: float, on_z: float) -> list[Tensor]:
    """Gradients of hidden and weight, the head having been told COEFFICIENT."""
    sums = head(*tensors, COEFFICIENT)
    objective = on_loss * sums.loss if on_loss else 0
    objective = objective + (on_z * sums.z_loss if on_z else 0)
    return list(torch.autograd.grad(objective, tensors[:2]))


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("masked", [0.0, 0.3, 0.999])
def test_sums_and_gradients_are_those_of_whole_logits(dtype, tolerance, masked):
    tensors = inputs(dtype, masked)
    ours, theirs = fused(*tensors, COEFFICIENT), full(*tensors)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert close(mine, other, tolerance)
    assert not ours.token_losses.requires_grad
    assert (ours.token_losses[~tensors[3]] == 0).all()
    for mine, other in zip(
        gradients(fused, tensors, 0.7, 0.7 * COEFFICIENT),
        gradients(full, tensors, 0.7, 0.7 * COEFFICIENT),
        strict=True,
    ):
        assert mine.dtype == dtype
        assert close(mine, other, tolerance)


def test_a_batch_without_loss_tokens_has_zero_sums_and_gradients():
    hidden, weight, labels, mask = inputs()
    tensors = (hidden, weight, labels, torch.zeros_like(mask))
    assert all(float(each.detach().sum()) == 0 for each in fused(*tensors, COEFFICIENT))
    assert all((each == 0).all() for each in gradients(fused, tensors, 1, COEFFICIENT))


@pytest.mark.parametrize(("on_loss", "on_z"), [(1, 0), (0, 1), (0, COEFFICIENT), (2, COEFFICIENT), (1, 1)])
def test_another_combination_of_the_sums_than_was_told_is_computed_anew(on_loss, on_z):
    tensors = inputs(torch.float64)
    ours = gradients(fused, tensors, on_loss, on_z)
    for mine, other in zip(ours, gradients(full, tensors, on_loss, on_z), strict=True):
        assert close(mine, other, 1e-12)


def test_a_second_backward_pass_gives_the_same_gradients():
    hidden, weight, labels, mask = inputs()
    sums = fused(hidden, weight, labels, mask, COEFFICIENT)
    objective = 3 * (sums.loss + COEFFICIENT * sums.z_loss)
    first = torch.autograd.grad(objective, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(objective, (hidden, weight))
    for mine, other in zip(second, first, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_needed_are_returned():
    hidden, weight, labels, mask = inputs()
    expected = gradients(full, (hidden, weight, labels, mask), 1, COEFFICIENT)
    for place in (0, 1):
        pair = [hidden.detach(), weight.detach()]
        pair[place].requires_grad_()
        sums = fused(*pair, labels, mask, COEFFICIENT)
        (sums.loss + COEFFICIENT * sums.z_loss).backward()
        assert close(pair[place].grad, expected[place], 1e-6)
        assert pair[1 - place].grad is None


def test_low_precision_is_that_of_whole_logits():
    """Sums exact for the bf16 logits; gradients as near to the exact ones as those of whole logits."""
    tensors = inputs(length=300)
    with torch.autocast("cpu", torch.bfloat16):
        sums = fused(*tensors, COEFFICIENT)
        ours = gradients(fused, tensors, 1, COEFFICIENT)
        theirs = gradients(full, tensors, 1, COEFFICIENT)
    low = [each.detach().bfloat16().double() for each in tensors[:2]]
    exact = full(*low, *tensors[2:])
    for mine, other in zip(sums, exact, strict=True):
        assert mine.dtype == torch.float32
        assert close(mine.double(), other, 2e-3)  # the logits themselves are rounded
    reference = gradients(
        full,
        tuple(each.detach().double().requires_grad_() for each in tensors[:2]) + tensors[2:],
        1,
        COEFFICIENT,
    )
    for mine, whole, other in zip(ours, theirs, reference, strict=True):
        assert mine.dtype == torch.float32
        error = (mine - other).norm() / other.norm()
        assert error <= 1.1 * (whole - other).norm() / other.norm() < 2e-2


SHAPE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_decoder_trains_alike_with_both(tied, checkpointing):
    config = dataclasses.replace(SHAPE, tie_word_embeddings=tied)
    ids = torch.randint(0, VOCAB, (2, 23), generator=torch.Generator().manual_seed(2))
    found = {}
    for loss in ("full", "fused", "auto"):
        kernels = Kernels(loss=loss, z_loss_coef=COEFFICIENT)
        model = Decoder(config, activation_checkpointing=checkpointing, kernels=kernels)
        initialize_weights(model, 0)
        model.double()
        out = model(ids, labels=ids.roll(-1, 1), loss_mask=ids % 5 > 0)
        ((out.loss_sum + COEFFICIENT * out.z_loss_sum) * 0.01).backward()
        found[loss] = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert ("lm_head.weight" in found[loss]) != tied
        assert model(ids).logits.shape == (2, 23, VOCAB)
    for name, gradient in found["full"].items():
        assert close(found["fused"][name], gradient, 1e-11), name
        assert torch.equal(found["fused"][name], found["auto"][name]), name


def test_the_choice_depends_on_the_vocabulary_alone():
    def choice(vocab_size: int, loss: str = "auto") -> str:
        return loss_kernel(Kernels(loss=loss), vocab_size).__name__.partition("_")[0]

    assert choice(6400) == choice(151936) == "fused"
    assert choice(256) == "full"
    for name in ("full", "fused"):
        assert choice(256, name) == name


def test_in_fp16_a_loss_scale_reaches_the_gradient_before_it_is_rounded():
    """Probabilities below 2^-25 are 0 in fp16, unless they are multiplied by the scale first."""
    hidden = torch.zeros(1, 1, 32)
    hidden[..., 0] = 1.0
    weight = torch.zeros(VOCAB, 32)
    weight[1:, 0] = -20.0  # e^-20 is 2^-29
    weight.requires_grad_()
    labels, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    with torch.autocast("cpu", torch.float16):
        sums = loss_kernels.fused_linear_cross_entropy(hidden, weight, labels, mask, 0.0)
    (gradient,) = torch.autograd.grad(sums.loss * 2.0**16, weight)
    assert gradient[1:, 0].allclose(torch.tensor(math.exp(-20) * 2.0**16), rtol=1e-2)
