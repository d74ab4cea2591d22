"""Mixture of experts: the router with its balance losses, the experts, and the loss-free balancing bias.

Shapes: B sequences, S positions, T = B*S tokens, H hidden_size, I moe_intermediate_size, E experts,
K experts per token. In sums, m is the loss_mask, n_i the number of loss tokens of sequence i, bal(i) the
balance loss of sequence i and p the router's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.kernels.choice import AUTO, Kernels, experts_kernel
from llm_pretrain.model.kernels.experts import top_experts
from llm_pretrain.model.kernels.layers import ACTIVATIONS, at_least_fp32, linear, product_dtype
from llm_pretrain.model.layers import FeedForward


class RouterSums(NamedTuple):
    """Losses and counts of one layer's router, summed over the tokens whose loss_mask is 1."""

    aux_loss: Tensor
    """Σ_i n_i · bal(i), 0-dim; with counts of the global batch: Σ m · E · Σ_e f_e · p_e."""
    z_loss: Tensor
    """Σ m · lse(router logits)², 0-dim."""
    counts: Tensor
    """int64 [E]: assignments to each expert."""
    entropy: Tensor
    """Σ m · H(p), 0-dim, without gradient."""


_NORMALISATION_EPS = 1e-20
"""Added to the sum of the chosen sigmoid scores, as in DeepSeek-V3's code."""


def count_assignments(chosen: Tensor, mask: Tensor, num_experts: int) -> Tensor:
    """Assignments of each sequence's unmasked tokens to each expert, int64 [B, E].

    Args:
        chosen: int64 [B, S, K].
        mask: bool [B, S].
        num_experts: E.
    """
    rows = len(chosen)
    row = torch.arange(rows, device=chosen.device)[:, None, None]
    # Flattened, because scatter_add on CUDA is deterministic for one dimension only.
    flat = (row * num_experts + chosen).flatten()
    ones = mask[..., None].expand_as(chosen).flatten().long()
    counts = torch.zeros(rows * num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, flat, ones).view(rows, num_experts)


def masked_sums(probs: Tensor, mask: Tensor) -> Tensor:
    """Σ_t m · p_te of each sequence: [B, S, E] and [B, S] to [B, E]."""
    return torch.bmm(mask.to(probs.dtype)[:, None], probs)[:, 0]


def balance_sum(
    probs: Tensor, chosen: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Σ_i n_i · bal(i) with `bal(i) = E · Σ_e f_e · P_e`, and the assignment counts.

    `f_e` is the fraction of sequence i's assignments to expert e, and `P_e` the mean probability of e (Switch
    Transformer, arXiv:2101.03961, section 2.2, per sequence as in arXiv:2412.19437, section 2.1.2). A
    sequence without loss tokens adds 0. With the counts of whole sequences, the sum is linear in the
    probabilities, so the sums of a sequence's parts add up to the sum of the sequence.

    Args:
        probs: [B, S, E].
        chosen: int64 [B, S, K].
        mask: bool [B, S].
        total: Turns counts of these positions into counts of the whole sequences; see `Router.total`.

    Returns:
        The sum, 0-dim, and these positions' counts, int64 [B, E].
    """
    experts, top_k = probs.shape[-1], chosen.shape[-1]
    counts_BE = count_assignments(chosen, mask, experts)
    of_whole = total(torch.cat([counts_BE, mask.sum(-1, keepdim=True)], 1))
    tokens_B = of_whole[:, -1].clamp(min=1).to(probs.dtype)
    n_times_bal_B = (of_whole[:, :-1] * masked_sums(probs, mask)).sum(-1) * (experts / top_k) / tokens_B
    return n_times_bal_B.sum(), counts_BE


def global_balance_sum(probs: Tensor, mask: Tensor, global_counts: Tensor) -> Tensor:
    """`E · Σ_e f_e · Σ_t m·p_te`, 0-dim. Over all micro batches it sums to N times the balance loss.

    `f_e`, a constant, is expert e's fraction of all assignments of the global batch (arXiv:2501.11873,
    section 3). The result is linear in the probabilities, so it adds up however the batch is split.

    Args:
        probs: [B, S, E].
        mask: bool [B, S].
        global_counts: int64 [E], over all ranks and micro batches; its sum is N·K for N loss tokens.
    """
    fractions_E = (global_counts.double() / global_counts.sum()).to(probs.dtype)
    return (fractions_E * masked_sums(probs, mask).sum(0)).sum() * probs.shape[-1]


class Router(nn.Module):
    """Routing to the top K of E experts by softmax or sigmoid scores.

    A chosen expert's weight is its score times `routed_scaling_factor`. `norm_topk_prob` divides the score by
    the sum of the chosen scores. If `router_bias_update_rate` > 0, a bias without gradient (arXiv:2408.15664)
    is added to the scores that choose the experts, but not to the weights.

    Balance loss and entropy are computed from a distribution over experts: the softmax, or the sigmoid scores
    divided by their sum (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). The code takes the softmax of
    the scores' logarithms for both, which stays defined where every score underflows. The z-loss is computed
    from the logits. Everything runs in at least fp32, also under autocast.
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
        self, x_BSH: Tensor, mask_BS: Tensor, global_counts_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RouterSums]:
        """Route every position.

        Args:
            x_BSH: The normalised hidden states.
            mask_BS: bool, the tokens that count in the sums; all tokens are routed.
            global_counts_E: int64, each expert's assignments in the global batch, for the balance loss of
                scope `global_batch`. If it is None, that scope is computed like `micro_batch`.

        Returns:
            Weights [T, K] in at least fp32, chosen experts int64 [T, K], and the sums.
        """
        with torch.autocast(x_BSH.device.type, enabled=False):
            logits_BSE = linear(at_least_fp32(x_BSH), at_least_fp32(self.weight))
            log_scores_BSE = F.logsigmoid(logits_BSE) if self.sigmoid else logits_BSE
            probs_BSE = log_scores_BSE.softmax(-1)
            scores_BSE = logits_BSE.sigmoid() if self.sigmoid else probs_BSE
            chosen_BSK = top_experts(self._ranking(scores_BSE), self.top_k)
            weights_BSK = self._weights(scores_BSE.gather(-1, chosen_BSK))
            sums = self._sums(logits_BSE, log_scores_BSE, probs_BSE, chosen_BSK, mask_BS, global_counts_E)
        return weights_BSK.flatten(0, 1), chosen_BSK.flatten(0, 1), sums

    def _ranking(self, scores_BSE: Tensor) -> Tensor:
        """The numbers that experts are chosen by: scores, plus the bias if there is one."""
        bias_E = self.e_score_correction_bias
        return scores_BSE.detach() if bias_E is None else scores_BSE.detach() + bias_E

    def ranking(self, x_BSH: Tensor) -> Tensor:
        """The numbers by which `forward` chooses experts, [B, S, E] in at least fp32, without gradient."""
        with torch.no_grad(), torch.autocast(x_BSH.device.type, enabled=False):
            logits_BSE = linear(at_least_fp32(x_BSH), at_least_fp32(self.weight))
            return self._ranking(logits_BSE.sigmoid() if self.sigmoid else logits_BSE.softmax(-1))

    def total(self, counts: Tensor) -> Tensor:
        """Counts of whole sequences; `divide_sequences` replaces it if other ranks have some positions."""
        return counts

    def _weights(self, scores_BSK: Tensor) -> Tensor:
        """Weights of the chosen experts from their scores."""
        if self.normalize:
            total = scores_BSK.sum(-1, keepdim=True)
            scores_BSK = scores_BSK / (total + _NORMALISATION_EPS if self.sigmoid else total)
        return scores_BSK if self.scaling_factor == 1 else scores_BSK * self.scaling_factor

    def _sums(
        self,
        logits_BSE: Tensor,
        log_scores_BSE: Tensor,
        probs_BSE: Tensor,
        chosen_BSK: Tensor,
        mask_BS: Tensor,
        global_counts_E: Tensor | None,
    ) -> RouterSums:
        keep_BS = mask_BS.to(logits_BSE.dtype)
        log_partition_BS = logits_BSE.logsumexp(-1)
        if global_counts_E is not None:
            aux_loss = global_balance_sum(probs_BSE, mask_BS, global_counts_E)
            counts_BE = count_assignments(chosen_BSK, mask_BS, probs_BSE.shape[-1])
        elif self.per_sequence:
            aux_loss, counts_BE = balance_sum(probs_BSE, chosen_BSK, mask_BS, self.total)
        else:
            one, chosen, mask = (each.flatten(0, 1)[None] for each in (probs_BSE, chosen_BSK, mask_BS))
            aux_loss, counts_BE = balance_sum(one, chosen, mask, self.total)
        with torch.no_grad():
            if self.sigmoid:
                log_probs_BSE = log_scores_BSE.log_softmax(-1)
            else:
                log_probs_BSE = logits_BSE - log_partition_BS[..., None]
            entropy_BS = -torch.linalg.vecdot(probs_BSE, log_probs_BSE)
        return RouterSums(
            aux_loss=aux_loss,
            z_loss=(keep_BS * log_partition_BS.square()).sum(),
            counts=counts_BE.sum(0),
            entropy=(keep_BS * entropy_BS).sum(),
        )


class Experts(nn.Module):
    """E experts in two stacked parameters, so that experts without tokens have a gradient too."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.kernels, self.activation = kernels, ACTIVATIONS[config.hidden_act]
        experts, size = config.num_experts, config.expert_intermediate_size
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(experts, config.hidden_size, size))

    def forward(self, x_TH: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """Apply each token's experts.

        Args:
            x_TH: The tokens.
            weights_TK: The routing weights.
            chosen_TK: int64, the experts.

        Returns:
            [T, H] in x's type. Products run in autocast's type inside an autocast region, else in x's type.
        """
        dtype = product_dtype(x_TH)
        gate_up, down = self.parameters_to_multiply()
        kernel = experts_kernel(self.kernels, x_TH.device, dtype, down.shape)
        with torch.autocast(x_TH.device.type, enabled=False):
            return kernel(x_TH, gate_up, down, weights_TK, chosen_TK, dtype, self.activation)

    def parameters_to_multiply(self) -> tuple[Tensor, Tensor]:
        """`gate_up_proj` and `down_proj`; expert parallelism overrides this method."""
        return self.gate_up_proj, self.down_proj


class MoeFeedForward(nn.Module):
    """Router, experts, and shared experts that every token passes through."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, kernels)
        # n shared experts are computed as one network of n times the width (arXiv:2401.06066, section 3.2).
        size = config.n_shared_experts * config.expert_intermediate_size
        self.shared_experts = FeedForward(config.hidden_size, size, self.experts.activation) if size else None

    def forward(
        self, x_BSH: Tensor, mask_BS: Tensor, global_counts_E: Tensor | None = None
    ) -> tuple[Tensor, RouterSums]:
        """[B, S, H] to [B, S, H] and the router's sums; `Router.forward` describes the arguments."""
        weights_TK, chosen_TK, sums = self.gate(x_BSH, mask_BS, global_counts_E)
        out_BSH = self.experts(x_BSH.flatten(0, 1), weights_TK, chosen_TK).view_as(x_BSH)
        return (out_BSH if self.shared_experts is None else out_BSH + self.shared_experts(x_BSH)), sums


@torch.no_grad()
def update_router_bias(
    model: nn.Module, expert_counts: Tensor, rate: float, found_inf: Tensor | None = None
) -> None:
    """Update every router's bias towards a balanced load: `b_e += rate · sign(mean count - count_e)`.

    This is loss-free balancing (arXiv:2408.15664, algorithm 1). Call it once per optimizer step, with the
    counts of the whole global batch, so that all ranks apply the same update.

    Args:
        model: A `Decoder` (unwrapped).
        expert_counts: int64 [MoE layers, E], global.
        rate: Size of the update, `router_bias_update_rate`.
        found_inf: 0-dim, on the device: 1 if the step was skipped, which keeps the bias unchanged, else 0.
    """
    stack: Any = model.get_submodule("model")
    for layer, counts in zip(stack.config.moe_layers, expert_counts, strict=True):
        router = next((each for each in stack.layers[layer].modules() if isinstance(each, Router)), None)
        bias = router.e_score_correction_bias if router else None  # or in another pipeline stage
        if bias is not None:
            load = counts.to(bias.device, torch.float64)
            update = (load.mean() - load).sign().to(bias.dtype)
            bias.add_(update if found_inf is None else update * (1 - found_inf), alpha=rate)
