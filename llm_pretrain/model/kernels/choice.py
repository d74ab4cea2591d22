"""The choice of kernels: which implementation computes experts, attention and loss.

It is a pure function of configuration, device, type and sizes, never of timing. Implementations of one part
have the same signature and agree up to rounding; `self_check.py` compares them with their definitions.
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
"""Vocabulary size from which `auto` is `fused`; below it, whole logits are small and as fast."""
_VARLEN_HEAD_DIM = 256
"""The largest head size of flash attention."""


@dataclass(frozen=True)
class Kernels:
    """Names of implementations, as in the configuration's `training` section; `auto` is the fastest.

    Args:
        experts: `auto`, `streamed`, `grouped`, `triton` (grouped, by our kernel alone) or `reference`.
        attention: `auto`, `sdpa`, `varlen` or `flex`.
        loss: `auto`, `full` or `fused`.
        z_loss_coef: The objective's coefficient of the z-loss, for loss kernels that compute gradients in the
            forward pass.
    """

    experts: Literal["auto", "streamed", "grouped", "triton", "reference"] = "auto"
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
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
) -> Literal["sdpa", "varlen", "flex"]:
    """The implementation of attention for products in `dtype`, an argument of `document_layout`.

    `auto` is `sdpa`, except `varlen` on CUDA from compute capability 8.0 on, in bf16 and fp16, without
    dropout, for head sizes of at most 256 that are multiples of 8, and without deterministic algorithms.
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
    """Whether flash attention over documents, in bf16 and fp16, has this head size and dropout."""
    return dropout == 0 and head_dim <= _VARLEN_HEAD_DIM and head_dim % 8 == 0


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def experts_requirement(
    config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What the experts' kernel that `kernels` names needs and does not have, in words; None if it can run.

    Args:
        config: The model's.
        kernels: Its implementations.
        device: Where it will train.
        dtype: Type of its matrix products there.
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
    """The experts' kernel for products in `dtype` and (E, H, I) of `shape`.

    Its arguments are x [T, H], gate_up [E, 2I, H], down [E, H, I], weights [T, K], chosen [T, K], dtype and
    activation; it returns [T, H].

    `grouped` and `triton` fall back to `streamed` where they cannot run: samples of a model that trains in
    bf16 are generated in fp32. In training they do not: `experts_requirement` is checked before.
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
    falls back to our Triton kernel. Arguments as those of `experts_requirement`."""
    head_dim, dropout = config.attention_head_dim, config.attention_dropout
    return replace(
        kernels,
        experts=_experts_implementation(kernels, device, dtype, _shape(config)),
        attention=attention_implementation(kernels, device, dtype, head_dim, dropout),
        loss=loss_implementation(kernels, config.vocab_size or 0),
    )


def describe_kernels(config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """The implementations that training uses, in words, and why experts use Triton if they do.

    Arguments as those of `experts_requirement`.
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
    """The loss kernel; arguments: hidden [B, S, H], weight [V, H], labels and mask [B, S], z_loss_coef."""
    is_full = loss_implementation(kernels, vocab_size) == "full"
    return full_linear_cross_entropy if is_full else fused_linear_cross_entropy
