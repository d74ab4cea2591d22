"""Synthetic global batches for the benchmark `normalisation`: text of several topics, masked in three ways.

No benchmark by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_pretrain.data import Batch
from llm_pretrain.model import IGNORE_INDEX

SEQUENCES, LENGTH, VOCABULARY, TOPICS = 16, 128, 256, 4
SETTINGS = ("few masked tokens", "ragged padding", "80 % short documents")


def text(sequences: int, seed: int) -> Tensor:
    """int64 [sequences, LENGTH + 1]: each of one topic, a Markov chain with four successors per token."""
    chains = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (TOPICS, VOCABULARY // TOPICS, 4), generator=chains)
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (sequences,), generator=generator)
    token = torch.randint(VOCABULARY, (sequences,), generator=generator)
    tokens = [token]
    for _ in range(LENGTH):
        choice = torch.randint(4, (sequences,), generator=generator)
        token = successors[topic, token // TOPICS, choice]
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def loss_mask(setting: str, seed: int) -> Tensor:
    """bool [SEQUENCES, LENGTH]: which tokens of a global batch count."""
    generator = torch.Generator().manual_seed(seed)
    if setting == "few masked tokens":  # up to 15 % of a sequence
        share = 0.15 * torch.rand((SEQUENCES, 1), generator=generator)
        return torch.rand((SEQUENCES, LENGTH), generator=generator) >= share
    if setting == "ragged padding":  # one document of any length, then padding
        lengths = torch.randint(1, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    else:  # four in five of 4 to 16 tokens, padded; the rest full
        lengths = torch.randint(4, 17, (SEQUENCES, 1), generator=generator)
        lengths[torch.randperm(SEQUENCES, generator=generator)[: SEQUENCES // 5]] = LENGTH
    return torch.arange(LENGTH)[None] < lengths


def micro_batches(tokens: Tensor, mask: Tensor, size: int) -> list[Batch]:
    """The micro batches of a step, `size` sequences each; micro batch a·W + r belongs to rank r."""
    labels = tokens[:, 1:].masked_fill(~mask, IGNORE_INDEX)
    parts = zip(tokens[:, :-1].split(size), labels.split(size), mask.split(size), strict=True)
    return [
        Batch(
            input_ids=input_ids,
            position_ids=torch.arange(LENGTH).expand_as(input_ids),
            document_ids=torch.zeros_like(input_ids),
            labels=own_labels,
            loss_mask=own_mask,
            num_loss_tokens=int(own_mask.sum()),
            step=0,
            micro_batch=number,
            digest=torch.zeros(8, dtype=torch.int64),
        )
        for number, (input_ids, own_labels, own_mask) in enumerate(parts)
    ]
