"""The decoder: embedding, layers, norm and head, with parameter names of transformers' Qwen3 and Qwen3-MoE.

One forward pass of a micro batch. No sampling, no coefficients and no normalisation of losses.

Shapes: B sequences, S positions, H hidden_size, V vocab_size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llm_pretrain.config import ModelConfig
from llm_pretrain.model.attention import Attention
from llm_pretrain.model.cache import KeyValueCache, LayerCache
from llm_pretrain.model.document_layout import DocumentLayout, attention_implementation, document_layout
from llm_pretrain.model.experts import Experts
from llm_pretrain.model.head import OutputHead
from llm_pretrain.model.kernels import AUTO, Kernels
from llm_pretrain.model.layers import Embedding, FeedForward, product_dtype
from llm_pretrain.model.loss_head import IGNORE_INDEX
from llm_pretrain.model.norms import RMSNorm
from llm_pretrain.model.rotary import rotary_tables
from llm_pretrain.model.router import Router, RouterSums


class DecoderOutput(NamedTuple):
    """Logits without labels; sums over the tokens whose loss_mask is 1, without coefficients, with them."""

    logits: Tensor | None
    """[B, S, V]; None with labels."""
    loss_sum: Tensor | None
    """Σ m · cross-entropy, 0-dim; None without labels, as the next three."""
    z_loss_sum: Tensor | None
    """Σ m · lse(logits)²."""
    aux_loss_sum: Tensor | None
    """Σ_i n_i · mean over MoE layers of bal(i, layer); see `balance_sum` and `global_balance_sum`."""
    router_z_loss_sum: Tensor | None
    """Mean over MoE layers of Σ m · lse(router logits)²."""
    expert_counts: Tensor
    """int64 [MoE layers, E]: assignments of the tokens that count; [0, 0] in a dense model."""
    token_losses: Tensor | None
    """[B, S] cross-entropy per position, 0 where masked, without gradient."""
    router_entropy_sum: Tensor
    """[MoE layers] Σ m · entropy of the router's probabilities, without gradient."""


class MoeFeedForward(nn.Module):
    """Router and experts, and the shared experts that see every token, in the place of a dense SwiGLU."""

    def __init__(self, config: ModelConfig, kernels: Kernels = AUTO):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, kernels)
        # Shared experts side by side are one SwiGLU of their summed width (arXiv:2401.06066, section 3.2).
        size = config.n_shared_experts * config.expert_intermediate_size
        self.shared_experts = FeedForward(config.hidden_size, size) if size else None

    def forward(
        self, hidden: Tensor, mask: Tensor, global_counts: Tensor | None = None
    ) -> tuple[Tensor, RouterSums]:
        weights, chosen, sums = self.gate(hidden, mask, global_counts)
        out = self.experts(hidden.flatten(0, 1), weights, chosen).view_as(hidden)
        return (out if self.shared_experts is None else out + self.shared_experts(hidden)), sums


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual addition."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels = AUTO):
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_moe_layer(layer):
            self.mlp = MoeFeedForward(config, kernels)
        else:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        mask: Tensor,
        cache: LayerCache | None = None,
        global_counts: Tensor | None = None,
    ) -> tuple[Tensor, RouterSums | None]:
        """[B, S, H] to [B, S, H], and the router's sums where there is one."""
        normed = self.input_layernorm(hidden, copies=3)
        hidden = hidden + self._drop(self.self_attn(normed, cos, sin, layout, cache))
        if isinstance(self.mlp, MoeFeedForward):
            out, sums = self.mlp(self.post_attention_layernorm(hidden), mask, global_counts)
        else:
            out, sums = self.mlp(self.post_attention_layernorm(hidden, copies=2)), None
        return hidden + self._drop(out), sums

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout) if self.training and self.hidden_dropout else x


class DecoderStack(nn.Module):
    """Everything below the output projection."""

    def __init__(self, config: ModelConfig, activation_checkpointing: bool, kernels: Kernels):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size must be resolved before the model is built")
        self.config, self.kernels = config, kernels
        self.activation_checkpointing = activation_checkpointing
        self.has_dropout = config.attention_dropout > 0 or config.hidden_dropout > 0
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, kernels) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        mask: Tensor,
        cache: KeyValueCache | None = None,
        global_expert_counts: Tensor | None = None,
        document_offsets: Tensor | None = None,
    ) -> tuple[Tensor, list[RouterSums]]:
        hidden = self.embed_tokens(input_ids)
        if cache is not None:
            if position_ids is not None or document_ids is not None:
                raise ValueError("with a cache, positions and documents follow from it; pass neither")
            position_ids = cache.advance(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cos, sin = rotary_tables(position_ids, self.config, torch.promote_types(hidden.dtype, torch.float32))
        shared = (cos, sin, self._layout(hidden, document_ids, document_offsets), mask)
        counts: dict[int, Tensor] = {}
        if global_expert_counts is not None:
            counts = dict(zip(self.config.moe_layers, global_expert_counts.unbind(), strict=True))
        all_sums: list[RouterSums] = []
        for index, layer in enumerate(self.layers):
            if cache is not None:
                hidden, sums = layer(hidden, *shared, cache.layers[index])
            elif self.activation_checkpointing and self.training and torch.is_grad_enabled():
                hidden, sums = checkpoint(
                    layer,
                    *(hidden, *shared, None, counts.get(index)),
                    use_reentrant=False,
                    preserve_rng_state=self.has_dropout,
                )
            else:
                hidden, sums = layer(hidden, *shared, None, counts.get(index))
            if sums is not None:
                all_sums.append(sums)
        return self.norm(hidden), all_sums

    def _layout(
        self, hidden: Tensor, document_ids: Tensor | None, document_offsets: Tensor | None
    ) -> DocumentLayout:
        config = self.config
        dropout = config.attention_dropout if self.training else 0.0
        kind = attention_implementation(
            self.kernels, hidden.device, product_dtype(hidden), config.attention_head_dim, dropout
        )
        return document_layout(document_ids, document_offsets, kind)


class Decoder(nn.Module):
    """A causal language model. Matrices are zero until `initialize_weights` or `load_state_dict`.

    Args:
        config: Its shape; `vocab_size` must be set.
        activation_checkpointing: Recompute each layer in the backward pass of training.
        kernels: Implementations of its parts.
    """

    def __init__(
        self, config: ModelConfig, *, activation_checkpointing: bool = False, kernels: Kernels = AUTO
    ):
        super().__init__()
        self.config, self.kernels = config, kernels
        self.model = DecoderStack(config, activation_checkpointing, kernels)
        self.lm_head = OutputHead(config.hidden_size, self.model.embed_tokens.num_embeddings, kernels)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        global_expert_counts: Tensor | None = None,
        document_offsets: Tensor | None = None,
    ) -> DecoderOutput:
        """Run one micro batch.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [B, S]. Default: 0 to S - 1 in every row.
            document_ids: int64 [B, S], constant within a document, never falling along a row; padding is
                a document of its own. Default: each row is one document.
            labels: int64 [B, S], already shifted, IGNORE_INDEX where the mask is 0.
            loss_mask: bool [B, S]. Default: where labels are not IGNORE_INDEX, or everywhere.
            cache: Holds each row's earlier positions, to which `input_ids` are the next; for generation.
            global_expert_counts: int64 [MoE layers, E], assignments in the whole global batch, for the
                balance loss of scope `global_batch`; see `Router.forward`.
            document_offsets: int32 [P + 1], the same documents as `document_ids`, by where they begin along
                the flattened batch; see `DocumentLayout`. For those to whom counting them would be waiting.
        """
        if loss_mask is None:
            loss_mask = (
                torch.ones_like(input_ids, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
            )
        hidden, router_sums = self.model(
            input_ids, position_ids, document_ids, loss_mask, cache, global_expert_counts, document_offsets
        )
        counts, entropy = _per_layer(router_sums, hidden)
        if labels is None:
            return DecoderOutput(self.lm_head(hidden), None, None, None, None, counts, None, entropy)
        sums = self.lm_head(hidden, labels, loss_mask)
        aux_loss, router_z_loss = sums.loss.new_zeros(()), sums.loss.new_zeros(())
        if router_sums:
            aux_loss = torch.stack([layer.aux_loss for layer in router_sums]).mean()
            router_z_loss = torch.stack([layer.z_loss for layer in router_sums]).mean()
        return DecoderOutput(
            logits=None,
            loss_sum=sums.loss,
            z_loss_sum=sums.z_loss,
            aux_loss_sum=aux_loss,
            router_z_loss_sum=router_z_loss,
            expert_counts=counts,
            token_losses=sums.token_losses,
            router_entropy_sum=entropy,
        )


def _per_layer(router_sums: list[RouterSums], like: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int64 [MoE layers, E] and entropy sums [MoE layers]."""
    if not router_sums:
        return like.new_zeros((0, 0), dtype=torch.int64), like.new_zeros(0, dtype=torch.float32)
    counts = torch.stack([layer.counts for layer in router_sums])
    return counts, torch.stack([layer.entropy for layer in router_sums])


def full_precision_modules(model: Decoder) -> list[nn.Module]:
    """All that has parameters except the layers' matrices: embedding, norms, routers and head.

    In low precision these compute in fp32, or cast for themselves what autocast casts.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, Embedding | RMSNorm | Router) or module is model.lm_head
    ]
