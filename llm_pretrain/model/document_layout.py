"""Where documents lie in a batch, in the form that the chosen kernel of attention wants it; and that choice.

Worked out once per forward pass for all layers, and never by waiting for a device. No arithmetic on queries
and keys: that is in `attention.py`.

Shapes: B sequences, S positions, T = B*S, P document pieces; a block is 128 positions, Q = ceil(S/128).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from llm_pretrain.model.kernels import Kernels

_BLOCK = 128
_VARLEN_HEAD_DIM = 256
"""Flash attention's largest."""


class DocumentLayout(NamedTuple):
    """At most one is set; none: every row is one document, plain causal attention."""

    offsets: Tensor | None = None
    """int32 [P + 1]: where pieces begin along T, then T, which may be repeated; no piece crosses two rows."""
    mask: Tensor | None = None
    """bool [B, 1, S, S]: who may be attended to."""
    block_mask: Any = None
    """FlexAttention's BlockMask of the same."""


def attention_implementation(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float
) -> Literal["sdpa", "varlen", "flex"]:
    """What `kernels.attention` means on a device, for products in `dtype`.

    `auto` is `sdpa`, but `varlen` on CUDA from compute capability 8.0 on, in bf16 and fp16, without dropout,
    for heads of at most 256 in steps of 8, and where no deterministic algorithms are asked for.
    """
    if kernels.attention != "auto":
        return kernels.attention
    suits = (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and dropout == 0
        and head_dim <= _VARLEN_HEAD_DIM
        and head_dim % 8 == 0
        and not torch.are_deterministic_algorithms_enabled()
        and _capability(device) >= (8, 0)
    )
    return "varlen" if suits else "sdpa"


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def document_layout(
    document_ids: Tensor | None,
    offsets: Tensor | None = None,
    implementation: Literal["sdpa", "varlen", "flex"] = "sdpa",
) -> DocumentLayout:
    """The layout of a batch.

    Args:
        document_ids: int64 [B, S], constant within a document; None means one document per row.
        offsets: int32 [P + 1], the same on the same device, as in `DocumentLayout`. Without them they are
            counted on a CPU; elsewhere, where counting would be waiting, `varlen` becomes `sdpa`.
        implementation: From `attention_implementation`.
    """
    if document_ids is None:
        return DocumentLayout()
    if implementation == "flex":
        return DocumentLayout(block_mask=_block_mask(document_ids))
    if document_ids.device.type == "cpu":
        return DocumentLayout(offsets=_offsets(document_ids) if offsets is None else offsets)
    if implementation == "varlen" and offsets is not None:
        return DocumentLayout(offsets=offsets)
    columns = document_ids.shape[1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    causal = torch.ones(columns, columns, dtype=torch.bool, device=document_ids.device).tril()
    return DocumentLayout(mask=same & causal)


def _starts(document_ids: Tensor) -> Tensor:
    """bool [B, S]: the first position of each piece."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def _offsets(document_ids: Tensor) -> Tensor:
    starts = _starts(document_ids).flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([document_ids.numel()])]).int()


def _block_mask(document_ids: Tensor) -> Any:
    """FlexAttention's mask: a block of queries sees the blocks from its first document's start to itself.

    Made from where documents start, in O(B·S); testing all pairs, as `create_block_mask` does, is O(B·S²).
    """
    from torch.nn.attention.flex_attention import BlockMask

    columns = document_ids.shape[1]
    position = torch.arange(columns, device=document_ids.device)
    first = torch.where(_starts(document_ids), position, 0).cummax(1).values[:, ::_BLOCK] // _BLOCK
    block = torch.arange(first.shape[1], device=document_ids.device)
    count = (block - first + 1).int()
    seen = (first[..., None] + block).clamp(max=len(block) - 1).int()  # [B, Q, Q]; the first `count` matter

    def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    return BlockMask.from_kv_blocks(
        count[:, None], seen[:, None], BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(columns, columns)
    )
