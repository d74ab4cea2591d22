"""The choice of kernels: which implementation computes experts, attention and loss.

The choice depends on configuration, device, type and sizes only, never on timing. The implementations of a
part have one signature and agree up to rounding; `self_check.py` compares them with their definitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.model.kernels.experts import (
    experts_reference,
    grouped_experts,
    grouped_requirement,
    streamed_experts,
    triton_experts,
    triton_reason,
    triton_requirement,
)
from llm_pretrain.model.kernels.layers import is_gpu
from llm_pretrain.model.kernels.loss import LossSums, full_linear_cross_entropy, fused_linear_cross_entropy

_FUSED_FROM = 1024
"""Vocabulary size from which `auto` is `fused`; whole logits of a smaller vocabulary are as fast."""
_VARLEN_HEAD_DIM = 256
"""The largest head size of flash attention."""


@dataclass(frozen=True)
class Kernels:
    """Names of implementations, as in the configuration's `training` section; `auto` is the fastest.

    Args:
        experts: `auto`, `streamed`, `grouped`, `triton` (`grouped` by our own kernel only) or `reference`.
        attention: `auto`, `sdpa` or `varlen`.
        loss: `auto`, `full` or `fused`.
        z_loss_coef: The objective's coefficient of the z-loss, for loss kernels that compute gradients in the
            forward pass.
    """

    experts: Literal["auto", "streamed", "grouped", "triton", "reference"] = "auto"
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    loss: Literal["auto", "full", "fused"] = "auto"
    z_loss_coef: float = 0.0


AUTO = Kernels()
"""The fastest implementation of every part."""


def configured_kernels(config: Config) -> Kernels:
    """The configured implementations, `auto` included."""
    training = config.training
    return Kernels(
        experts=training.experts_implementation,
        attention=training.attention_implementation,
        loss=training.loss_implementation,
        z_loss_coef=training.z_loss_coef,
    )


def attention_implementation(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> Literal["sdpa", "varlen"]:
    """The implementation of attention for products in `dtype`; pass it to `document_layout`.

    `auto` is `varlen` on CUDA from compute capability 8.0 on, in bf16 and fp16, without dropout, without
    deterministic algorithms, and for head sizes of at most 256 that are multiples of 8. Else it is `sdpa`.
    """
    if kernels.attention != "auto":
        return kernels.attention
    is_supported = (
        is_gpu(device)
        and dtype in (torch.bfloat16, torch.float16)
        and supports_varlen(head_dim, dropout)
        and not torch.are_deterministic_algorithms_enabled()
        and _capability(device) >= (8, 0)
    )
    return "varlen" if is_supported else "sdpa"


def supports_varlen(head_dim: int, dropout: float) -> bool:
    """Whether flash attention over documents, in bf16 and fp16, supports this head size and dropout."""
    return dropout == 0 and head_dim <= _VARLEN_HEAD_DIM and head_dim % 8 == 0


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def experts_requirement(
    config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The unmet requirement of the configured experts' kernel, in words; None if it can run.

    Args:
        config: The model's shape.
        kernels: The configured implementations.
        device: The device of the training.
        dtype: Type of the matrix products in training.
    """
    if not config.moe_layers:
        return None
    if kernels.experts == "triton":
        return triton_requirement(device)
    return grouped_requirement(device, dtype, _shape(config)) if kernels.experts == "grouped" else None


def _shape(config: ModelConfig) -> tuple[int, int, int]:
    """E, H and I."""
    return config.num_experts, config.hidden_size, config.expert_intermediate_size


def experts_kernel(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shape: Sequence[int]
) -> Callable[..., Tensor]:
    """The experts' kernel for products in `dtype`, with `shape` (E, H, I).

    The kernel's arguments are x [T, H], gate_up [E, 2I, H], down [E, H, I], weights [T, K], chosen [T, K],
    dtype and activation. The kernel returns [T, H].

    `grouped` and `triton` fall back to `streamed` where they cannot run, for example in fp32 samples of a
    model that trains in bf16. Training never falls back, because it checks `experts_requirement` before.
    """
    return {
        "reference": experts_reference,
        "streamed": streamed_experts,
        "grouped": grouped_experts,
        "triton": triton_experts,
    }[_experts_implementation(kernels, device, dtype, shape)]


def _experts_implementation(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, shape: Sequence[int]
) -> Literal["streamed", "grouped", "triton", "reference"]:
    if kernels.experts in ("reference", "streamed"):
        return kernels.experts
    if kernels.experts == "triton":
        return "streamed" if triton_requirement(device) else "triton"
    if grouped_requirement(device, dtype, shape):
        return "streamed"
    return "triton" if triton_reason(device, dtype, shape) else "grouped"


def resolved_kernels(
    config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Kernels:
    """The implementations that training uses, none of them `auto`. Experts are `triton` also where `grouped`
    falls back to our Triton kernel. `experts_requirement` describes the arguments."""
    head_dim, dropout = config.attention_head_dim, config.attention_dropout
    return replace(
        kernels,
        experts=_experts_implementation(kernels, device, dtype, _shape(config)),
        attention=attention_implementation(kernels, device, dtype, head_dim, dropout),
        loss=loss_implementation(kernels, config.vocab_size or 0),
    )


def describe_kernels(config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """The implementations that training uses, in words, and the reason if experts use Triton.

    `experts_requirement` describes the arguments.
    """
    chosen = resolved_kernels(config, kernels, device, dtype)
    parts = [f"attention {chosen.attention}", f"loss {chosen.loss}"]
    if config.moe_layers:
        reason = triton_reason(device, dtype, _shape(config)) if chosen.experts == "triton" else None
        why = f" (torch's kernel needs {reason})" if reason else ""
        parts.append(
            f"experts grouped by Triton{why}" if chosen.experts == "triton" else f"experts {chosen.experts}"
        )
    return ", ".join(parts)


def loss_implementation(kernels: Kernels, vocab_size: int) -> Literal["full", "fused"]:
    """The implementation of the loss; `auto` is `fused` from a vocabulary of 1024 on, on every device."""
    if kernels.loss != "auto":
        return kernels.loss
    return "full" if vocab_size < _FUSED_FROM else "fused"


def loss_kernel(kernels: Kernels, vocab_size: int) -> Callable[..., LossSums]:
    """The loss kernel, a function of hidden [B, S, H], weight [V, H], labels, mask [B, S], z_loss_coef."""
    is_full = loss_implementation(kernels, vocab_size) == "full"
    return full_linear_cross_entropy if is_full else fused_linear_cross_entropy
