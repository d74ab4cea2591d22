"""What a training run needs before it is started: memory by part, time and cost. Arithmetic, no measurement.

Of one rank's step in its steady state, from the second step on, when the optimizer's state exists. Not in it:
the interpreter, a GPU's context (about 1 GiB), and what libraries keep for themselves: on a CPU oneDNN's
machine code, about 0.6 MiB for each combination of a product's sizes, 1024 of them at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_pretrain.config import Config
from llm_pretrain.model import (
    ActivationShape,
    Decoder,
    count_parameters,
    flops_per_token,
    head_bytes,
    layer_activation_bytes,
    matrix_parameters,
)
from llm_pretrain.training.muon import step_buffers
from llm_pretrain.training.optimizers import parameter_groups
from llm_pretrain.training.orthogonal import product_dtype

CHINCHILLA_TOKENS = 20
"""Compute-optimal tokens per parameter (arXiv:2203.15556, table 3, rounded); of a mixture, per active one."""

FUSED_FROM = 1024
"""Vocabulary from which the loss head works in chunks."""

CPU_HEAP_HOLES = 0.25
"""Of what comes and goes within a step, what a CPU's heap grows by beyond it.

All blocks lie in the heap (`training/process.py`), and glibc's `posix_memalign`, by which torch gets them,
asks for the alignment's bytes on top: the hole that a block leaves is too small for the next of its size. How
many are filled by smaller ones is measured, not counted. A GPU is counted by what is allocated."""

_FP32 = 4
_COUNTED_IN_LOW = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part.

    Args:
        weights: Parameters in fp32, of which a sharding rank keeps its part.
        gradients: In fp32, likewise; DDP's buckets are these.
        optimizer: Moments, and the average of the parameters where one is kept.
        weight_copies: The products' matrices in low precision, from forward to backward; under FSDP a layer
            put together, twice, and the tables.
        activations: What the layers keep for their backward passes.
        logits: Logits and their gradient at the peak of the loss head.
        router_buffers: Balancing biases, counts.
        temporaries: Of the backward pass of a layer: gradients of its activations, and of its widest weights
            before they are added to others.
        embedding_gradients: What the backward pass holds of the embedding's gradient beside `gradients`: a
            tied one gets the head's part at its beginning and the lookup's, as large, at its end.
        optimizer_buffers: Of the optimizer's step alone, such as Muon's batches of matrices.
        heap_holes: What is lost between blocks of different lifetimes, on a CPU; see `CPU_HEAP_HOLES`.
        peak: The most that is alive at once; less than the sum where parts are not alive together.
        staging: Copies in the processor's memory while a checkpoint is written in the background.
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
    """How long a budget takes.

    Args:
        tokens: Of the budget.
        flops_per_token: Forward and backward pass.
        tokens_per_second: Of all ranks together.
        hours: By the wall's clock.
        device_hours: Times the number of ranks.
    """

    tokens: int
    flops_per_token: float
    tokens_per_second: float
    hours: float
    device_hours: float


def estimate_time(config: Config, world_size: int, *, tokens: int, flops: float, mfu: float) -> Time:
    """Time to train on `tokens`, on `world_size` devices that reach the share `mfu` of `flops` per second."""
    per_token = flops_per_token(config.model, config.training.sequence_length)
    speed = mfu * flops * world_size / per_token
    hours = tokens / speed / 3600
    return Time(tokens, per_token, speed, hours, hours * world_size)


def token_budget(config: Config) -> int:
    """Tokens of the whole run, padding counted."""
    training = config.training
    return training.max_steps * training.global_batch_size * training.sequence_length


def compute_optimal_tokens(config: Config) -> int:
    """Tokens at which a model of this size makes the best of its compute."""
    return CHINCHILLA_TOKENS * count_parameters(config.model).active


def estimate_memory(
    config: Config, world_size: int = 1, *, on_gpu: bool = False, document_length: int = 300
) -> Memory:
    """Memory of one rank.

    Args:
        config: Resolved, with `model.vocab_size`.
        world_size: Ranks.
        on_gpu: Whether it trains on CUDA.
        document_length: Mean tokens of a document; a CPU keeps short ones in fp32.
    """
    model, training = config.model, config.training
    low = training.precision in ("bf16", "fp16")
    rows, length = training.micro_batch_size, training.sequence_length
    pieces = min(document_length if config.data.isolate_documents else length, length)
    shape = ActivationShape(rows, length, pieces, low, on_gpu)
    parameters = count_parameters(model).total
    matrices = matrix_parameters(model, with_experts=on_gpu)
    sharded = world_size if _shards_parameters(config) else 1
    weights, gradients = (_share(_FP32 * parameters, sharded) for _ in range(2))
    optimizer = _share(_optimizer_bytes(config, parameters), _optimizer_shards(config, world_size))
    layers = [layer_activation_bytes(model, shape, each) for each in range(model.num_hidden_layers)]
    activations = sum(layers)
    if training.activation_checkpointing:
        activations = len(layers) * shape.tokens * model.hidden_size * _FP32 + max(layers)
    copies = _COUNTED_IN_LOW * matrices if low and sharded == 1 else 0
    if sharded > 1:
        copies = _gathered_bytes(config, parameters, low)
    logits = head_bytes(model, shape, is_fused=_head_is_fused(config))
    routers = 2 * len(model.moe_layers) * model.num_experts * 8
    accumulates = config.gradient_accumulation_steps(world_size) > 1 or world_size > 1
    temporaries = _temporary_bytes(config, shape, accumulates)
    table = _FP32 * (model.vocab_size or 0) * model.hidden_size
    held = table if model.tie_word_embeddings or not accumulates else 0
    at_the_end = table + (table if model.tie_word_embeddings and accumulates else 0)
    buffers = _step_buffers(config, on_gpu)
    persistent = weights + optimizer + routers
    passing = max(
        (gradients if accumulates else 0) + copies + activations + max(logits, temporaries + held),
        gradients + temporaries + at_the_end,  # where the backward pass ends; above, where the forward does
        gradients + buffers,
    )
    kept = gradients if accumulates else 0  # else asked for anew, while what the forward pass kept goes
    holes = 0 if on_gpu else int(CPU_HEAP_HOLES * max(0, passing - kept))
    peak = persistent + passing + holes
    staging = weights + optimizer if config.checkpoint.async_save else 0
    return Memory(
        weights, gradients, optimizer, copies, activations, logits, routers, temporaries,
        max(held, at_the_end), buffers, holes, peak, staging,
    )  # fmt: skip


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _shards_parameters(config: Config) -> bool:
    strategy, stage = config.distributed.strategy, config.distributed.zero_stage or 2
    return strategy == "fsdp" or (strategy == "deepspeed" and stage == 3)


def _optimizer_shards(config: Config, world_size: int) -> int:
    return 1 if config.distributed.strategy == "ddp" else world_size


def _optimizer_bytes(config: Config, parameters: int) -> int:
    """AdamW keeps two moments of everything, Muon one of the layers' matrices."""
    values = 2 * parameters
    if config.optimizer.name == "muon":
        values -= matrix_parameters(config.model, with_experts=True, with_head=False)
    if config.optimizer.ema_decay:
        values += parameters
    return _FP32 * values


def _head_is_fused(config: Config) -> bool:
    """As `auto` decides in the model's head.py."""
    chosen, training = config.training.loss_implementation, config.training
    if chosen != "auto":
        return chosen != "full"
    return (config.model.vocab_size or 0) >= FUSED_FROM and training.precision != "fp16"


def _gathered_bytes(config: Config, parameters: int, low: bool) -> int:
    """Under FSDP: the largest layer and the one fetched ahead; embedding and head with their gradient."""
    tables = (config.model.vocab_size or 0) * config.model.hidden_size
    tables *= 1 if config.model.tie_word_embeddings else 2
    layer = (parameters - tables) // max(1, config.model.num_hidden_layers)
    return 2 * layer * (_COUNTED_IN_LOW if low else _FP32) + 2 * _FP32 * tables


def _step_buffers(config: Config, on_gpu: bool) -> int:
    """Of Muon, by the matrices that it would update; AdamW's kernel and the average work in place."""
    if config.optimizer.name != "muon":
        return 0
    with torch.device("meta"):
        groups = parameter_groups(Decoder(config.model), config.optimizer)
    device = torch.device("cuda" if on_gpu else "cpu")
    return step_buffers(groups, product_dtype(device, config.training.precision != "fp32"))


def _temporary_bytes(config: Config, shape: ActivationShape, accumulates: bool) -> int:
    """Of the layer that needs most: its feed-forward, or its attention, and the residual stream's gradient.

    A dense feed-forward makes the gradients of its product, gate and up. Experts do so for one expert's rows
    at a time, of which a router that is not yet balanced makes up to twice the mean, and collect the rows'
    results in low precision; the gradients of all their weights are made at once, and live beside those that
    they are added to. Attention makes those of queries, keys and values before and after rotation.
    """
    model, item = config.model, shape.product_bytes
    stream = 2 * shape.tokens * model.hidden_size * _FP32
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    needed = [2 * shape.tokens * heads * model.attention_head_dim * _FP32]
    if len(model.moe_layers) < model.num_hidden_layers:
        weight = model.hidden_size * model.intermediate_size * (_FP32 if accumulates else 0)
        needed.append(3 * shape.tokens * model.intermediate_size * item + weight)
    if model.moe_layers:
        wide, assigned = model.expert_intermediate_size, shape.tokens * model.num_experts_per_tok
        rows = assigned if shape.on_gpu else min(assigned, 2 * -(-assigned // model.num_experts))
        inside = rows * (5 * wide + model.hidden_size) * item
        inside += assigned * model.hidden_size * item if item < _FP32 else 0
        stacks = 3 * model.num_experts * model.hidden_size * wide * _FP32
        needed.append(inside + (stacks if accumulates else 0))
    return stream + max(needed)
