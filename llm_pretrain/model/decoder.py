"""The decoder, its layers and its output head, with parameter names of Qwen3 and Qwen3-MoE.

Shapes: B sequences, S positions, H hidden_size, V vocab_size, E experts. Sums run over positions. m is the
loss_mask; n_i is the number of loss tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.attention import Attention, LayerCache, rotary_tables
from llm_pretrain.model.kernels.attention import DocumentLayout, document_layout
from llm_pretrain.model.kernels.choice import AUTO, Kernels, attention_implementation, loss_kernel
from llm_pretrain.model.kernels.layers import ACTIVATIONS, product_dtype
from llm_pretrain.model.kernels.loss import IGNORE_INDEX, LossSums
from llm_pretrain.model.layers import Embedding, FeedForward, Linear, RMSNorm
from llm_pretrain.model.moe import Experts, MoeFeedForward, Router, RouterSums


class OutputHead(Linear):
    """A linear map to the vocabulary that can also compute the loss sums of its logits.

    `forward` computes either, since sharding back-ends gather a module's parameters for that call only.
    """

    def __init__(self, hidden_size: int, vocab_size: int, kernels: Kernels = AUTO):
        super().__init__(hidden_size, vocab_size)
        self.kernels = kernels

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (one module, two results: see above)
        self, hidden_BSH: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | LossSums:
        """Logits [B, S, V], or the loss sums.

        Args:
            hidden_BSH: The hidden states after the final norm.
            labels: int64 [B, S], already shifted; any value where the mask is 0.
            mask: bool [B, S].
        """
        if labels is None or mask is None:
            return super().forward(hidden_BSH)
        kernel = loss_kernel(self.kernels, len(self.weight))
        return kernel(hidden_BSH, self.weight, labels, mask, self.kernels.z_loss_coef)


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
            activation = ACTIVATIONS[config.hidden_act]
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size, activation)

    def forward(
        self,
        x_BSH: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: DocumentLayout,
        mask_BS: Tensor,
        cache: LayerCache | None = None,
        global_counts_E: Tensor | None = None,
    ) -> tuple[Tensor, RouterSums | None]:
        """[B, S, H] to [B, S, H], and the router's sums; the sums of a dense layer are None.

        `Attention.forward` and `Router.forward` describe the arguments.
        """
        x_BSH = x_BSH + self._dropout(self.self_attn(self.input_layernorm(x_BSH), cos, sin, layout, cache))
        normed_BSH = self.post_attention_layernorm(x_BSH)
        if isinstance(self.mlp, MoeFeedForward):
            out_BSH, sums = self.mlp(normed_BSH, mask_BS, global_counts_E)
        else:
            out_BSH, sums = self.mlp(normed_BSH), None
        return x_BSH + self._dropout(out_BSH), sums

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout) if self.training and self.hidden_dropout else x


def compile_layer(layer: DecoderLayer) -> None:
    """Compile a layer in place, before it is wrapped or sharded.

    On a CPU, experts and attention within documents stay uncompiled: their shapes change from batch to batch,
    and torch would compile every new shape.
    """
    if not torch.cuda.is_available():
        for module in layer.modules():
            if isinstance(module, Experts):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore  # the same signature
    layer.compile()


class Cache(Protocol):
    """All layers' keys and values of earlier positions; see `llm_pretrain.model.generation.KeyValueCache`."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    def advance(self, input_ids: Tensor) -> Tensor:
        """Make room for `input_ids` [B, S]; returns their positions, int64 [B, S]."""
        ...


class DecoderOutput(NamedTuple):
    """The logits if there are no labels, else loss sums, not multiplied by their coefficients."""

    logits: Tensor | None
    """[B, S, V]; None if there are labels."""
    loss_sum: Tensor | None
    """Σ m · cross-entropy, 0-dim. Without labels, this field and the next three are None."""
    z_loss_sum: Tensor | None
    """Σ m · lse(logits)²."""
    aux_loss_sum: Tensor | None
    """Σ_i n_i · mean over MoE layers of bal(i, layer); see `balance_sum` and `global_balance_sum`."""
    router_z_loss_sum: Tensor | None
    """Mean over MoE layers of Σ m · lse(router logits)²."""
    expert_counts: Tensor
    """int64 [MoE layers, E]: assignments of the unmasked tokens; [0, 0] in a dense model."""
    token_losses: Tensor | None
    """[B, S] cross-entropy per position, 0 where masked, without gradient."""
    router_entropy_sum: Tensor
    """[MoE layers] Σ m · entropy of the router's probabilities, without gradient."""


class DecoderStack(nn.Module):
    """Embedding, layers and final norm."""

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
        cache: Cache | None = None,
        global_expert_counts: Tensor | None = None,
        document_offsets: Tensor | None = None,
    ) -> tuple[Tensor, list[RouterSums]]:
        x_BSH = self.embed_tokens(input_ids)
        if cache is not None:
            if position_ids is not None or document_ids is not None:
                raise ValueError("with a cache, positions and documents follow from it; pass neither")
            position_ids = cache.advance(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        config = self.config
        cos, sin = rotary_tables(position_ids, config, torch.promote_types(x_BSH.dtype, torch.float32))
        implementation = attention_implementation(
            self.kernels,
            x_BSH.device,
            product_dtype(x_BSH),
            config.attention_head_dim,
            config.attention_dropout if self.training else 0.0,
        )
        layout = document_layout(document_ids, document_offsets, implementation)
        counts: dict[int, Tensor] = {}
        if global_expert_counts is not None:
            counts = dict(zip(config.moe_layers, global_expert_counts.unbind(), strict=True))
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        all_sums: list[RouterSums] = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            inputs = (x_BSH, cos, sin, layout, mask, layer_cache, counts.get(index))
            if recompute and cache is None:
                x_BSH, sums = checkpoint(
                    layer, *inputs, use_reentrant=False, preserve_rng_state=self.has_dropout
                )
            else:
                x_BSH, sums = layer(*inputs)
            if sums is not None:
                all_sums.append(sums)
        return self.norm(x_BSH), all_sums


class Decoder(nn.Module):
    """A causal language model. Matrices are zero until `initialize_weights` or `load_state_dict`.

    Args:
        config: The model's shape; `vocab_size` must be set.
        activation_checkpointing: Recompute each layer in the backward pass of training.
        kernels: Implementations of attention, experts, norms and loss.
    """

    def __init__(
        self, config: ModelConfig, *, activation_checkpointing: bool = False, kernels: Kernels = AUTO
    ):
        super().__init__()
        self.config = config
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
        cache: Cache | None = None,
        global_expert_counts: Tensor | None = None,
        document_offsets: Tensor | None = None,
    ) -> DecoderOutput:
        """Run one micro batch.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [B, S]. Default: 0 to S - 1 in every row.
            document_ids: int64 [B, S], constant within a document, non-decreasing along a row; padding is a
                separate document. Default: each row is one document.
            labels: int64 [B, S], already shifted, IGNORE_INDEX where the mask is 0.
            loss_mask: bool [B, S]. Default: where labels are not IGNORE_INDEX, or everywhere.
            cache: Keys and values of each row's earlier positions, which `input_ids` continue; for
                generation.
            global_expert_counts: int64 [MoE layers, E], each expert's assignments in the global batch, for
                the balance loss of scope `global_batch`; see `Router.forward`.
            document_offsets: int32 [P + 1] (`cu_seqlens`), where the documents of `document_ids` begin in the
                flattened batch; see `DocumentLayout`. To compute them on a GPU would synchronise with it.
        """
        if loss_mask is None:
            loss_mask = (
                torch.ones_like(input_ids, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
            )
        hidden_BSH, router_sums = self.model(
            input_ids, position_ids, document_ids, loss_mask, cache, global_expert_counts, document_offsets
        )
        return self.output(hidden_BSH, router_sums, labels, loss_mask)

    def output(
        self, hidden_BSH: Tensor, router_sums: Sequence[RouterSums], labels: Tensor | None, loss_mask: Tensor
    ) -> DecoderOutput:
        """Compute logits or losses from the hidden states after the final norm; see `forward`."""
        if router_sums:
            counts = torch.stack([layer.counts for layer in router_sums])
            entropy = torch.stack([layer.entropy for layer in router_sums])
        else:
            counts = hidden_BSH.new_zeros((0, 0), dtype=torch.int64)
            entropy = hidden_BSH.new_zeros(0, dtype=torch.float32)
        if labels is None:
            return DecoderOutput(self.lm_head(hidden_BSH), None, None, None, None, counts, None, entropy)
        sums = self.lm_head(hidden_BSH, labels, loss_mask)
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


def full_precision_modules(model: nn.Module) -> list[nn.Module]:
    """All modules with parameters except the layers' matrices: embedding, norms, routers and head.

    In low precision these modules compute in fp32, or apply autocast's casts themselves.
    """
    kinds = Embedding | RMSNorm | Router | OutputHead
    return [module for module in model.modules() if isinstance(module, kinds)]
