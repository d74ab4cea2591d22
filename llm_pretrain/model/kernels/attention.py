"""Causal attention within the documents of packed sequences: the documents' layout and the kernels.

On a CPU, each document is computed separately, by `block_attention` or torch's kernel. On CUDA, one call of
varlen or masked attention computes the batch. Kernels agree up to rounding.

Shapes: B sequences, S positions, T = B*S, N query heads, M key and value heads, D head_dim, P document
pieces.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_pretrain.model.kernels.layers import uncompiled

BLOCKS_FROM, BLOCKS_TO = 64, 1024
"""Between these mean document lengths, `block_attention` is faster on a CPU; in bf16 also above them."""


class DocumentLayout(NamedTuple):
    """Where documents lie in a batch. At most one field is set. If none is, every row is one document."""

    offsets: Tensor | None = None
    """int32 [P + 1]: the start of each piece along T, then T, possibly repeated; a piece is in one row."""
    mask: Tensor | None = None
    """bool [B, 1, S, S]: which keys each query attends to."""


def document_layout(
    document_ids: Tensor | None,
    offsets: Tensor | None = None,
    implementation: Literal["sdpa", "varlen"] = "sdpa",
) -> DocumentLayout:
    """The layout of a batch, computed once for all layers and without synchronising with the device.

    Args:
        document_ids: int64 [B, S], constant within a document; None means one document per row.
        offsets: int32 [P + 1] of the same documents, on their device; see `DocumentLayout`. Default: computed
            on a CPU. On other devices that would synchronise, so `varlen` becomes `sdpa` instead.
        implementation: From `attention_implementation`.
    """
    if document_ids is None:
        return DocumentLayout()
    if document_ids.device.type == "cpu":
        return DocumentLayout(offsets=_offsets(document_ids) if offsets is None else offsets)
    if implementation == "varlen" and offsets is not None:
        return DocumentLayout(offsets=offsets)
    columns = document_ids.shape[1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    causal = torch.ones(columns, columns, dtype=torch.bool, device=document_ids.device).tril()
    return DocumentLayout(mask=same & causal)


def _offsets(document_ids: Tensor) -> Tensor:
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([document_ids.numel()])]).int()


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """torch's scaled dot-product attention of [B, S, heads, D] tensors, causal unless a mask is given."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:
        # CUDA's memory-efficient kernel, the only one with a mask, does not support grouped heads.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, dropout: float
) -> Tensor:
    """Causal attention within documents, in value's type also under autocast.

    Args:
        query: [B, S, N, D], in value's type or a wider one.
        key: [B, S, M, D], in value's type or a wider one; M divides N.
        value: [B, S, M, D]; products run in value's type, or in a wider one where that is faster on a CPU.
        layout: From `document_layout`.
        dropout: Probability of dropping an attention weight; 0 outside training.

    Returns:
        [B, S, N, D] in value's type.
    """
    dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        if query.device.type == "cpu" and layout.mask is None:
            return _on_cpu(query, key, value, layout.offsets, dropout).to(dtype)
        query, key = query.to(dtype), key.to(dtype)
        if layout.offsets is not None:
            return _varlen(query, key, value, layout.offsets)
        return sdpa(query, key, value, layout.mask, dropout)


def part_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, chunks: Sequence[tuple[int, int]]
) -> Tensor:
    """`document_attention` of the queries of some positions to the keys of all positions, without dropout.

    The cost of a query is proportional to the number of keys that it attends to.

    Args:
        query: [B, s, N, D], the queries of the chunks' positions.
        key: [B, S, M, D].
        value: [B, S, M, D].
        layout: Layout of the whole sequences.
        chunks: Ranges of positions, ascending, with s positions in total; all sequences have these ranges.

    Returns:
        [B, s, N, D] in value's type.
    """
    dtype, columns = value.dtype, key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        if query.device.type == "cpu" and layout.mask is None:
            starts = range(0, len(key) * columns, columns)
            edges = [*starts, len(key) * columns] if layout.offsets is None else layout.offsets.tolist()
            own = [(first + start, first + stop) for first in starts for start, stop in chunks]
            q, k, v = (x.flatten(0, 1) for x in (query, key, value))
            return block_attention(q, k, v, sorted(set(edges)), own).view(query.shape)
        query, key = query.to(dtype), key.to(dtype)
        if layout.offsets is not None:
            sizes = [stop - start for start, stop in chunks]
            parts = zip(query.split(sizes, 1), chunks, strict=True)
            return torch.cat([_varlen(q, key, value, layout.offsets, chunk) for q, chunk in parts], 1)
        assert layout.mask is not None
        rows = [layout.mask[:, :, start:stop] for start, stop in chunks]
        return sdpa(query, key, value, torch.cat(rows, 2), 0.0)


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor | None, dropout: float) -> Tensor:
    """`document_attention` without a mask, in value's type or a wider one."""
    if offsets is not None:
        return _by_documents(query, key, value, offsets, dropout)
    rows, columns = query.shape[:2]
    if _use_blocks(value.dtype, columns, dropout):
        return _by_blocks(query, key, value, range(0, rows * columns + 1, columns))
    wide = torch.promote_types(value.dtype, torch.float32)
    return sdpa(query.to(wide), key.to(wide), value.to(wide), None, dropout)


def _use_blocks(dtype: torch.dtype, mean_length: float, dropout: float) -> bool:
    longest = BLOCKS_TO if dtype.itemsize >= 4 else math.inf
    return dropout == 0 and BLOCKS_FROM <= mean_length <= longest


@uncompiled  # the number of pieces differs from batch to batch
def _by_documents(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, dropout: float) -> Tensor:
    edges = sorted(set(offsets.tolist()))
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    if _use_blocks(value.dtype, edges[-1] / max(1, len(lengths)), dropout):
        return _by_blocks(query, key, value, edges)
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if len(lengths) == len(query):
        # The result gets the type and memory layout of the other branches, so that torch does not compile a
        # compiled layer again.
        return sdpa(query, key, value, None, dropout).to(dtype).contiguous()
    # `split`, because its backward is one concatenation; each slice would have a full-size gradient.
    pieces = zip(*(x.flatten(0, 1).split(lengths) for x in (query, key, value)), strict=True)
    out = [sdpa(qp[None], kp[None], vp[None], None, dropout)[0] for qp, kp, vp in pieces]
    return torch.cat(out).view(query.shape).to(dtype)


@uncompiled  # a compiled loop of small products is not faster
def _by_blocks(query: Tensor, key: Tensor, value: Tensor, edges: Sequence[int]) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    return block_attention(q, k, v, edges).view(query.shape)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, chunk: tuple[int, int] | None = None
) -> Tensor:
    """Flash attention over documents of different lengths.

    The kernel assumes that a piece's queries are at its last positions. So with a chunk, the keys of a
    document end where the chunk ends. The positions before and after are pieces without queries; flash
    attention gives their keys gradients of zero (flash_bwd_kernel.h, `actual_seqlen_q == 0`). To leave these
    pieces out, the host would have to read their number from the device.
    """
    kernel, options = varlen_kernel()
    columns = key.shape[1]
    queries_until = offsets
    if chunk is not None:
        start, stop = chunk
        row = torch.arange(len(key), device=key.device, dtype=offsets.dtype)
        offsets = torch.cat([offsets, row * columns + stop]).sort().values
        inside = (offsets % columns - start).clamp(0, stop - start)
        queries_until = offsets // columns * (stop - start) + inside
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    # The row length bounds all lengths. The longest length differs by batch; to read it would synchronise.
    return kernel(q, k, v, queries_until, offsets, query.shape[1], columns, **options).view(query.shape)


def varlen_kernel() -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """`varlen_attn` and its options for causal attention; torch 2.11 needs no option for grouped heads.

    Compiled layers trace it, so it must not be cached: Dynamo would warn of a cache that it ignores.
    """
    # Imported here because the module imports torch's compiler, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True
    return varlen_attn, options  # pyright: ignore[reportReturnType] (without auxiliary results, a tensor)


ROWS = 64
"""Rows R of a block in fp32: smaller blocks compute fewer masked scores, larger ones have faster products."""
LOW_PRECISION_ROWS = 128
"""Rows R of a block in bf16 and fp16."""
KEPT_LENGTH = 512
"""Largest length L of a document whose probabilities are saved for the backward pass: at most 2·N·L bytes per
token and layer in fp32, half of that in bf16. The backward pass computes those of longer documents again."""


class _Block(NamedTuple):
    """Queries of a block of positions, and the keys that the block attends to."""

    rows: slice
    """Rows of the query tensor."""
    keys: slice
    """Positions from the document's start; the last ones are the block's positions."""
    first: int
    """Position of the first query within the block."""
    size: int
    """Number of positions in the block."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    own: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Causal attention within each document.

    Scores and softmax are computed in at least fp32; the products with probabilities and values run in
    value's type, and sums over blocks in at least fp32.

    Args:
        query: [T, N, D], in value's type or a wider one. With `own`, only the queries of those positions.
        key: [T, M, D], in value's type or a wider one.
        value: [T, M, D]; the result has value's type.
        offsets: The start of each document along T, then T; repeated entries are empty documents.
        own: Ranges of positions along T, ascending, that have queries. Default: all positions.
    """
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    own = ((0, len(key)),) if own is None else tuple(own)
    return _BlockAttention.apply(query, key, value, _Places(tuple(offsets), own), keep)  # pyright: ignore[reportReturnType] (torch's stub of apply)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: _Places, keep: bool) -> Tensor:
        wide = torch.promote_types(value.dtype, torch.float32)
        heads = key.shape[1]
        out = torch.empty(query.shape, dtype=value.dtype)
        kept = []
        for document, blocks in _documents(places, value.dtype):
            keys = key[document].to(wide).permute(1, 2, 0).contiguous()
            values = value[document].transpose(0, 1).contiguous()
            for block in blocks:
                rows, seen = block.rows, block.keys
                probs = _probabilities(_grouped(query[rows], heads, wide), keys, block).to(value.dtype)
                _ungroup(torch.bmm(probs, values[:, seen]), out[rows])
                if keep and _is_short(document):
                    kept.append(probs)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.places = places
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides the name)
        query, key, value, *kept = ctx.saved_tensors
        grad, low, heads = grads[0], value.dtype, key.shape[1]
        wide = torch.promote_types(low, torch.float32)
        remaining = iter(kept)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for document, blocks in _documents(ctx.places, low):
            keys = key[document].to(wide).transpose(0, 1).contiguous()
            columns = keys.transpose(1, 2) if _is_short(document) else keys.transpose(1, 2).contiguous()
            low_keys, values = keys.to(low), value[document].permute(1, 2, 0)
            on_keys, on_values = torch.zeros_like(keys), torch.zeros_like(keys)
            for block in blocks:
                rows, seen = block.rows, block.keys
                queries = _grouped(query[rows], heads, wide)
                on_out = _grouped(grad[rows], heads, low, scaled=False)
                if _is_short(document):
                    probs = next(remaining)
                else:
                    probs = _probabilities(queries, columns, block).to(low)
                on_probs = torch.bmm(on_out, values[:, :, seen])
                on_scores = torch.ops.aten._softmax_backward_data(on_probs, probs, -1, low)
                _ungroup(torch.bmm(on_scores, low_keys[:, seen]).mul_(_scale(query)), grad_query[rows])
                _add_product(on_keys[:, seen], on_scores, queries.to(low))
                _add_product(on_values[:, seen], probs, on_out)
            grad_key[document] = on_keys.transpose(0, 1)
            grad_value[document] = on_values.transpose(0, 1)
        return grad_query, grad_key, grad_value, None, None


class _Places(NamedTuple):
    """Where documents and queries lie along T; see `block_attention`."""

    offsets: tuple[int, ...]
    own: tuple[tuple[int, int], ...]


def _documents(places: _Places, dtype: torch.dtype) -> list[tuple[slice, list[_Block]]]:
    """The documents that have queries, each with its blocks that have queries."""
    offsets, own = places
    size = ROWS if dtype.itemsize >= 4 else LOW_PRECISION_ROWS
    rows = itertools.accumulate((stop - start for start, stop in own), initial=0)
    ranges = [(start, stop, row) for (start, stop), row in zip(own, rows, strict=False)]
    found = []
    for start, stop in itertools.pairwise(offsets):
        while ranges and ranges[0][1] <= start:
            ranges.pop(0)
        blocks = []
        for low, high, row in ranges:
            if low >= stop:
                break
            below = max(0, low - start) // size * size  # earlier blocks have no query of this range
            for a in range(start + below, min(stop, high), size):
                b, first = min(a + size, stop), max(a, low)
                queries = slice(row + first - low, row + min(b, high) - low)
                blocks.append(_Block(queries, slice(0, b - start), first - a, b - a))
        if blocks:
            found.append((slice(start, stop), blocks))
    return found


def _is_short(document: slice) -> bool:
    return document.stop - document.start <= KEPT_LENGTH


def _scale(query: Tensor) -> float:
    return query.shape[-1] ** -0.5


def _grouped(x: Tensor, heads: int, dtype: torch.dtype, scaled: bool = True) -> Tensor:
    """[R, N, D] to [M, G·R, D], grouped by key head; multiplied by D^-1/2 if `scaled`."""
    rows, _, size = x.shape
    grouped = x.view(rows, heads, -1, size).permute(1, 2, 0, 3).to(dtype)
    out = torch.empty(grouped.shape, dtype=dtype)
    torch.mul(grouped, _scale(x) if scaled else 1.0, out=out)
    return out.view(heads, -1, size)


def _ungroup(x: Tensor, out: Tensor) -> None:
    """Write [M, G·R, D] into `out` [R, N, D]."""
    heads, (rows, _, size) = len(x), out.shape
    out.view(rows, heads, -1, size).copy_(x.view(heads, -1, rows, size).permute(2, 0, 1, 3))


def _probabilities(queries: Tensor, keys: Tensor, block: _Block) -> Tensor:
    """Attention weights [M, G·R, C] of queries [M, G·R, D] over the block's keys, out of keys [M, D, L]."""
    scores = torch.bmm(queries, keys[:, :, block.keys])
    rows, size = block.rows.stop - block.rows.start, block.size
    diagonal = scores.unflatten(1, (-1, rows))[..., -size:]  # only these columns hold later positions
    future = _future(max(ROWS, LOW_PRECISION_ROWS), scores.dtype)
    diagonal += future[block.first : block.first + rows, :size]
    return scores.softmax(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += leftᵀ @ right`, [M, C, D] from [M, G·R, C] and [M, G·R, D]; `total` may have a wider type."""
    if total.dtype == left.dtype:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total.add_(torch.bmm(left.transpose(1, 2), right))


@functools.lru_cache(maxsize=8)
def _future(size: int, dtype: torch.dtype) -> Tensor:
    """[size, size]: -inf above the diagonal, else 0."""
    return torch.full((size, size), float("-inf"), dtype=dtype).triu(1)
