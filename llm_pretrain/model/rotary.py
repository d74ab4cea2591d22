"""Rotary positions: the frequencies with their scaling, and the tables of a forward pass.

Applying them to queries and keys is `apply_rotary` in `layers.py`.

Shapes: B sequences, S positions, D head_dim.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig


def rotary_tables(position_ids: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (arXiv:2104.09864), each [B, S, 1, D/2].

    The angles are always taken in fp32, as transformers does: then every precision rotates by the same
    numbers. Real-valued and computed per forward: no buffer that data parallelism would have to carry.
    Under YaRN both are scaled by `attention_factor`.
    """
    # A compiled graph computes the frequencies itself: it can neither fill nor see a cache.
    compiling = torch.compiler.is_compiling()
    frequencies = rotary_frequencies.__wrapped__ if compiling else rotary_frequencies
    angles = position_ids[:, :, None, None].float() * frequencies(config, position_ids.device)
    cos, sin, factor = angles.cos(), angles.sin(), attention_factor(config)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def attention_factor(config: ModelConfig) -> float:
    """Factor on cosine and sine; attention scores get its square (YaRN, arXiv:2309.00071, equation 22)."""
    return 0.1 * math.log(config.rope_factor) + 1.0 if config.rope_type == "yarn" else 1.0


@functools.lru_cache(maxsize=64)
def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, fp32 [D/2], in transformers' order of operations.

    `linear` (arXiv:2306.15595) divides all by the factor. `yarn` (arXiv:2309.00071, section 3.2) divides
    those that turn less than `rope_beta_slow` times over the original context, leaves those that turn more
    than `rope_beta_fast` times, and goes from one to the other along a ramp in between.
    """
    head_dim = config.attention_head_dim
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    wavelengths = config.rope_theta**exponents
    if config.rope_type == "linear":
        return 1.0 / wavelengths / config.rope_factor
    if config.rope_type != "yarn":
        return 1.0 / wavelengths
    stretched, plain = 1.0 / (config.rope_factor * wavelengths), 1.0 / wavelengths
    low = max(math.floor(_dimension_of(config.rope_beta_fast, config)), 0)
    high = min(math.ceil(_dimension_of(config.rope_beta_slow, config)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return stretched * (1 - keep) + plain * keep


def _dimension_of(rotations: float, config: ModelConfig) -> float:
    """Index of the pair that turns `rotations` times over the original context (YaRN, section 3.2)."""
    span = config.rope_original_context / (rotations * 2 * math.pi)
    return config.attention_head_dim * math.log(span) / (2 * math.log(config.rope_theta))
