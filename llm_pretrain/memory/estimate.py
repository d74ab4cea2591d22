"""Estimated memory, time and cost of a training run, computed from its configuration.

Memory is that of one rank in its second step, when the optimizer's state exists. Not counted: the
interpreter, a GPU's context (`CUDA_CONTEXT`), and caches of libraries (on a CPU oneDNN's generated code,
about 0.6 MiB for each shape of a product, at most 1024 of them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_pretrain.config import Config, compiles
from llm_pretrain.model import (
    ActivationShape,
    Decoder,
    Kernels,
    count_parameters,
    flops_per_token,
    head_bytes,
    layer_activation_bytes,
    loss_implementation,
    matrix_parameters,
)
from llm_pretrain.optim import parameter_groups, product_dtype, step_buffers

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
_LOW_BYTES = 2
"""Bytes of a value in fp32, and in bf16 or fp16."""


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
        activations: What the layers keep for their backward passes.
        logits: Logits and their gradient at the peak of the loss head, and its matrix in low precision.
        router_buffers: Balancing biases and counts.
        temporaries: In the backward pass of a layer: gradients of its activations, and of its widest weights
            before they are accumulated.
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
    temporaries: int
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
    model, training = config.model, config.training
    low = training.precision in ("bf16", "fp16")
    rows, length = training.micro_batch_size, training.sequence_length
    document = min(document_length if config.data.isolate_documents else length, length)
    shape = ActivationShape(rows, length, document, low, on_gpu, compiles(config, world_size, on_gpu=on_gpu))
    parameters = count_parameters(model).total
    matrices = matrix_parameters(model, with_experts=False, with_head=False)
    experts = matrix_parameters(model, with_experts=True, with_head=False) - matrices
    if on_gpu and model.moe_layers:  # with checkpointing, the experts of one layer at a time
        matrices += experts // (len(model.moe_layers) if training.activation_checkpointing else 1)
    shards = parameter_shards(config, world_size)
    divided = config.distributed.ep_size if shards > 1 else 1
    elsewhere = experts - experts // divided  # of these, tokens travel and not the weights
    is_padded = config.distributed.strategy == "fsdp" and not elsewhere  # as many whole experts on every rank
    padding = experts * (-model.num_experts % shards) // max(1, model.num_experts) if is_padded else 0
    parameters += padding
    weights = _per_rank(_FP32_BYTES * parameters, shards)
    states = _optimizer_bytes(config, parameters, padding)
    optimizer = _per_rank(states, _optimizer_shards(config, world_size))
    layers = [layer_activation_bytes(model, shape, each) for each in range(model.num_hidden_layers)]
    after_forward = activations = sum(layers)
    if training.activation_checkpointing:
        after_forward = len(layers) * shape.tokens * model.hidden_size * _FP32_BYTES
        activations = after_forward + max(layers)
    copies = _LOW_BYTES * matrices if low else 0
    accumulates = config.gradient_accumulation_steps(world_size) > 1
    is_reduced = world_size > 1 and not (config.distributed.outer and shards == 1)
    # Gradients that exist when the backward pass of the last micro batch begins. DDP's buckets always do.
    reduced, unreduced = weights if accumulates or (is_reduced and shards == 1) else 0, 0
    if shards > 1:
        copies = _gathered_bytes(config, parameters - elsewhere, low)
        if accumulates and not config.distributed.sync_each_batch:
            reduced, unreduced = 0, _FP32_BYTES * (parameters - elsewhere)
    loss = loss_implementation(Kernels(loss=training.loss_implementation), model.vocab_size or 0)
    table = _FP32_BYTES * (model.vocab_size or 0) * model.hidden_size
    logits = head_bytes(model, shape, is_fused=loss != "full") + (table // 2 if low else 0)
    routers = 2 * len(model.moe_layers) * model.num_experts * 8
    is_added = accumulates or is_reduced  # a new gradient exists beside the one that it is added to
    temporaries = _temporary_bytes(config, shape, is_added and not unreduced, divided)
    # gradients of the embedding and head: during the layers' backward passes, and at the embedding's
    held = 0 if is_added and not model.tie_word_embeddings and (shards == 1 or unreduced) else table
    at_the_end = table + (table if model.tie_word_embeddings and is_added else 0)
    buffers = _step_buffers(config, world_size, on_gpu)
    persistent = weights + optimizer + routers
    transient = max(
        reduced + unreduced + copies + after_forward + logits,
        reduced + unreduced + copies + activations + temporaries + held,  # backward pass, last layer
        weights + copies + max(layers) + temporaries + held if shards > 1 else 0,  # first layer
        weights + temporaries + at_the_end,  # embedding
        weights + buffers,
    )
    holes = 0 if on_gpu else int(CPU_HEAP_HOLES * max(0, transient - reduced))
    peak = persistent + transient + holes
    staging = weights + optimizer if config.checkpoint.async_save else 0
    return MemoryEstimate(
        weights=weights,
        gradients=weights + unreduced,
        optimizer=optimizer,
        weight_copies=copies,
        activations=activations,
        logits=logits,
        router_buffers=routers,
        temporaries=temporaries,
        embedding_gradients=max(held, at_the_end),
        optimizer_buffers=buffers,
        heap_holes=holes,
        peak=peak,
        staging=staging,
    )


def _per_rank(size: int, ranks: int) -> int:
    """A rank's share, rounded up."""
    return -(-size // ranks)


def parameter_shards(config: Config, world_size: int) -> int:
    """Ranks that share the parameters: under FSDP and ZeRO-3 more than one."""
    is_zero3 = config.distributed.strategy == "deepspeed" and config.distributed.zero_stage == 3
    return world_size if is_zero3 else config.distributed.mesh(world_size).shared


def _optimizer_shards(config: Config, world_size: int) -> int:
    is_zero = config.distributed.strategy == "deepspeed"
    return world_size if is_zero else config.distributed.mesh(world_size).shared


def _optimizer_bytes(config: Config, parameters: int, padding: int) -> int:
    """Bytes of AdamW's two moments, or Muon's one of the layers' matrices, of the average, of a replica."""
    values = 2 * parameters
    if config.optimizer.name == "muon":
        values -= matrix_parameters(config.model, with_experts=True, with_head=False) + padding
    if config.optimizer.ema_decay:
        values += parameters
    if config.distributed.outer:
        values += 2 * parameters  # with the outer optimizer's momentum
    return _FP32_BYTES * values


def _table_parameters(config: Config) -> int:
    """Parameters of embedding and head."""
    size = (config.model.vocab_size or 0) * config.model.hidden_size
    return size if config.model.tie_word_embeddings else 2 * size


def _gathered_bytes(config: Config, parameters: int, low: bool) -> int:
    """Bytes gathered under FSDP: one layer, the prefetched next one, embedding and head."""
    tables = _table_parameters(config)
    layer = (parameters - tables) // max(1, config.model.num_hidden_layers)
    return 2 * layer * (_LOW_BYTES if low else _FP32_BYTES) + _FP32_BYTES * tables


def _step_buffers(config: Config, world_size: int, on_gpu: bool) -> int:
    """Bytes of Muon's temporary buffers; AdamW's kernel and the average work in place."""
    if config.optimizer.name != "muon":
        return 0
    with torch.device("meta"):
        groups = parameter_groups(Decoder(config.model), config.optimizer)
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = product_dtype(device, config.training.precision != "fp32")
    return step_buffers(groups, dtype, config.distributed.mesh(world_size).shared)


def _temporary_bytes(config: Config, shape: ActivationShape, accumulates: bool, divided: int) -> int:
    """Temporary bytes of the layer that needs most: MLP or attention, and the residual stream's gradient.

    A dense MLP has the gradients of its product, gate and up projections. Experts have them for the rows of
    one expert at a time (up to twice the mean with an unbalanced router) and collect the results in low
    precision; the gradients of all their weights are computed at once, beside those that they are added to.
    Under expert parallelism they are those of a rank's own experts, and its rows are taken to be its share.
    Attention has those of queries, keys and values before and after rotation.
    """
    model, item = config.model, shape.product_bytes
    stream = 2 * shape.tokens * model.hidden_size * _FP32_BYTES
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    needed = [2 * shape.tokens * heads * model.attention_head_dim * _FP32_BYTES]
    if len(model.moe_layers) < model.num_hidden_layers:
        weight = model.hidden_size * model.intermediate_size * (_FP32_BYTES if accumulates else 0)
        needed.append(3 * shape.tokens * model.intermediate_size * item + weight)
    if model.moe_layers:
        wide, assigned = model.expert_intermediate_size, shape.tokens * model.num_experts_per_tok
        rows = assigned if shape.on_gpu else min(assigned, 2 * -(-assigned // model.num_experts))
        inside = rows * (5 * wide + model.hidden_size) * item
        inside += assigned * model.hidden_size * item if item < _FP32_BYTES else 0
        own = model.num_experts // divided
        stacks = 3 * own * model.hidden_size * wide * _FP32_BYTES
        needed.append(inside + (stacks if accumulates else 0))
    return stream + max(needed)
