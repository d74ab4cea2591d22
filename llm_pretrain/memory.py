"""Estimated memory, time and cost of a training run, computed from its configuration.

The estimate of memory is coarse: within `TOLERANCE` of simulated and measured peaks. It is for the rank that
holds most, in the second step, when the optimizer's state exists. `llm-pretrain simulate` counts memory
exactly, with uncompiled layers. Not counted: the interpreter, a GPU's context (`CUDA_CONTEXT`), and caches of
libraries (on a CPU oneDNN's generated code, about 0.6 MiB for each shape of a product, at most 1024 shapes).

Shapes: T tokens of a rank's micro batch, H hidden_size, Q and K widths of all query and of all key heads, V
vocab_size, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_pretrain.config.loading import compiles
from llm_pretrain.config.optimizers import declaration
from llm_pretrain.config.tree import Config
from llm_pretrain.model.kernels import CPU_CHUNK, GPU_CHUNK, Kernels, loss_implementation, supports_varlen
from llm_pretrain.model.sizes import count_parameters, flops_per_token, layer_matrices
from llm_pretrain.optim.build import moments

CPU_HEAP_HOLES = 0.25
"""Fragmentation of a CPU's heap, relative to the bytes that are allocated and freed within a step (measured).

All blocks are in the heap (`keep_freed_memory`). glibc's `posix_memalign`, which torch uses, requests the
alignment in addition to the size, so a freed block is too small for the next block of its size. On a GPU
allocated bytes are counted, without fragmentation."""

CUDA_CONTEXT = 10**9
"""Bytes that CUDA takes on a GPU for itself, about."""

DOCUMENT_LENGTH = 300
"""Tokens of a document, here and in simulated batches."""

TOLERANCE = 0.25
"""Largest relative difference between an estimated peak and a simulated or measured one."""

_FP32 = 4
"""Bytes of a value in fp32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by part.

    Args:
        weights: Parameters in fp32; this rank's shard if they are sharded.
        gradients: Gradients in fp32 (DDP's buckets); this rank's shard if they are sharded. They are whole if
            only the last micro batch reduces them: without `sync_each_batch`, and in a pipeline.
        optimizer: Moments, and the average of the parameters (EMA).
        weight_copies: Matrices in low precision, from forward to backward pass; if sharded, the matrices that
            are gathered at the same time.
        activations: What the layers keep for their backward passes; with checkpointing, the inputs of all
            layers and what the last layer keeps. In a pipeline, for all micro batches in flight.
        head: Tensors of the loss: logits (whole or a chunk), their gradient, the head matrix's gradient.
        temporaries: Tensors of the backward pass of a layer: gradients of its activations and weights.
        heap_holes: Fragmentation on a CPU; see `CPU_HEAP_HOLES`.
        peak: Most bytes alive at once; less than the sum, since not all parts are alive at the same time.
        staging: Copies on the host while a checkpoint is written in the background.
    """

    weights: int
    gradients: int
    optimizer: int
    weight_copies: int
    activations: int
    head: int
    temporaries: int
    heap_holes: int
    peak: int
    staging: int


@dataclass(frozen=True)
class TrainingTime:
    """Time that a token budget takes.

    Args:
        tokens: The budget.
        flops_per_token: FLOPs of forward and backward pass.
        tokens_per_second: Speed of all ranks together.
        hours: Wall time.
        device_hours: Wall time × ranks.
    """

    tokens: int
    flops_per_token: float
    tokens_per_second: float
    hours: float
    device_hours: float


def estimate_time(config: Config, world_size: int, *, tokens: int, flops: float, mfu: float) -> TrainingTime:
    """Time to train on `tokens` with `world_size` devices of `flops` FLOP/s, at a utilisation of `mfu`."""
    per_token = flops_per_token(config.model, config.training.sequence_length)
    speed = mfu * flops * world_size / per_token
    hours = tokens / speed / 3600
    return TrainingTime(tokens, per_token, speed, hours, hours * world_size)


def token_budget(config: Config) -> int:
    """Tokens of the whole run, padding included."""
    return config.training.max_steps * config.training.tokens_per_step


def estimate_memory(config: Config, world_size: int = 1, *, on_gpu: bool = False) -> MemoryEstimate:
    """Memory of one rank; in a pipeline, of the rank that holds most.

    Args:
        config: Resolved, with `model.vocab_size`.
        world_size: Ranks.
        on_gpu: Whether the device is CUDA.
    """
    stages = range(config.distributed.mesh(world_size).pp)
    ranks = [_Rank(config, world_size, pp_rank, on_gpu).memory() for pp_rank in stages]
    return max(ranks, key=lambda memory: memory.peak)


class _Rank:
    """The bytes that one rank holds at moments of a step.

    The argument `i` of a method is a layer's index among the rank's layers. Backward passes go from the last
    layer to the first.

    Args:
        config: Resolved.
        world_size: Ranks.
        pp_rank: Place in a pipeline; 0 without one.
        on_gpu: Whether the device is CUDA.
    """

    def __init__(self, config: Config, world_size: int, pp_rank: int, on_gpu: bool):
        model, training, distributed = config.model, config.training, config.distributed
        sizes, is_zero = distributed.mesh(world_size), distributed.strategy == "deepspeed"
        zero_stage = (distributed.zero_stage or 2) if is_zero else 0
        shards = world_size if zero_stage == 3 else sizes.shared
        self.config, self.model, self.on_gpu, self.tp = config, model, on_gpu, sizes.tp
        self.is_stage = sizes.pp > 1
        self.is_sharded = world_size > 1 and (distributed.strategy == "fsdp" or zero_stage == 3)
        self.ep = distributed.ep_size if self.is_sharded else 1
        self.recomputes = training.activation_checkpointing
        self.is_eager = on_gpu and not compiles(config, world_size, on_gpu=on_gpu)
        """Whether layers keep the results between kernels; a CPU has kernels of its own."""
        self.tokens = training.micro_batch_size * training.sequence_length // sizes.sequence
        self.low = 2 if training.precision in ("bf16", "fp16") else _FP32
        """Bytes of a value in matrix products."""
        self.stream = _FP32 * self.tokens * model.hidden_size
        """Bytes of the residual stream, a layer's input, or of its gradient."""
        stages = distributed.stages(pp_rank) if self.is_stage else range(distributed.num_stages)
        self.layers = [layer for stage in stages for layer in config.stage_layers(stage)]
        self.has_head = distributed.num_stages - 1 in stages

        # parameters of the rank's layers, and the rest: embedding, head, norms and routers
        matrices = [layer_matrices(model, layer) for layer in range(model.num_hidden_layers)]
        table, tables = (model.vocab_size or 0) * model.hidden_size, 1 if model.tie_word_embeddings else 2
        vectors = count_parameters(model).total - sum(map(sum, matrices)) - tables * table
        rest = min(tables, (0 in stages) + self.has_head) * table + vectors // sizes.pp
        matrices = [matrices[layer] for layer in self.layers]
        padding = 1.0
        if distributed.strategy == "fsdp" and self.ep == 1 and model.num_experts:  # each rank gets as many
            padding = -(-model.num_experts // shards) * shards / model.num_experts
        total = rest + sum(int(each.dense + padding * each.experts) for each in matrices)
        self.weights = -(-_FP32 * total // shards)
        self.own_gradients = -(-_FP32 * total // (world_size if zero_stage >= 2 else shards))
        hidden, optimizer = sum(map(sum, matrices)), config.optimizer
        self.orthogonalized = 0
        if declaration(optimizer.name).needs_whole_matrices:
            from llm_pretrain.optim.orthogonal import BATCH_ELEMENTS

            self.orthogonalized = min(hidden // shards, BATCH_ELEMENTS)
        kept = moments(optimizer, "hidden") * hidden + moments(optimizer, "embedding") * (total - hidden)
        state = int(_FP32 * (kept + (total if optimizer.ema_decay else 0)))
        self.optimizer = -(-state // (world_size if is_zero else shards))
        # parameters that the rank computes with, divided by `tp` and `ep`, and those that FSDP gathers
        self.table, self.rest = table // self.tp, rest // self.tp
        self.dense = [each.dense // self.tp for each in matrices]
        self.experts = [each.experts // self.ep for each in matrices]
        self.gathered = [int(a + padding * b) for a, b in zip(self.dense, self.experts, strict=True)]

        micro_batches = config.gradient_accumulation_steps(world_size)
        accumulates = micro_batches > 1
        self.waits = self.is_sharded and accumulates and (self.is_stage or not distributed.sync_each_batch)
        """Whether whole gradients wait for the last micro batch."""
        self.adds = accumulates or (world_size > 1 and not self.is_sharded)
        """Whether a backward pass adds to existing gradients; DDP's buckets always exist."""
        self.sums_replicas = (
            self.is_sharded and sizes.dp_replicate > 1 and accumulates and self.ep == 1 and not self.waits
        )
        """Whether sums over replicas are kept and added when the backward pass ends; not for experts."""
        self.in_flight = _in_flight(config, sizes.pp, pp_rank, micro_batches)
        self.received = ((pp_rank > 0) + (pp_rank < sizes.pp - 1)) * micro_batches * self.stream
        """Bytes of a pipeline's receive buffers, which are for all micro batches."""
        self.saved = [self.layer_bytes(i) for i in range(len(self.layers))]

    def memory(self) -> MemoryEstimate:
        """The bytes of all parts, and the peak."""
        places = range(len(self.layers))
        layers = map(self.in_layer, places)
        transient = max(self.at_head(), *layers, self.at_end(), self.at_update())
        holes = 0 if self.on_gpu else int(CPU_HEAP_HOLES * (transient - self.gradients()))
        state = self.weights + self.optimizer
        return MemoryEstimate(
            weights=self.weights,
            gradients=max(self.own_gradients, self.gradients()),
            optimizer=self.optimizer,
            weight_copies=max(map(self.copies, places)),
            activations=max(map(self.kept, places)),
            head=self.head(),
            temporaries=max(map(self.temporaries, places)),
            heap_holes=holes,
            peak=state + transient + holes,
            staging=state if self.config.checkpoint.async_save else 0,
        )

    def at_head(self) -> int:
        """Bytes when the loss is computed, at the end of the forward pass."""
        last = len(self.layers) - 1
        kept = self.kept(last) - (self.saved[last] if self.recomputes else 0)
        # under `gpipe` the head's gradients of all micro batches wait for the backward passes
        others = self.in_flight - 1 if self.config.distributed.pp_schedule == "gpipe" and self.has_head else 0
        return self.gradients() + self.copies(last) + kept + self.head() + others * _FP32 * self.table

    def in_layer(self, i: int) -> int:
        """Peak in the backward pass of a layer; the head's gradient is alive unless it was added already."""
        waits = self.is_sharded or self.model.tie_word_embeddings or not self.adds
        of_head = _FP32 * self.table if self.has_head and waits else 0
        before = self.gradients()
        if not before:  # the layers above have theirs already
            before = self.own_gradients * sum(self.gathered[i + 1 :]) // (sum(self.gathered) + self.rest)
        return before + self.copies(i) + self.kept(i) + self.temporaries(i) + of_head

    def at_end(self) -> int:
        """Bytes when embedding and head have their gradients; under FSDP beside the gathered matrices."""
        if not self.is_sharded:
            return self.own_gradients + _FP32 * self.table * (self.adds + self.model.tie_word_embeddings)
        own = self.own_gradients * (2 if self.sums_replicas else 1)
        return own + _FP32 * (self.rest + (self.rest if self.is_stage else 2 * self.table))

    def at_update(self) -> int:
        """Bytes when the optimizer steps: Muon's updates in fp32, and about four products of their size."""
        return self.own_gradients + (_FP32 + 4 * self.low) * self.orthogonalized

    def gradients(self) -> int:
        """Bytes of the gradients of earlier micro batches."""
        if self.waits:
            return _FP32 * (sum(self.dense) + sum(self.experts) + self.rest)
        return self.own_gradients if self.adds else 0

    def copies(self, i: int) -> int:
        """Bytes of weight copies: gathered for this layer and the next one, or cast to low precision."""
        if self.is_sharded:
            gathered = self.gathered[max(0, i - 1) : i + 1]
            if self.is_stage:  # gathered once for all micro batches
                gathered = self.gathered
            elif self.experts[i] and self.ep * self.tp > 1:  # experts, and next to them the small dense part
                gathered = self.gathered[i : i + 1]
            return _FP32 * self.rest + self.low * sum(gathered)
        if self.low == _FP32:
            return 0
        # autocast keeps copies until a forward pass ends; experts make their own, on a CPU one by one
        experts = self.experts[i : i + 1] if self.recomputes else self.experts[: i + 1]
        return self.low * (sum(self.dense[: i + 1]) + (sum(experts) if self.on_gpu else 0))

    def kept(self, i: int) -> int:
        """Bytes of activations when the backward pass of a layer begins."""
        of_layers = [self.stream] * len(self.saved) if self.recomputes else self.saved
        again = self.saved[i] if self.recomputes else 0
        return self.received + (self.in_flight - 1) * sum(of_layers) + sum(of_layers[: i + 1]) + again

    def layer_bytes(self, i: int) -> int:
        """Bytes that autograd keeps of a decoder layer, from the bytes for each token."""
        model, training, low, is_eager = self.model, self.config.training, self.low, self.is_eager
        H, Q = model.hidden_size, model.num_attention_heads * model.attention_head_dim
        K = model.num_key_value_heads * model.attention_head_dim
        has_varlen = low < _FP32 and supports_varlen(model.attention_head_dim, model.attention_dropout)
        attention = training.attention_implementation
        # two norms: the stream, and the result, which `tp` gathers for all positions
        size = 2 * H * (_FP32 + low * self.tp)
        # attention: queries, keys and values, its result, and the inputs of their norms
        if not self.on_gpu:
            size += low * Q + _FP32 * (2 * Q + 2 * K)
            # a CPU keeps the attention weights of short documents
            size += low * model.num_attention_heads * min(training.sequence_length, DOCUMENT_LENGTH) // 2
        elif attention == "sdpa" or (attention == "auto" and not has_varlen):
            # keys and values for every head, and a mask of all pairs as a bias
            size += low * (4 * Q + training.sequence_length)
        else:
            size += low * (2 * Q + 2 * K)
        if model.qk_norm:
            size += (_FP32 if is_eager else low) * (Q + K)
        # gate, up, and their product; uncompiled layers keep activation(gate) too
        dense = (4 if is_eager else 3) * low
        if not model.is_moe_layer(self.layers[i]):
            return self.tokens * (size + dense * model.intermediate_size)
        # the router; for each of k experts a copy of the token, and uncompiled also the weighted product
        inner, k = model.expert_intermediate_size, model.num_experts_per_tok
        size += 2 * _FP32 * model.num_experts + (_FP32 - low) * H
        size += k * low * ((5 if is_eager else 3) * inner + (H if self.on_gpu else 0))
        return self.tokens * (size + dense * inner * model.n_shared_experts)

    def temporaries(self, i: int) -> int:
        """Bytes that a layer's backward pass adds: gradients of stream, widest tensor and weights."""
        model, low, H = self.model, self.low, self.model.hidden_size
        if model.is_moe_layer(self.layers[i]):
            inner, k = model.expert_intermediate_size, model.num_experts_per_tok
            # rows in token order and in expert order, with `ep` exchanged ones too; or the weighted product's
            rows = low * H * ((5 if self.ep > 1 else 3) if self.on_gpu else 1)
            wide = low * H + (3 * _FP32 - low if self.is_eager else 2 * low) * inner if self.on_gpu else 0
            size, weights = k * max(rows, wide), self.experts[i]
        else:
            size, weights = 2 * low * model.intermediate_size, H * model.intermediate_size
        size = self.stream + self.tokens * size
        if not self.is_sharded:
            return size + _FP32 * weights
        # whole gradients of this layer, and in fp32 those of layer i + 1, which are still being reduced
        before = 0 if self.waits else sum(self.gathered[i + 1 : i + 2])
        return size + low * (self.dense[i] + self.experts[i]) + _FP32 * before

    def head(self) -> int:
        """Bytes of the final norm, the matrix in low precision, and logits (or a chunk), with gradients."""
        if not self.has_head:
            return 0
        low, table, TH = self.low, self.table, self.tokens * self.model.hidden_size
        TV = self.tokens * (self.model.vocab_size or 0)
        size = TH * (2 * _FP32 + low * self.tp) + (low * table if low < _FP32 else 0)
        kernels = Kernels(loss=self.config.training.loss_implementation)
        if loss_implementation(kernels, self.model.vocab_size or 0) == "full":
            copies = 0 if not self.on_gpu else 1 if low == _FP32 else 2  # in fp32; a CPU's are of some rows
            return size + TV * (2 * low + copies * _FP32)
        chunk = min(TV, GPU_CHUNK if self.on_gpu else CPU_CHUNK)
        return size + low * (TH * self.tp + chunk) + _FP32 * table


def _in_flight(config: Config, pp: int, pp_rank: int, micro_batches: int) -> int:
    """Number of micro batches whose activations a pipeline's rank holds at once; 1 without a pipeline."""
    schedule = config.distributed.pp_schedule
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return micro_batches
    # with two stages on each rank, 3 · pp - 2 · rank - 1 halves of a micro batch
    warm_up = pp - pp_rank if schedule == "1f1b" else (3 * pp - 2 * pp_rank) // 2
    return min(micro_batches, warm_up)
