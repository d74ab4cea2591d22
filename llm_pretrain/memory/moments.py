"""What one rank holds at the moments of a step at which its memory may be highest.

These are: the forward pass of the last layer; the loss head, where everything is kept; the backward pass of a
layer, and under FSDP the reduction of its gradients; the gradient of the embedding, and its reduction; the
update. `simulate` finds what holds memory at each by running the step; here every term is computed.
"""

from __future__ import annotations

import torch

from llm_pretrain.config import Config, compiles
from llm_pretrain.model import (
    ActivationShape,
    Decoder,
    Kernels,
    WeightGradient,
    count_parameters,
    head_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    layer_forward_bytes,
    layer_matrices,
    loss_implementation,
    position_bytes,
    stream_bytes,
    supports_varlen,
)
from llm_pretrain.optim import parameter_groups, product_dtype, step_buffers

_FP32 = 4
_TOKEN_BYTES = 4 * 8 + 1
"""Of a token of a batch: id, position, document and label, int64, and the loss mask."""


class Moments:
    """Bytes of one rank's parts in its second step, when the optimizer's state exists.

    Layers are numbered from 0; their backward passes run from the last to the first. What a method returns
    for a layer is alive during that layer's backward pass.

    Args:
        config: Resolved, with `model.vocab_size`.
        world_size: Ranks.
        on_gpu: Whether the device is CUDA.
        document_length: Mean tokens of a document.
    """

    def __init__(self, config: Config, world_size: int, *, on_gpu: bool, document_length: int):
        model, training, distributed = config.model, config.training, config.distributed
        self.config, self.world_size = config, world_size
        self.is_sharded, self.shards = is_sharded(config, world_size), parameter_shards(config, world_size)
        self.shape = _shape(config, world_size, on_gpu, document_length)
        self.layers = range(model.num_hidden_layers)
        self.matrices = [layer_matrices(model, layer) for layer in self.layers]
        total = count_parameters(model).total
        self.rest = total - sum(map(sum, self.matrices))
        """Parameters outside the layers' matrices: embedding, head, norms and routers."""
        padded = self._padded_experts()
        self.padding = sum(int(each.experts * (padded - 1)) for each in self.matrices)
        self.parameters = total + self.padding
        self.weights = per_rank(_FP32 * self.parameters, self.shards)
        experts = [int(each.experts * padded) for each in self.matrices]
        self.owned = [
            _FP32 * (each.dense + own) // self.shards
            for each, own in zip(self.matrices, experts, strict=True)
        ]
        """This rank's share of a layer's gradients."""
        self.experts = [each // self.shape.ep_size for each in experts]
        """Parameters of the experts that a rank computes with in a layer."""
        accumulates = config.gradient_accumulation_steps(world_size) > 1
        self.waits = self.is_sharded and accumulates and not distributed.sync_each_batch
        """Whether whole gradients wait for the last micro batch."""
        self.adds = accumulates or (world_size > 1 and not self.is_sharded)
        """Whether gradients exist to which a backward pass adds its own; DDP's buckets always do."""
        kernels = Kernels(loss=training.loss_implementation)
        self.is_fused = loss_implementation(kernels, model.vocab_size or 0) == "fused"
        self.table = _FP32 * (model.vocab_size or 0) * model.hidden_size
        self.batches = config.gradient_accumulation_steps(world_size) * self.shape.tokens * _TOKEN_BYTES
        self.stream, self.positions = stream_bytes(model, self.shape), position_bytes(model, self.shape)
        self.computed = [layer_activation_bytes(model, self.shape, layer) for layer in self.layers]
        """What the forward pass of a layer keeps."""

    def _padded_experts(self) -> float:
        """Rows of the experts relative to those without padding: FSDP gives as many to every rank."""
        experts = self.config.model.num_experts
        if self.config.distributed.strategy != "fsdp" or self.shape.ep_size > 1 or not experts:
            return 1.0
        return -(-experts // self.shards) * self.shards / experts

    def all(self) -> dict[str, int]:
        """Bytes beside weights and the optimizer's state, by moment."""
        found = {"forward pass of the last layer": self.in_forward(), "loss head": self.at_head()}
        found |= {f"backward pass of layer {layer}": self.in_layer(layer) for layer in self.layers}
        if self.is_sharded:
            found |= {f"reduction of layer {layer}": self.in_reduction(layer) for layer in self.layers}
            found["reduction of the embedding"] = self.in_last_reduction()
        return found | {"gradient of the embedding": self.at_embedding(), "update": self.in_update()}

    def in_forward(self) -> int:
        """In the forward pass of the last layer."""
        last = self.layers[-1]
        inside = layer_forward_bytes(self.config.model, self.shape, last)
        return self.gradients(last) + self.copies(last) + self.kept(last) + inside

    def at_head(self) -> int:
        """When the loss head has computed its gradients, at the end of the forward pass."""
        return (
            self.gradients(self.layers[-1]) + self.copies_at_head() + self.kept_by_forward() + self.logits()
        )

    def in_layer(self, layer: int) -> int:
        """In the backward pass of a layer."""
        held = self.gradients(layer) + self.reductions(layer) + self.copies(layer)
        return held + self.kept(layer) + self.temporaries(layer) + self.head_gradient()

    def in_reduction(self, layer: int) -> int:
        """When a layer's gradients, in the type of its products, are copied for a reduce-scatter in fp32."""
        group = max(self.groups(layer))
        before = self.kept(layer) - self.computed[layer] + self.stream
        held = self.gradients(layer) + self.replicas_gradients(layer) + before
        gathered = _FP32 * self.rest + self._gathered(layer - 1)
        unreduced = 0 if self.waits else self.shape.product_bytes * group
        return held + gathered + self.head_gradient() + unreduced + _FP32 * group

    def at_embedding(self) -> int:
        """When the lookup's gradient is computed, of the embedding's size."""
        first = self.reductions(-1) + (_FP32 * self.rest if self.is_sharded else 0)
        return self.gradients(-1) + first + self.embedding_gradients() + self.positions + self.stream

    def in_last_reduction(self) -> int:
        """When the gradients of embedding, head and norms are copied for their reduce-scatter."""
        return self.gradients(-1) + self.replicas_gradients(-1) + 2 * _FP32 * self.rest

    def in_update(self) -> int:
        """When the optimizer computes its updates."""
        return self.weights + self.optimizer_buffers()

    def gradients(self, layer: int) -> int:
        """Gradients of this and of earlier micro batches, when the layers above this one have theirs.

        Those that are not reduced yet are whole. -1: when all layers have theirs.
        """
        done = sum(self.owned[layer + 1 :])
        if self.waits:
            whole = sum(map(sum, (self.groups(each) for each in self.layers[: layer + 1])))
            return done + _FP32 * (whole + self.rest)
        if self.adds or (layer < 0 and not self.is_sharded):
            return self.weights
        return done

    def head_gradient(self) -> int:
        """The head's gradient: a tied one waits for that of the embedding, FSDP for the norms' too."""
        is_added = self.adds and not self.config.model.tie_word_embeddings
        return 0 if is_added and (not self.is_sharded or self.waits) else self.table

    def embedding_gradients(self) -> int:
        """The embedding's beside `gradients`: the lookup's, and the head's where that waits for it."""
        if self.is_sharded and not self.waits:
            return 2 * self.table
        return self.table * (self.adds + self.config.model.tie_word_embeddings)

    def reductions(self, layer: int) -> int:
        """Under FSDP the input of the reduce-scatter before this layer's; and `replicas_gradients`."""
        if not self.is_sharded:
            return 0
        above = layer + 1
        before = _FP32 * self.groups(above)[-1] if above < len(self.layers) else 0
        return before + self.replicas_gradients(layer)

    def replicas_gradients(self, layer: int) -> int:
        """The layers' above, summed over replicas: they are kept until the backward pass ends.

        The first micro batch's are the gradients themselves.
        """
        has_replicas = self.is_sharded and self.config.distributed.dp_replicate_size > 1
        return sum(self.owned[layer + 1 :]) if has_replicas and self.adds else 0

    def groups(self, layer: int) -> tuple[int, ...]:
        """Parameters that FSDP gathers and reduces together, in the order of the backward pass."""
        dense, experts = self.matrices[layer].dense, self.experts[layer]
        return (experts, dense) if self.shape.ep_size > 1 and experts else (dense + experts,)

    def copies(self, layer: int) -> int:
        """Weights beside the rank's own: in low precision, or gathered (this layer's, and the next one's)."""
        if self.is_sharded:
            return _FP32 * self.rest + self._gathered(layer) + self._gathered(layer - 1)
        lowest = layer if self.shape.checkpointed else 0
        return sum(self._low_copies(each) for each in range(lowest, layer + 1))

    def copies_at_head(self) -> int:
        """The same at the end of the forward pass.

        Autocast keeps its copies until then, also of layers that are computed again; compiled layers and
        experts cast by themselves. Gradients of whole logits are computed later.
        """
        last = self.layers[-1]
        if self.is_sharded:
            return _FP32 * self.rest + self._gathered(last)
        if not self.shape.checkpointed:
            return self.copies(last)
        is_cast = self.shape.low_precision and self.is_fused and not self.shape.compiled
        return sum(self.shape.product_bytes * each.dense for each in self.matrices) if is_cast else 0

    def _gathered(self, layer: int) -> int:
        return self.shape.product_bytes * sum(self.groups(layer)) if layer >= 0 else 0

    def _low_copies(self, layer: int) -> int:
        """On a CPU those of experts exist one at a time."""
        parameters = self.matrices[layer].dense + (self.experts[layer] if self.shape.on_gpu else 0)
        return self.shape.product_bytes * parameters if self.shape.low_precision else 0

    def kept(self, layer: int) -> int:
        """Activations that are kept when a layer's backward pass begins."""
        below = self.computed[:layer]
        if self.shape.checkpointed:
            below = [self.stream] * layer
        return self.positions + sum(below) + self.computed[layer]

    def kept_by_forward(self) -> int:
        """Activations that are kept at the end of the forward pass."""
        if self.shape.checkpointed:
            return self.positions + len(self.layers) * self.stream
        return self.kept(self.layers[-1])

    def logits(self) -> int:
        """What the loss head holds, and its matrix in low precision."""
        low_matrix = self.table // 2 if self.shape.low_precision else 0
        return head_bytes(self.config.model, self.shape, is_fused=self.is_fused) + low_matrix

    def temporaries(self, layer: int) -> int:
        """What the backward pass of a layer adds to the activations."""
        low = self.shape.product_bytes
        if self.is_sharded:
            gradient = WeightGradient(computed=low, kept=low, copy=0)
        else:
            copy = low if self.shape.low_precision else 0
            gradient = WeightGradient(_FP32, kept=0 if self.adds else _FP32, copy=copy)
        return layer_backward_bytes(self.config.model, self.shape, layer, gradient)

    def optimizer_buffers(self) -> int:
        """Muon's temporary buffers; AdamW's kernel and the average work in place."""
        config = self.config
        if config.optimizer.name != "muon":
            return 0
        with torch.device("meta"):
            groups = parameter_groups(Decoder(config.model), config.optimizer)
        dtype = product_dtype(
            torch.device("cuda" if self.shape.on_gpu else "cpu"), config.training.precision != "fp32"
        )
        return step_buffers(groups, dtype, config.distributed.mesh(self.world_size).shared)


def _shape(config: Config, world_size: int, on_gpu: bool, document_length: int) -> ActivationShape:
    model, training = config.model, config.training
    length, low = training.sequence_length, training.precision in ("bf16", "fp16")
    document = min(document_length if config.data.isolate_documents else length, length)
    has_kernel = low and supports_varlen(model.attention_head_dim, model.attention_dropout)
    is_sdpa = training.attention_implementation == "sdpa"
    is_masked = is_sdpa or (training.attention_implementation == "auto" and not has_kernel)
    return ActivationShape(
        training.micro_batch_size,
        length,
        document,
        low,
        on_gpu,
        compiled=compiles(config, world_size, on_gpu=on_gpu),
        masked=on_gpu and is_masked,
        checkpointed=training.activation_checkpointing,
        ep_size=config.distributed.ep_size if is_sharded(config, world_size) else 1,
    )


def per_rank(size: int, ranks: int) -> int:
    """A rank's share, rounded up."""
    return -(-size // ranks)


def is_sharded(config: Config, world_size: int) -> bool:
    """Whether the parameters are sharded, under FSDP or ZeRO-3; perhaps over one rank of each replica."""
    strategy, stage = config.distributed.strategy, config.distributed.zero_stage or 2
    return world_size > 1 and (strategy == "fsdp" or (strategy == "deepspeed" and stage == 3))


def parameter_shards(config: Config, world_size: int) -> int:
    """Ranks that share the parameters."""
    if config.distributed.strategy == "deepspeed":
        return world_size if is_sharded(config, world_size) else 1
    return config.distributed.mesh(world_size).shared
