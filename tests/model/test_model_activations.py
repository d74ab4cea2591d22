"""The table of activations: what the configuration offers, and what each entry computes and keeps."""

import typing

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.kernels.layers import ACTIVATIONS

KINDS = pytest.mark.parametrize("hidden_act", ACTIVATIONS)


def test_the_configuration_offers_the_activations_of_the_table():
    offered = typing.get_type_hints(ModelConfig)["hidden_act"]
    assert set(typing.get_args(offered)) == set(ACTIVATIONS)


def values(columns: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """[5, 7], stored by row or by column as in an expert's activations; with zeros."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    x[0] = 0
    return (x.t().contiguous().t() if columns else x).to(dtype)


@KINDS
@pytest.mark.parametrize("columns", [False, True])
def test_what_is_written_is_the_function_and_its_gradient(hidden_act: str, columns: bool):
    activation = ACTIVATIONS[hidden_act]
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)):
        x, grad = values(columns, dtype).requires_grad_(), values(columns, dtype).flip(0)
        out, grad_x = torch.full_like(grad, torch.nan), torch.full_like(grad, torch.nan)
        activation.write(x.detach(), out)
        activation.write_gradient(grad, x.detach(), grad_x)
        expected = activation.function(x)
        expected.backward(grad)
        torch.testing.assert_close(out, expected.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad_x, x.grad, rtol=tolerance, atol=tolerance)


@KINDS
def test_autograd_keeps_the_input_alone(hidden_act: str):
    """The memory estimate counts the result once, for the product with `up`, and nothing else."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = values(False).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ACTIVATIONS[hidden_act].function(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


@KINDS
def test_not_a_number_stays_one(hidden_act: str):
    x, out = torch.tensor([torch.nan]), torch.zeros(1)
    ACTIVATIONS[hidden_act].write(x, out)
    assert out.isnan().all()
    assert ACTIVATIONS[hidden_act].function(x).isnan().all()


@KINDS
def test_it_is_transformers_function_of_that_name(hidden_act: str):
    from transformers.activations import ACT2FN

    x = values(False, torch.float32)
    assert torch.equal(ACTIVATIONS[hidden_act].function(x), ACT2FN[hidden_act](x))
