"""Rotary positions, and grouped-query attention within the documents of packed sequences.

Shapes: B sequences, S positions, T cached positions, H hidden_size, N query heads, M key and value heads,
D head_dim.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.config.model_config import YARN_BETAS, ModelConfig
from llm_pretrain.model.kernels.attention import DocumentLayout, document_attention, sdpa
from llm_pretrain.model.kernels.choice import AUTO, Kernels
from llm_pretrain.model.kernels.layers import apply_linears, rotate
from llm_pretrain.model.layers import Linear, RMSNorm


def rotary_tables(position_ids: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (arXiv:2104.09864), each [B, S, 1, D/2].

    The angles are always computed in fp32, as in transformers, so that every precision rotates by the same
    numbers. The tables are real. Each forward pass computes them, so that data parallelism has no buffer to
    broadcast. YaRN scales both by `attention_factor`.
    """
    # A compiled graph computes the frequencies itself, since it can neither fill nor read a cache.
    compiling = torch.compiler.is_compiling()
    frequencies = rotary_frequencies.__wrapped__ if compiling else rotary_frequencies
    angles = position_ids[:, :, None, None].float() * frequencies(config, position_ids.device)
    cos, sin, factor = angles.cos(), angles.sin(), attention_factor(config)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, S, heads, D] by the half-rotation convention of Llama and Qwen3.

    The rotation runs in the type of `cos` and `sin` (at least fp32), also under autocast.
    """
    x = x.to(cos.dtype)
    if not torch.compiler.is_compiling():
        return rotate(x, cos, sin)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention_factor(config: ModelConfig) -> float:
    """YaRN's factor of cosine and sine (arXiv:2309.00071, equation 22); scores are scaled by its square."""
    return 0.1 * math.log(config.rope_factor) + 1.0 if config.rope_type == "yarn" else 1.0


@functools.lru_cache(maxsize=64)
def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Frequency of each pair of dimensions in radians per position, fp32 [D/2].

    The order of operations is that of transformers. `linear` (arXiv:2306.15595) divides every frequency by
    the factor. `yarn` (arXiv:2309.00071, section 3.2) divides the frequencies with fewer than `beta_slow`
    rotations over the original context. It keeps those above `beta_fast`, and interpolates in between.
    """
    head_dim = config.attention_head_dim
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    wavelengths = config.rope_theta**exponents
    if config.rope_type == "linear":
        return 1.0 / wavelengths / config.rope_factor
    if config.rope_type != "yarn":
        return 1.0 / wavelengths
    stretched, plain = 1.0 / (config.rope_factor * wavelengths), 1.0 / wavelengths
    low = max(math.floor(_pair_index(YARN_BETAS["beta_fast"], config)), 0)
    high = min(math.ceil(_pair_index(YARN_BETAS["beta_slow"], config)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return stretched * (1 - keep) + plain * keep


def _pair_index(rotations: float, config: ModelConfig) -> float:
    """Index of the pair that makes `rotations` rotations over the original context (YaRN, section 3.2)."""
    span = config.rope_original_context / (rotations * 2 * math.pi)
    return config.attention_head_dim * math.log(span) / (2 * math.log(config.rope_theta))


class LayerCache(Protocol):
    """One layer's keys and values of earlier positions; see `llm_pretrain.model.generation.KeyValueCache`."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store keys and values [B, S, M, D] of new positions.

        Returns:
            Keys and values of all positions, [B, T, M, D], and a mask, bool [B, 1, S, T]: which keys each
            query sees. The mask is None if attention is causal or sees all keys.
        """
        ...


def cached_attention(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
    """Attention of new positions to themselves and to all cached positions of their row.

    Args:
        query: [B, S, N, D].
        key: [B, S, M, D]; the cache stores it in value's type.
        value: [B, S, M, D]; the cache stores it.
        cache: `KeyValueCache.advance` must have been called for the new positions.

    Returns:
        [B, S, N, D], in value's type.
    """
    keys, values, mask = cache.extend(key.to(value.dtype), value)
    query = query.to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        if query.shape[1] > 1:
            return sdpa(query, keys, values, mask, 0.0)
        # With a single position, the query heads that share a key head take the place of the positions, so
        # that keys are not repeated.
        grouped = query.view(len(query), keys.shape[2], -1, query.shape[3])
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(query.shape)


class Attention(nn.Module):
    """Self-attention with rotary positions and, where configured, RMSNorm of each head's query and key."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.dropout = config.attention_dropout
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, query_size)
        self.k_proj = Linear(config.hidden_size, key_size)
        self.v_proj = Linear(config.hidden_size, key_size)
        self.o_proj = Linear(query_size, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BSH: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, S, H] to [B, S, H].

        Args:
            x_BSH: The normalised hidden states.
            cos: [B, S, 1, D/2], from `rotary_tables`.
            sin: Sines, shaped as `cos`.
            layout: Where documents lie in the batch, from `document_layout`; unused with a cache.
            cache: Keys and values of earlier positions, for generation.
        """
        projected = apply_linears(x_BSH, self.q_proj, self.k_proj, self.v_proj)
        query_BSND, key_BSMD, value_BSMD = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.q_norm is not None and self.k_norm is not None:
            query_BSND, key_BSMD = self.q_norm(query_BSND), self.k_norm(key_BSMD)
        query_BSND, key_BSMD = apply_rotary(query_BSND, cos, sin), apply_rotary(key_BSMD, cos, sin)
        if cache is None:
            dropout = self.dropout if self.training else 0.0
            out_BSND = self.attend(query_BSND, key_BSMD, value_BSMD, layout, dropout)
        else:
            out_BSND = cached_attention(query_BSND, key_BSMD, value_BSMD, cache)
        return self.o_proj(out_BSND.flatten(-2))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, dropout: float
    ) -> Tensor:
        """`document_attention`; `divide_sequences` replaces it if other ranks hold keys of a sequence."""
        return document_attention(query, key, value, layout, dropout)
