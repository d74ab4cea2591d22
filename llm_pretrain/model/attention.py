"""Causal grouped-query attention that never crosses a document inside a packed sequence.

One scaled-dot-product call per document piece on a CPU, a mask made on the device elsewhere (so that a
step never waits for it). Which kernel runs never changes the result beyond rounding. Training runs
`document_attention`, generation `cached_attention`; what a cache holds is in `cache.py`.

Shapes: B sequences, S positions, T = B*S, N query heads, M key and value heads, D head_dim.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler, for a second

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.cache import LayerCache
from llm_pretrain.model.kernels import AUTO, Kernels
from llm_pretrain.model.layers import Linear, RMSNorm, apply_rotary, for_products

_CPU_LOW_PRECISION_LENGTH = 256
"""Shorter pieces are faster in fp32 on a CPU: the low-precision backward kernel costs twice as much at
170 positions and as much at 256 (AVX-512, AMX)."""


@dataclass
class DocumentLayout:
    """Where documents lie in a batch, worked out once per forward for all layers.

    Both None: every row is one document, plain causal attention. `lengths`: the pieces' lengths along the
    flattened batch, rows in order, no piece across two rows (CPU). `mask` [B, 1, S, S] bool: who may be
    attended to (other devices). No tuple: a layer would be compiled again where a field is None in one
    batch and set in the next.
    """

    lengths: list[int] | None = None
    mask: Tensor | None = None


def document_layout(document_ids: Tensor | None) -> DocumentLayout:
    """The layout of `document_ids` [B, S], constant within a document; None means one document per row."""
    if document_ids is None:
        return DocumentLayout()
    rows, columns = document_ids.shape
    if document_ids.device.type != "cpu":
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        causal = torch.ones(columns, columns, dtype=torch.bool, device=document_ids.device).tril()
        return DocumentLayout(mask=same & causal)
    starts = torch.ones(rows, columns, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    edges = [*starts.flatten().nonzero().flatten().tolist(), rows * columns]
    if len(edges) - 1 == rows:
        return DocumentLayout()
    return DocumentLayout(lengths=[stop - start for start, stop in itertools.pairwise(edges)])


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
        value: [B, S, M, D]; its type is the products' (in short pieces on a CPU, fp32) and the result's.
        layout: From `document_layout`.
        dropout: Probability of dropping an attention weight; 0 outside training.

    Returns:
        [B, S, N, D].
    """
    dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        if query.device.type == "cpu" and layout.mask is None:
            return _on_cpu(query, key, value, layout, dropout).to(dtype)
        return _attend(query.to(dtype), key.to(dtype), value, layout.mask, dropout)


@_disable_dynamo  # as many pieces as a batch happens to have
def _on_cpu(query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, dropout: float) -> Tensor:
    """`document_attention`, document by document; in value's type or a wider one."""
    rows, columns = query.shape[:2]
    dtype = value.dtype
    mean_length = rows * columns / len(layout.lengths) if layout.lengths else columns
    if mean_length < _CPU_LOW_PRECISION_LENGTH:
        dtype = torch.promote_types(dtype, torch.float32)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    if layout.lengths is None:
        return _attend(q, k, v, None, dropout)
    # `split`, not slices: its backward is one concatenation, a slice's is a full-size tensor each.
    pieces = zip(*(x.flatten(0, 1).split(layout.lengths) for x in (q, k, v)), strict=True)
    out = [_attend(qp[None], kp[None], vp[None], None, dropout)[0] for qp, kp, vp in pieces]
    return torch.cat(out).view(query.shape)


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
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, S, H] to [B, S, H]; `cos` and `sin` from `rotary_tables`. With a cache, no layout."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        for_query, for_key, for_value = for_products(hidden, 3)
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
