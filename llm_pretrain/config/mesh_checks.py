"""Checks of the mesh against the model, the data and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from llm_pretrain.config.distributed_config import MeshSizes
from llm_pretrain.config.model_config import VOCAB_MULTIPLE
from llm_pretrain.config.optimizers import refusal
from llm_pretrain.config.tree import Config


def check_mesh(config: Config, world_size: int) -> Iterator[str]:
    """Yields one line for each reason why the mesh does not fit `world_size` processes or the settings."""
    yield from config.distributed.check(world_size)
    sizes = config.distributed.mesh(world_size)
    if config.distributed.ep_size > 1 and config.distributed.strategy == "fsdp":
        yield from _check_experts(config, sizes)
    if not sizes.is_data_parallel:
        yield from _check_divided(config, sizes)
    if sizes.tp > 1:
        yield from _check_matrices(config, sizes.tp)


def _check_experts(config: Config, sizes: MeshSizes) -> Iterator[str]:
    model, ranks = config.model, config.distributed.ep_size
    shards = max(1, sizes.dp_shard * sizes.sequence // ranks)
    own = (total := model.num_experts) // ranks
    where = f"where {shards} ranks share the rows of {own} experts"
    advice = "; use another distributed.ep_size"
    if not total or total % ranks:
        yield f"distributed.ep_size: expected a divisor of model.num_experts, {total}, found {ranks}"
    elif not own % shards:
        return
    elif refused := refusal(config.optimizer.name, "rows of experts", where, advice):
        yield from refused
    elif model.hidden_size % shards or 2 * model.expert_intermediate_size % shards:
        yield (
            f"distributed.ep_size: expected {shards} ranks, which share the rows of {own} "
            "experts, to divide model.hidden_size and twice the experts' width, found "
            f"{model.hidden_size} and {2 * model.expert_intermediate_size}"
        )


def _check_divided(config: Config, sizes: MeshSizes) -> Iterator[str]:
    """Yields problems of settings that cannot be combined with sequences or layers divided over ranks."""
    axes = " and ".join(f"distributed.{axis}_size" for axis in ("cp", "tp", "pp") if getattr(sizes, axis) > 1)
    for name in ("hidden_dropout", "attention_dropout"):
        if value := getattr(config.model, name):
            yield f"model.{name}: expected 0 with {axes}, found {value}"
    if sizes.tp * sizes.pp > 1 and (found := len(config.evaluation.sample_prompts)):
        yield (
            f"evaluation.sample_prompts: expected none with {axes}, found {found}: no rank has all logits; "
            "`llm-pretrain generate` reads the saved weights"
        )
    if sizes.pp > 1:
        yield from _check_pipeline(config, sizes)
    if sizes.sequence > 1:
        parts = sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1)
        if (length := config.training.sequence_length) % parts:
            cut = "2 * cp_size * tp_size" if sizes.cp > 1 else "tp_size"
            yield f"training.sequence_length: expected a multiple of {cut} = {parts}, found {length}"
        tokens = config.training.micro_batch_size * length // sizes.sequence
        if config.training.float8 and tokens % 16:
            yield (
                f"training.float8: expected tokens of a micro batch on each of {sizes.sequence} ranks in "
                f"multiples of 16, which FP8 products need, found {tokens}"
            )


def _check_matrices(config: Config, ranks: int) -> Iterator[str]:
    """Yields sizes that `tp_size` must divide but does not, and settings that do not support it."""
    model = config.model
    moe_layers = len(model.moe_layers)
    divided = {
        "num_key_value_heads": model.num_key_value_heads,  # the query heads are a multiple of this
        "intermediate_size": model.intermediate_size if moe_layers < model.num_hidden_layers else 0,
        "n_shared_experts * expert width": model.n_shared_experts * model.expert_intermediate_size,
        "vocab_size": model.vocab_size or 0,
    }
    for name, found in divided.items():
        if found % ranks:
            yield f"model.{name}: expected a multiple of distributed.tp_size = {ranks}, found {found}"
    if model.vocab_size is None and VOCAB_MULTIPLE % ranks:
        yield (
            f"distributed.tp_size: expected a divisor of {VOCAB_MULTIPLE}, of which the vocabulary is a "
            f"multiple, found {ranks}; set model.vocab_size to a multiple of it"
        )
    yield from refusal(config.optimizer.name, "tp", f"with distributed.tp_size = {ranks}")
    for name, found, expected in (
        ("training.float8", config.training.float8, (False,)),
        ("training.loss_implementation", config.training.loss_implementation, ("auto", "fused")),
    ):
        if found not in expected:
            allowed = " or ".join(str(each).lower() for each in expected)
            yield f"{name}: expected {allowed} with distributed.tp_size = {ranks}, found {str(found).lower()}"


def _check_pipeline(config: Config, sizes: MeshSizes) -> Iterator[str]:
    """Yields problems of settings that cannot be combined with the stages of a pipeline."""
    distributed, training = config.distributed, config.training
    schedule, stages = distributed.pp_schedule, distributed.num_stages
    with_pp = f"with distributed.pp_size {sizes.pp}"
    with_schedule = f"with distributed.pp_schedule {schedule}"
    if (layers := config.model.num_hidden_layers) < stages:
        yield (
            f"distributed.pp_size: expected at most {layers // (stages // sizes.pp)} {with_schedule} and "
            f"model.num_hidden_layers {layers}, found {sizes.pp}"
        )
    yield from refusal(config.optimizer.name, "pp", with_pp)
    if training.precision == "fp16":
        yield f"training.precision: expected fp32 or bf16 {with_pp}, found fp16"
    if distributed.splits_backward:
        reason = f"{with_schedule}, which computes the two parts of a backward pass apart"
        if training.compile == "on":
            yield f"training.compile: expected auto or off {reason}, found on"
        if training.activation_checkpointing:
            yield f"training.activation_checkpointing: expected false {reason}, found true"
        if (shards := sizes.dp_replicate * sizes.dp_shard * sizes.sequence) > 1:
            yield (
                "distributed.pp_schedule: expected gpipe, 1f1b or interleaved_1f1b with stages of "
                f"{shards} ranks, found {schedule}"
            )
    steps = training.global_batch_size // max(1, training.micro_batch_size * sizes.data)
    rounds = max(1, steps // sizes.pp)
    if schedule == "1f1b" and steps < stages:
        expected, found = f"at least {stages} micro batches a step", steps
    elif schedule.startswith("interleaved") and steps % rounds:
        expected, found = f"micro batches a step in multiples of {sizes.pp}", steps
    else:
        return
    yield f"training.global_batch_size: expected {expected} {with_pp} and {schedule}, found {found}"
