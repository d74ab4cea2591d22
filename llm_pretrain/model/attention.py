"""Causal grouped-query attention that never crosses a document inside a packed sequence.

Document by document on a CPU (`attention_blocks.py`, or the processor's kernel where that is faster); by
torch's kernels elsewhere. Which one runs never changes the result beyond rounding; which one that is, and
what it is told of the documents, is decided in `document_layout.py`. Training runs `document_attention`,
generation `cached_attention`; what a cache holds is in `cache.py`.

Shapes: B sequences, S positions, T = B*S, N query heads, M key and value heads, D head_dim.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler, for a second

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.attention_blocks import block_attention
from llm_pretrain.model.cache import LayerCache
from llm_pretrain.model.document_layout import DocumentLayout
from llm_pretrain.model.kernels import AUTO, Kernels
from llm_pretrain.model.layers import Linear, apply_rotary
from llm_pretrain.model.norms import RMSNorm

_BLOCKS_FROM, _BLOCKS_TO = 64, 1024
"""Mean length of documents between which `block_attention` is faster on a CPU; in bf16 it is above, too."""


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Scaled dot-product attention of [B, S, heads, D] tensors, causal unless a mask is given."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:
        # CUDA's memory-efficient kernel, the one that takes a mask, knows no grouped heads.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, dropout: float
) -> Tensor:
    """Causal attention within documents, whatever autocast says about its type.

    Args:
        query: [B, S, N, D], in value's type or a wider one; so the key.
        key: [B, S, M, D]; M divides N.
        value: [B, S, M, D]; its type is the products' (on a CPU a wider one where that is faster) and the
            result's.
        layout: From `document_layout`.
        dropout: Probability of dropping an attention weight; 0 outside training.

    Returns:
        [B, S, N, D].
    """
    dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        if query.device.type == "cpu" and layout.mask is None and layout.block_mask is None:
            return _on_cpu(query, key, value, layout.offsets, dropout).to(dtype)
        query, key = query.to(dtype), key.to(dtype)
        if layout.block_mask is not None:
            return _flex(query, key, value, layout.block_mask)
        if layout.offsets is not None:
            return _varlen(query, key, value, layout.offsets)
        return _attend(query, key, value, layout.mask, dropout)


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor | None, dropout: float) -> Tensor:
    """`document_attention` without a mask, in value's type or a wider one."""
    if offsets is not None:
        return _by_documents(query, key, value, offsets, dropout)
    rows, columns = query.shape[:2]
    if _suits_blocks(value.dtype, columns, dropout):
        return _by_blocks(query, key, value, range(0, rows * columns + 1, columns))
    wide = torch.promote_types(value.dtype, torch.float32)
    return _attend(query.to(wide), key.to(wide), value.to(wide), None, dropout)


def _suits_blocks(dtype: torch.dtype, mean_length: float, dropout: float) -> bool:
    longest = _BLOCKS_TO if dtype.itemsize >= 4 else math.inf
    return dropout == 0 and _BLOCKS_FROM <= mean_length <= longest


@_disable_dynamo  # as many pieces as a batch happens to have
def _by_documents(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, dropout: float) -> Tensor:
    edges = sorted(set(offsets.tolist()))
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    if _suits_blocks(value.dtype, edges[-1] / max(1, len(lengths)), dropout):
        return _by_blocks(query, key, value, edges)
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if len(lengths) == len(query):
        # In the type and layout of the other ways: a compiled layer sees no difference between batches.
        return _attend(query, key, value, None, dropout).to(dtype).contiguous()
    # `split`, not slices: its backward is one concatenation, a slice's is a full-size tensor each.
    pieces = zip(*(x.flatten(0, 1).split(lengths) for x in (query, key, value)), strict=True)
    out = [_attend(qp[None], kp[None], vp[None], None, dropout)[0] for qp, kp, vp in pieces]
    return torch.cat(out).view(query.shape).to(dtype)


@_disable_dynamo  # many small products in a loop, which a graph of them would not make faster
def _by_blocks(query: Tensor, key: Tensor, value: Tensor, edges: Sequence[int]) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    return block_attention(q, k, v, edges).view(query.shape)


def _varlen(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """Flash attention over documents of different lengths."""
    kernel, options = varlen_kernel()
    columns, groups = query.shape[1], query.shape[2] // key.shape[2]
    if groups > 1 and "enable_gqa" not in options:
        key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    # A bound on lengths, not the longest: that would differ from batch to batch, and be asked of the device.
    return kernel(q, k, v, offsets, offsets, columns, columns, **options).view(query.shape)


@functools.cache
def varlen_kernel() -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """`varlen_attn` and how to ask it for causal attention; its arguments grew from torch 2.10 to 2.13."""
    # Its module imports torch's compiler, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return varlen_attn, options  # pyright: ignore[reportReturnType] (without auxiliary results, a tensor)


def _flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=grouped).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Uncompiled it would hold all scores; within a compiled layer this is that layer's compilation."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
    """Attention of new positions to themselves and to all that the cache holds of their row.

    Args:
        query: [B, S, N, D], at the cache's new positions.
        key: [B, S, M, D]; stored, in value's type.
        value: [B, S, M, D]; stored.
        cache: One layer's, told of the new positions by `KeyValueCache.advance`.

    Returns:
        [B, S, N, D], in value's type.
    """
    keys, values = cache.extend(key.to(value.dtype), value)
    query, mask = query.to(value.dtype), cache.whole.mask
    with torch.autocast(query.device.type, enabled=False):
        if query.shape[1] > 1:
            return _attend(query, keys, values, mask, 0.0)
        # A single position: the query heads that share a key head stand where positions would, so that no
        # kernel needs the keys repeated.
        grouped = query.view(len(query), keys.shape[2], -1, query.shape[3])
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).view(query.shape)


class Attention(nn.Module):
    """Self-attention with rotary positions and, where configured, RMSNorm on each head's query and key."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.kernels = kernels
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
        hidden: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Three times the same [B, S, H], from `for_products`, to [B, S, H]; with a cache, no layout.

        `cos` and `sin` are from `rotary_tables`.
        """
        for_query, for_key, for_value = hidden
        shape = (*for_query.shape[:-1], -1, self.head_dim)
        query = self.q_proj(for_query).view(shape)
        key = self.k_proj(for_key).view(shape)
        value = self.v_proj(for_value).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        if cache is None:
            out = document_attention(query, key, value, layout, self.dropout if self.training else 0.0)
        else:
            out = cached_attention(query, key, value, cache)
        return self.o_proj(out.flatten(-2))
