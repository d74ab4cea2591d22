"""The `model` section of the configuration: the decoder's shape, documented field by field.

The other sections are in `tree.py`. This module imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VOCAB_MULTIPLE = 64
"""`model.vocab_size` defaults to the tokenizer's size rounded up to a multiple of this."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder, in transformers' vocabulary (Qwen3 and Qwen3-MoE).

    Args:
        vocab_size: Rows of the embedding. Default: the tokenizer's size, rounded up to a multiple of 64.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of a dense layer's SwiGLU.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads (grouped-query attention).
        head_dim: Width of one head. Default: hidden_size / num_attention_heads.
        max_position_embeddings: Longest position the exported model promises; at least the sequence length.
        rms_norm_eps: Epsilon of every RMSNorm.
        initializer_range: Standard deviation of the initial weights.
        zero_init_residual: Start the matrices that write into the residual stream (o_proj, down_proj) at
            zero, so that every layer begins as the identity.
        tie_word_embeddings: Share the embedding with the output projection.
        attention_dropout: Dropout probability of the attention weights.
        hidden_dropout: Dropout probability of each block's output, before the residual addition.
        rope_theta: Base of the rotary frequencies.
        rope_type: Scaling of the rotary frequencies: `default` (none), `linear` (arXiv:2306.15595) or
            `yarn` (arXiv:2309.00071).
        rope_factor: By how much linear or YaRN scaling stretches the context.
        original_max_position_embeddings: Context that YaRN stretches. Default:
            max_position_embeddings / rope_factor.
        rope_beta_fast: YaRN leaves frequencies with more rotations than this over the original context alone.
        rope_beta_slow: YaRN stretches frequencies with fewer rotations than this in full.
        qk_norm: RMSNorm on queries and keys, per head (Qwen3); without it the model is a Llama or Mixtral.
        num_experts: Experts per mixture-of-experts layer; 0 makes every layer dense.
        num_experts_per_tok: Experts chosen for each token.
        moe_intermediate_size: Width of one expert's SwiGLU. Default: intermediate_size.
        norm_topk_prob: Normalise the chosen experts' probabilities to sum to one.
        n_shared_experts: Shared experts beside the chosen ones, one SwiGLU of this many times an expert's
            width that every token passes through (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        scoring_func: How router logits become scores: `softmax` over all experts, or `sigmoid` of each
            (DeepSeek-V3, arXiv:2412.19437).
        routed_scaling_factor: Factor on the chosen experts' weights, after normalisation.
        first_k_dense_replace: Number of leading layers that stay dense.
        decoder_sparse_step: Every how many layers an expert layer stands (1: all).
        router_aux_loss_coef: Coefficient of the balance loss.
        router_aux_loss_scope: Over what the balance loss is taken. `sequence` does not depend on how
            the batch is split; `micro_batch` (Switch Transformer, transformers) does; `global_batch`
            (arXiv:2501.11873) does not and balances over the whole batch, for one more forward pass.
        router_z_loss_coef: Coefficient of the router's z-loss.
        router_bias_update_rate: Step of the loss-free balancing bias (arXiv:2408.15664); 0 turns it off.
        init_from: Weights folder (ours or Hugging Face's) that training starts from instead of random values.
            The shape must be the same; a dense folder also starts a mixture of experts (upcycling).
    """

    vocab_size: int | None = None
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    zero_init_residual: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rope_theta: float = 1_000_000.0
    rope_type: Literal["default", "linear", "yarn"] = "default"
    rope_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    qk_norm: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    n_shared_experts: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    router_aux_loss_coef: float = 0.001
    router_aux_loss_scope: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    init_from: str | None = None

    @property
    def attention_head_dim(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_intermediate_size(self) -> int:
        """Width of one expert's SwiGLU, resolved."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def rope_original_context(self) -> int:
        """Positions of the context that YaRN stretches, resolved."""
        return self.original_max_position_embeddings or int(self.max_position_embeddings / self.rope_factor)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) routes to experts."""
        return (
            self.num_experts > 0
            and layer >= self.first_k_dense_replace
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that route to experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))
