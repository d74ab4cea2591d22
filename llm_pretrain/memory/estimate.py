"""Estimated memory, time and cost of a training run, computed from its configuration.

Memory is that of one rank in its second step, when the optimizer's state exists. Not counted: the
interpreter, a GPU's context (`CUDA_CONTEXT`), and caches of libraries (on a CPU oneDNN's generated code,
about 0.6 MiB for each shape of a product, at most 1024 of them).
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_pretrain.config import Config
from llm_pretrain.memory.moments import Moments, per_rank
from llm_pretrain.model import count_parameters, flops_per_token

CHINCHILLA_TOKENS = 20
"""Compute-optimal tokens per (active) parameter (arXiv:2203.15556, table 3, rounded)."""

CPU_HEAP_HOLES = 0.25
"""Fragmentation of a CPU's heap, relative to the bytes that are allocated and freed within a step (measured).

All blocks are in the heap (`keep_freed_memory`). glibc's `posix_memalign`, which torch uses, requests the
alignment in addition to the size, so a freed block is too small for the next block of its size. On a GPU
allocated bytes are counted, without fragmentation."""

CUDA_CONTEXT = 10**9
"""Bytes that CUDA takes on a GPU for itself, about."""

_FP32_BYTES = 4
"""Bytes of a value in fp32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by part.

    Args:
        weights: Parameters in fp32; this rank's shard if they are sharded.
        gradients: Gradients in fp32, likewise; DDP's buckets are these. Under FSDP without `sync_each_batch`
            those that are not reduced yet as well.
        optimizer: Moments, and the average of the parameters (EMA).
        weight_copies: Matrices in low precision, from forward to backward pass; under FSDP two gathered
            layers, embedding and head.
        activations: What the layers keep for their backward passes; with checkpointing the inputs of all
            layers and what the last one keeps.
        logits: Logits and their gradient at the peak of the loss head, and its matrix in low precision.
        router_buffers: Balancing biases and counts.
        batches: Token ids and masks of a step's micro batches.
        temporaries: In the backward pass of a layer: gradients of its activations and weights.
        reductions: Under FSDP gradients of other layers on their way: the input of a reduce-scatter, and what
            was summed over replicas.
        embedding_gradients: Gradients of the embedding besides `gradients`: a tied one gets the head's part
            at the start of the backward pass and the lookup's part, of equal size, at its end.
        optimizer_buffers: Temporary buffers of the optimizer's step, such as Muon's batches of matrices.
        heap_holes: Fragmentation on a CPU; see `CPU_HEAP_HOLES`.
        peak: Most bytes alive at once; less than the sum, since not all parts are alive together.
        staging: Copies on the host while a checkpoint is written in the background.
    """

    weights: int
    gradients: int
    optimizer: int
    weight_copies: int
    activations: int
    logits: int
    router_buffers: int
    batches: int
    temporaries: int
    reductions: int
    embedding_gradients: int
    optimizer_buffers: int
    heap_holes: int
    peak: int
    staging: int


@dataclass(frozen=True)
class Time:
    """Time that a token budget takes.

    Args:
        tokens: The budget.
        flops_per_token: Of forward and backward pass.
        tokens_per_second: Of all ranks together.
        hours: Wall time.
        device_hours: Wall time × ranks.
    """

    tokens: int
    flops_per_token: float
    tokens_per_second: float
    hours: float
    device_hours: float


def estimate_time(config: Config, world_size: int, *, tokens: int, flops: float, mfu: float) -> Time:
    """Time to train on `tokens` with `world_size` devices of `flops` FLOP/s, at a utilisation of `mfu`."""
    per_token = flops_per_token(config.model, config.training.sequence_length)
    speed = mfu * flops * world_size / per_token
    hours = tokens / speed / 3600
    return Time(tokens, per_token, speed, hours, hours * world_size)


def token_budget(config: Config) -> int:
    """Tokens of the whole run, padding included."""
    training = config.training
    return training.max_steps * training.global_batch_size * training.sequence_length


def compute_optimal_tokens(config: Config) -> int:
    """Compute-optimal training tokens for a model of this size (Chinchilla)."""
    return CHINCHILLA_TOKENS * count_parameters(config.model).active


def estimate_memory(
    config: Config, world_size: int = 1, *, on_gpu: bool = False, document_length: int = 300
) -> MemoryEstimate:
    """Memory of one rank.

    Args:
        config: Resolved, with `model.vocab_size`.
        world_size: Ranks.
        on_gpu: Whether the device is CUDA.
        document_length: Mean tokens of a document; attention on a CPU keeps short documents in fp32.
    """
    moments = Moments(config, world_size, on_gpu=on_gpu, document_length=document_length)
    layers, last = moments.layers, moments.layers[-1]
    optimizer = per_rank(_optimizer_bytes(config, moments), _optimizer_shards(config, world_size))
    routers = 2 * len(config.model.moe_layers) * config.model.num_experts * 8
    transient = max(moments.all().values())
    accumulated = 0 if moments.waits else moments.gradients(last)
    holes = 0 if on_gpu else int(CPU_HEAP_HOLES * max(0, transient - accumulated))
    return MemoryEstimate(
        weights=moments.weights,
        gradients=moments.weights + (moments.gradients(last) if moments.waits else 0),
        optimizer=optimizer,
        weight_copies=max(moments.copies_at_head(), *map(moments.copies, layers)),
        activations=moments.kept(last),
        logits=moments.logits(),
        router_buffers=routers,
        batches=moments.batches,
        temporaries=max(map(moments.temporaries, layers)),
        reductions=max(map(moments.reductions, layers)),
        embedding_gradients=max(moments.head_gradient(), moments.embedding_gradients()),
        optimizer_buffers=moments.optimizer_buffers(),
        heap_holes=holes,
        peak=moments.weights + optimizer + routers + moments.batches + transient + holes,
        staging=moments.weights + optimizer if config.checkpoint.async_save else 0,
    )


def _optimizer_shards(config: Config, world_size: int) -> int:
    is_zero = config.distributed.strategy == "deepspeed"
    return world_size if is_zero else config.distributed.mesh(world_size).shared


def _optimizer_bytes(config: Config, moments: Moments) -> int:
    """Bytes of AdamW's two moments, or Muon's one of the layers' matrices, and of the average."""
    values = 2 * moments.parameters
    if config.optimizer.name == "muon":
        values -= sum(map(sum, moments.matrices)) + moments.padding
    if config.optimizer.ema_decay:
        values += moments.parameters
    return _FP32_BYTES * values
