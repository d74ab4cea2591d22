"""The router: which experts each token goes to, and the losses and counts that keep them balanced.

Always in at least fp32, whatever autocast says. It does not run the experts.

Shapes: B sequences, S positions, T = B*S, H hidden_size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.layers import at_least_fp32
from llm_pretrain.model.products import linear


class RouterSums(NamedTuple):
    """What one layer's router adds to a step; sums over the tokens whose loss_mask is 1."""

    aux_loss: Tensor
    """Σ_i n_i · bal(i), 0-dim; with counts of the global batch Σ m · E · Σ_e f_e · p_e."""
    z_loss: Tensor
    """Σ m · lse(router logits)², 0-dim."""
    counts: Tensor
    """int64 [E]: assignments to each expert."""
    entropy: Tensor
    """Σ m · H(p), 0-dim, without gradient."""


_NORMALISATION_EPS = 1e-20
"""Added to the sum of the chosen sigmoid scores, as DeepSeek-V3's code and its descendants do."""


def top_experts(ranking: Tensor, top_k: int) -> Tensor:
    """The experts of the `top_k` highest scores, in no order; of equal ones any, int64 [..., K].

    torch's `topk` on a CPU takes longer than the router's product. NumPy sorts 64-bit integers by vector
    instructions: there a score's bits, ordered as the scores are, stand above the expert's number.

    Args:
        ranking: [..., E], without gradient.
        top_k: K.
    """
    fits = ranking.device.type == "cpu" and ranking.dtype == torch.float32
    if not fits or torch.compiler.is_compiling():
        return ranking.topk(top_k, dim=-1, sorted=False).indices
    bits = ranking.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats run backwards as integers
    keys = (ordered.long() << 32) | torch.arange(ranking.shape[-1])
    return torch.from_numpy(np.sort(keys.numpy(), axis=-1)[..., -top_k:]) & 0xFFFFFFFF


def count_assignments(chosen: Tensor, mask: Tensor, num_experts: int) -> Tensor:
    """How many of a sequence's tokens whose mask is True went to each expert, int64 [B, E].

    Args:
        chosen: int64 [B, S, K].
        mask: bool [B, S].
        num_experts: E.
    """
    rows = len(chosen)
    row = torch.arange(rows, device=chosen.device)[:, None, None]
    # One-dimensional: the only shape of scatter_add that CUDA runs deterministically.
    flat = (row * num_experts + chosen).flatten()
    ones = mask[..., None].expand_as(chosen).flatten().long()
    counts = torch.zeros(rows * num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, flat, ones).view(rows, num_experts)


def masked_sums(probs: Tensor, mask: Tensor) -> Tensor:
    """Σ_t m · p_te of each sequence: [B, S, E] and [B, S] to [B, E]."""
    return torch.bmm(mask.to(probs.dtype)[:, None], probs)[:, 0]


def balance_sum(probs: Tensor, chosen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i n_i · bal(i) with `bal(i) = E · Σ_e f_e · P_e`, and the assignment counts.

    `f_e` is the share of sequence i's assignments that went to expert e and `P_e` the mean probability
    it was given (Switch Transformer, arXiv:2101.03961, section 2.2, per sequence as in
    arXiv:2412.19437, section 2.1.2). A sequence without loss tokens adds 0.

    Args:
        probs: [B, S, E].
        chosen: int64 [B, S, K].
        mask: bool [B, S].

    Returns:
        The sum, 0-dim, and the counts, int64 [B, E].
    """
    experts, top_k = probs.shape[-1], chosen.shape[-1]
    counts = count_assignments(chosen, mask, experts)
    tokens = mask.sum(-1).clamp(min=1).to(probs.dtype)
    bal_times_n = (counts * masked_sums(probs, mask)).sum(-1) * (experts / top_k) / tokens
    return bal_times_n.sum(), counts


def global_balance_sum(probs: Tensor, mask: Tensor, global_counts: Tensor) -> Tensor:
    """`E · Σ_e f_e · Σ_t m·p_te`, which over all micro batches sums to N times the balance loss, 0-dim.

    `f_e` is the share of the whole global batch's assignments (arXiv:2501.11873, section 3), a constant:
    so the sum is linear in this micro batch's probabilities, and the parts add up at any split.

    Args:
        probs: [B, S, E].
        mask: bool [B, S].
        global_counts: int64 [E], over all ranks and micro batches; K·N in all.
    """
    shares = (global_counts.double() / global_counts.sum()).to(probs.dtype)
    return (shares * masked_sums(probs, mask).sum(0)).sum() * probs.shape[-1]


class Router(nn.Module):
    """Routing to the top K of E experts by softmax or sigmoid scores.

    A chosen expert's weight is its score, over the chosen ones' sum where `norm_topk_prob` says so, times
    `routed_scaling_factor`. With `router_bias_update_rate` > 0 a bias that no gradient reaches
    (arXiv:2408.15664) is added to the scores for the choice alone, never for the weights.

    The balance loss and the entropy are about a distribution over experts: the softmax, or the sigmoid
    scores over their sum (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). Both are the softmax of the
    scores' logarithms, which stays defined where every score underflows. The z-loss is about the logits.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.sigmoid = config.scoring_func == "sigmoid"
        self.scaling_factor = config.routed_scaling_factor
        self.per_sequence = config.router_aux_loss_scope == "sequence"
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts) if config.router_bias_update_rate > 0 else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(
        self, hidden: Tensor, mask: Tensor, global_counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RouterSums]:
        """Route every position.

        Args:
            hidden: [B, S, H].
            mask: bool [B, S], the tokens that count in the sums; all tokens are routed.
            global_counts: int64 [E], assignments in the whole global batch, for the balance loss of scope
                `global_batch`. Without them that scope takes the micro batch for the whole.

        Returns:
            Weights [T, K] in at least fp32, chosen experts int64 [T, K], and the sums.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            logits = linear(at_least_fp32(hidden), at_least_fp32(self.weight))
            log_scores = F.logsigmoid(logits) if self.sigmoid else logits
            probs = log_scores.softmax(-1)
            scores = logits.sigmoid() if self.sigmoid else probs
            bias = self.e_score_correction_bias
            ranking = scores.detach() if bias is None else scores.detach() + bias
            chosen = top_experts(ranking, self.top_k)
            weights = self._weights(scores.gather(-1, chosen))
            sums = self._sums(logits, log_scores, probs, chosen, mask, global_counts)
        return weights.flatten(0, 1), chosen.flatten(0, 1), sums

    def _weights(self, scores: Tensor) -> Tensor:
        """Weights of the chosen experts from their scores, [B, S, K] both."""
        if self.normalize:
            total = scores.sum(-1, keepdim=True)
            scores = scores / (total + _NORMALISATION_EPS if self.sigmoid else total)
        return scores if self.scaling_factor == 1 else scores * self.scaling_factor

    def _sums(
        self,
        logits: Tensor,
        log_scores: Tensor,
        probs: Tensor,
        chosen: Tensor,
        mask: Tensor,
        global_counts: Tensor | None,
    ) -> RouterSums:
        keep = mask.to(logits.dtype)
        log_partition = logits.logsumexp(-1)
        if global_counts is not None:
            aux_loss = global_balance_sum(probs, mask, global_counts)
            counts = count_assignments(chosen, mask, probs.shape[-1])
        elif self.per_sequence:
            aux_loss, counts = balance_sum(probs, chosen, mask)
        else:
            whole = (x.flatten(0, 1)[None] for x in (probs, chosen, mask))
            aux_loss, counts = balance_sum(*whole)
        with torch.no_grad():
            log_probs = log_scores.log_softmax(-1) if self.sigmoid else logits - log_partition[..., None]
            entropy = -torch.linalg.vecdot(probs, log_probs)
        return RouterSums(
            aux_loss=aux_loss,
            z_loss=(keep * log_partition.square()).sum(),
            counts=counts.sum(0),
            entropy=(keep * entropy).sum(),
        )


@torch.no_grad()
def update_router_bias(
    model: nn.Module, expert_counts: Tensor, rate: float, found_inf: Tensor | None = None
) -> None:
    """Move every router's bias by `rate` towards balance: `b_e += rate · sign(mean count - count_e)`.

    Loss-free balancing, arXiv:2408.15664, algorithm 1. Call it once per optimizer step that was not
    skipped, with the counts of the whole global batch, so that all ranks move alike.

    Args:
        model: A `Decoder` (unwrapped).
        expert_counts: int64 [MoE layers, E], global.
        rate: Size of the move.
        found_inf: 0-dim, on the device: 1 where nothing is to move, since the step was skipped, else 0.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, counts in zip(routers, expert_counts, strict=True):
        bias = router.e_score_correction_bias
        if bias is not None:
            load = counts.to(bias.device, torch.float64)
            move = (load.mean() - load).sign().to(bias.dtype)
            bias.add_(move if found_inf is None else move * (1 - found_inf), alpha=rate)
