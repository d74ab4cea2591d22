"""The `model` section of the configuration: shape of the decoder, with the checks of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from llm_pretrain.config.schema import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

VOCAB_MULTIPLE = 64
"""`model.vocab_size` defaults to the tokenizer's size rounded up to a multiple of this."""
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Rotations over the original context: YaRN leaves frequencies with more than `beta_fast` unscaled, and
scales those with fewer than `beta_slow` in full (arXiv:2309.00071, section 3.2)."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder, in transformers' vocabulary (Qwen3 and Qwen3-MoE).

    Args:
        vocab_size: Rows of the embedding. Default: the tokenizer's size, rounded up to a multiple of 64.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward network, a gated linear unit, in a dense layer.
        hidden_act: Activation of the gate in dense layers and experts: `silu` (SwiGLU, arXiv:2002.05202),
            `gelu_pytorch_tanh` (GEGLU there, with GELU's tanh approximation) or `relu2` (the square of ReLU,
            arXiv:2109.08668).
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads (grouped-query attention).
        head_dim: Width of one head. Default: hidden_size / num_attention_heads.
        max_position_embeddings: Longest sequence that the exported model supports; at least
            training.sequence_length, which is the default (with YaRN: 32768).
        rms_norm_eps: Epsilon of every RMSNorm.
        initializer_range: Standard deviation of the initial weights.
        zero_init_residual: Initialise the matrices that write into the residual stream (o_proj, down_proj)
            with zeros, so that every layer starts as the identity.
        tie_word_embeddings: Share the embedding matrix with the output projection.
        attention_dropout: Dropout probability of the attention weights.
        hidden_dropout: Dropout probability of each block's output, before the residual addition.
        rope_theta: Base of the rotary frequencies.
        rope_type: Scaling of the rotary frequencies: `default` (none), `linear` (arXiv:2306.15595) or `yarn`
            (arXiv:2309.00071).
        rope_factor: Factor by which linear or YaRN scaling extends the context.
        original_max_position_embeddings: Context length that YaRN extends. Default: max_position_embeddings /
            rope_factor.
        qk_norm: RMSNorm on queries and keys, per head (Qwen3); without it the model is a Llama or Mixtral.
        num_experts: Experts per mixture-of-experts layer; 0 makes every layer dense.
        num_experts_per_tok: Experts selected for each token (top-k).
        moe_intermediate_size: Width of one expert. Default: intermediate_size.
        norm_topk_prob: Normalise the probabilities of the selected experts to sum to one.
        n_shared_experts: Shared experts that process every token beside the selected ones: one of this many
            times the width of an expert (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        scoring_func: Function from router logits to scores: `softmax` over all experts, or `sigmoid` of each
            (DeepSeek-V3, arXiv:2412.19437).
        routed_scaling_factor: Factor on the weights of the selected experts, after normalisation.
        first_k_dense_replace: Number of leading layers that stay dense.
        decoder_sparse_step: Every n-th layer is a mixture-of-experts layer (1: all).
        router_aux_loss_coef: Coefficient of the load-balancing loss.
        router_aux_loss_scope: Tokens over which the load-balancing loss is computed. `sequence`: each
            sequence; does not depend on how the batch is split. `micro_batch` (Switch Transformer,
            transformers): depends on the split. `global_batch` (arXiv:2501.11873): the whole batch; does not
            depend on the split, and costs one more forward pass.
        router_z_loss_coef: Coefficient of the router's z-loss.
        router_bias_update_rate: Update step of the bias in balancing without a loss (arXiv:2408.15664); 0
            turns it off.
        init_from: Weights folder (of this project or Hugging Face) that training starts from instead of
            random values. The shape must be the same; a dense folder can also initialise a mixture of experts
            (upcycling).
    """

    vocab_size: Annotated[int, Range(gt=0, le=1 << 28)] | None = None
    hidden_size: Annotated[int, Range(gt=0, le=1 << 20)] = 512
    intermediate_size: Annotated[int, Range(gt=0, le=1 << 20)] = 1408
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "relu2"] = "silu"
    num_hidden_layers: Annotated[int, Range(gt=0, le=1 << 12)] = 8
    num_attention_heads: Annotated[int, Range(gt=0, le=1 << 16)] = 8
    num_key_value_heads: Annotated[int, Range(gt=0, le=1 << 16)] = 2
    head_dim: Annotated[int, Range(gt=0, le=1 << 16)] | None = None
    max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: Annotated[float, Range(gt=0, ge=1e-37)] = 1e-6  # fp32 rounds less to 0: a division by 0
    initializer_range: PositiveFloat = 0.02
    zero_init_residual: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: Fraction = 0.0
    hidden_dropout: Fraction = 0.0
    # below 1, frequencies would grow with the index of the dimension, without bound
    rope_theta: Annotated[float, Range(gt=0, ge=1.0)] = 1_000_000.0
    rope_type: Literal["default", "linear", "yarn"] = "default"
    rope_factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    qk_norm: bool = True
    num_experts: Annotated[int, Range(ge=0, le=1 << 16)] = 0
    num_experts_per_tok: PositiveInt = 2
    moe_intermediate_size: Annotated[int, Range(gt=0, le=1 << 20)] | None = None
    norm_topk_prob: bool = True
    n_shared_experts: Annotated[int, Range(ge=0, le=1 << 10)] = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_scaling_factor: PositiveFloat = 1.0
    first_k_dense_replace: NonNegativeInt = 0
    decoder_sparse_step: PositiveInt = 1
    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_aux_loss_scope: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    router_z_loss_coef: NonNegativeFloat = 0.0
    router_bias_update_rate: NonNegativeFloat = 0.0
    init_from: str | None = None

    def check(self) -> Iterator[str]:
        """One line for each contradiction between fields of this section."""
        yield from self.check_heads()
        yield from self._check_rope()
        yield from (self._check_experts() if self.num_experts else self._check_dense())

    def check_heads(self) -> Iterator[str]:
        """Problems of the numbers of heads and the head size."""
        heads, kv_heads, hidden = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        if heads % kv_heads:
            yield (
                f"model.num_attention_heads: expected a multiple of model.num_key_value_heads = {kv_heads}, "
                f"found {heads}"
            )
        if self.head_dim is None and hidden % heads:
            yield (
                f"model.hidden_size: expected a multiple of model.num_attention_heads = {heads} where "
                f"model.head_dim is not set, found {hidden}"
            )
        elif (head_dim := self.attention_head_dim) % 2:
            source = "" if self.head_dim else " = model.hidden_size / model.num_attention_heads"
            yield f"model.head_dim: expected an even width for rotary positions, found {head_dim}{source}"

    def _check_rope(self) -> Iterator[str]:
        """Problems of the RoPE scaling, including fields that have no effect with the chosen type."""
        kind, factor = self.rope_type, self.rope_factor
        original, longest = self.original_max_position_embeddings, self.longest_sequence
        if kind == "default" and factor != 1:
            yield (
                f"model.rope_factor: expected 1 with model.rope_type = default, found {factor}; "
                "set model.rope_type to linear or yarn"
            )
        elif kind != "default" and factor < 1:
            yield f"model.rope_factor: expected 1 or more, found {factor}"
        if kind != "yarn":
            if original is not None:
                yield (
                    f"model.original_max_position_embeddings: expected none with model.rope_type = {kind}, "
                    f"found {original}"
                )
            return
        if original is None:
            if factor >= 1 and longest % factor:
                yield (
                    f"model.max_position_embeddings: expected a multiple of model.rope_factor = {factor} "
                    f"where model.original_max_position_embeddings is not set, found {longest}"
                )
        elif not original <= longest <= original * factor:
            yield (
                "model.max_position_embeddings: expected at least model.original_max_position_embeddings = "
                f"{original} and at most model.rope_factor times that = {original * factor:g}, "
                f"found {longest}"
            )
        if self.rope_theta <= 1:
            yield (
                f"model.rope_theta: expected more than 1 with model.rope_type = yarn, found {self.rope_theta}"
            )

    def _check_dense(self) -> Iterator[str]:
        """Fields that have no effect in a model without experts."""
        for name, default in (
            ("n_shared_experts", 0),
            ("scoring_func", "softmax"),
            ("routed_scaling_factor", 1.0),
            ("router_bias_update_rate", 0.0),
        ):
            if (found := getattr(self, name)) != default:
                yield (
                    f"model.{name}: expected {default} with model.num_experts = 0, found {found}; "
                    "set model.num_experts"
                )
        if self.router_aux_loss_scope == "global_batch":
            yield (
                "model.router_aux_loss_scope: expected sequence or micro_batch with model.num_experts = 0, "
                "found global_batch; set model.num_experts"
            )

    def _check_experts(self) -> Iterator[str]:
        if self.num_experts_per_tok > self.num_experts:
            yield (
                f"model.num_experts_per_tok: expected at most model.num_experts = {self.num_experts}, "
                f"found {self.num_experts_per_tok}"
            )
        layers, dense, every = self.num_hidden_layers, self.first_k_dense_replace, self.decoder_sparse_step
        if dense > layers:
            yield (
                f"model.first_k_dense_replace: expected at most model.num_hidden_layers = {layers}, "
                f"found {dense}"
            )
        elif layers // every * every <= dense:
            yield (
                f"model.num_experts: expected a layer that routes to the {self.num_experts} experts, found "
                f"none with model.num_hidden_layers = {layers}, model.first_k_dense_replace = {dense}, "
                f"model.decoder_sparse_step = {every}"
            )

    @property
    def attention_head_dim(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_intermediate_size(self) -> int:
        """Width of one expert, resolved."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def longest_sequence(self) -> int:
        """`max_position_embeddings`, resolved for a model outside of a run (`Config.longest_sequence`)."""
        return self.max_position_embeddings or 32768

    @property
    def rope_original_context(self) -> int:
        """Context length that YaRN extends, resolved."""
        return self.original_max_position_embeddings or int(self.longest_sequence / self.rope_factor)

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


_NEUTRAL = {
    "qk_norm": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.0,
}
"""Values with which a field changes nothing, where they are not its default."""


def neutral_values(kind: type[ModelConfig] = ModelConfig) -> dict[str, Any]:
    """The value of each field of the model with which it changes nothing, as if the field did not exist.

    A checkpoint or an export that does not know a field, because it was added later, is taken to have this
    value.
    """
    return {field.name: field.default for field in fields(kind)} | _NEUTRAL
