"""Contradictions: each is named by its field, all are found, and the advice is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, EvaluationConfig, PredictedLoss
from llm_pretrain.errors import ConfigError
from llm_pretrain.training.model_setup import build_model


def config(**settings: object) -> Config:
    """A sound configuration with `section__field=value` changed."""
    tree: dict[str, dict[str, object]] = {"data": {"sources": [{"store": "x"}]}}
    for name, value in settings.items():
        section, _, field = name.partition("__")
        tree.setdefault(section, {})[field] = value
    return from_dict(tree)


def sources(*entries: dict[str, Any]) -> dict[str, object]:
    return {"data__sources": [*entries]}


def mixed(weights: Sequence[float], *changes: tuple[int, list[float]]) -> dict[str, object]:
    """Two sources, and at which steps their weights become which."""
    entries = [{"store": name, "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    steps = [{"step": step, "weights": changed} for step, changed in changes]
    return {"data__sources": entries, "data__weight_changes": steps}


YARN, FOURFOLD = {"model__rope_type": "yarn"}, {"model__rope_factor": 4.0}


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("model.hidden_size", {"model__hidden_size": 0}),
        ("model.hidden_size", {"model__hidden_size": 100, "model__num_attention_heads": 8}),
        ("model.vocab_size", {"model__vocab_size": 0}),
        ("model.num_attention_heads", {"model__num_attention_heads": 8, "model__num_key_value_heads": 3}),
        ("model.num_attention_heads", {"model__num_attention_heads": 0}),
        ("model.num_key_value_heads", {"model__num_key_value_heads": 0}),
        ("model.head_dim", {"model__head_dim": 7}),
        ("model.head_dim", {"model__hidden_size": 72, "model__num_attention_heads": 8}),
        ("model.attention_dropout", {"model__attention_dropout": 1.0}),
        ("model.hidden_dropout", {"model__hidden_dropout": -0.1}),
        ("model.rms_norm_eps", {"model__rms_norm_eps": 0.0}),
        ("model.num_experts_per_tok", {"model__num_experts": 4, "model__num_experts_per_tok": 5}),
        ("model.num_experts_per_tok", {"model__num_experts_per_tok": 0}),
        ("model.first_k_dense_replace", {"model__num_experts": 4, "model__first_k_dense_replace": 9}),
        ("model.decoder_sparse_step", {"model__decoder_sparse_step": 0}),
        ("model.router_aux_loss_coef", {"model__router_aux_loss_coef": -1.0}),
        ("model.n_shared_experts", {"model__num_experts": 4, "model__n_shared_experts": -1}),
        ("model.n_shared_experts", {"model__n_shared_experts": 1}),
        ("model.scoring_func", {"model__scoring_func": "sigmoid"}),
        ("model.routed_scaling_factor", {"model__routed_scaling_factor": 2.5}),
        ("model.router_aux_loss_scope", {"model__router_aux_loss_scope": "global_batch"}),
        ("model.router_bias_update_rate", {"model__router_bias_update_rate": 0.001}),
        ("model.rope_factor", {"model__rope_type": "linear", "model__rope_factor": 0.5}),
        ("model.original_max_position_embeddings", {"model__original_max_position_embeddings": 64}),
        ("model.max_position_embeddings", {**YARN, "model__rope_factor": 3.0}),
        (
            "model.max_position_embeddings",
            {**YARN, **FOURFOLD, "model__original_max_position_embeddings": 4096},
        ),
        (
            "model.rope_theta",
            {**YARN, "model__rope_factor": 2.0, "model__rope_theta": 0.5},
        ),
        ("optimizer.adam_beta1", {"optimizer__adam_beta1": 1.0}),
        ("optimizer.learning_rate", {"optimizer__learning_rate": 0.0}),
        ("optimizer.learning_rate", {"optimizer__learning_rate": float("nan")}),
        ("optimizer.weight_decay", {"optimizer__weight_decay": float("inf")}),
        ("schedule.decay_steps", {"schedule__name": "wsd", "schedule__decay_steps": 1001}),
        ("training.max_grad_norm", {"training__max_grad_norm": -1.0}),
        (
            "training.sequence_length",
            {"training__sequence_length": 40000, "model__max_position_embeddings": 32768},
        ),
        ("training.micro_batch_size", {"training__micro_batch_size": 0}),
        ("checkpoint.resume", {"checkpoint__resume": "no/such/folder"}),
        ("checkpoint.start_from", {"checkpoint__start_from": "no/such/folder"}),
        ("checkpoint.start_from", {"checkpoint__start_from": "/", "checkpoint__resume": "/"}),
        ("checkpoint.start_from", {"checkpoint__start_from": "/", "model__init_from": "x"}),
        (
            "schedule.decay_steps",
            {"schedule__name": "wsd", "schedule__decay_steps": 1006, "schedule__offset_steps": 5},
        ),
        ("evaluation.max_batches", {"evaluation__max_batches": 0}),
        ("logging.logging_steps", {"logging__logging_steps": 0}),
        ("distributed.cpu_threads", {"distributed__cpu_threads": 0}),
        ("run.seed", {"run__seed": -1}),
        ("run.output_dir", {"run__output_dir": "~/runs/x"}),
        ("data.sources", {"data__sources": []}),
        ("data.sources[1].weight", sources({"store": "x"}, {"store": "y", "weight": -1})),
        ("data.sources[1].name", sources({"store": "x/b"}, {"store": "y/c", "name": "b"})),
        ("data.sources[0].name", sources({"store": "my store"}, {"store": "b"})),
        ("data.sources[0].name", sources({"store": "a", "name": ""})),
        ("data.sources[0].name", sources({"store": "a", "name": "x" * 65}, {"store": "b"})),
        ("data.sources", mixed([0, 0])),
        ("data.sources", mixed([0, 0], (3, [1, 1]))),
        ("data.sources[0].weight", mixed([1.5e308, 1])),
        ("data.weight_changes[0].step", mixed([1, 1], (-1, [1, 1]))),
        ("data.weight_changes[1].step", mixed([1, 1], (5, [1, 1]), (4, [1, 1]), (6, [1, 1]))),
        ("data.weight_changes[0].weights", mixed([1, 1], (5, [1]))),
        ("data.weight_changes[0].weights", mixed([1, 1], (5, [0, 0]))),
        ("data.weight_changes[0].weights[0]", mixed([1, 1], (5, [1.5e308, 1]))),
        ("data.weight_changes[0].weights[1]", mixed([1, 1], (5, [1, -0.5]))),
        ("data.weight_changes[0].weights[0]", mixed([1, 1], (5, [float("nan"), 1]))),
    ],
)
def test_one_wrong_value_is_one_line_that_names_it(field, settings):
    lines = validate(config(**settings))
    assert len(lines) == 1
    assert re.match(rf"{re.escape(field)}: expected .*, found ", lines[0])
    assert "\n" not in lines[0]


def test_a_run_name_is_a_plain_file_name():
    for name in ("", "..", "a/b", "a b", ".a", "-a", "a\n", "ä", "a" * 129):
        assert [line.partition(":")[0] for line in validate(config(run__name=name))] == ["run.name"]
    for name in ("A-1_b.c", "2024", "_x", "a" * 128):
        assert validate(config(run__name=name)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule__warmup_steps": 1000},
        {"schedule__min_learning_rate": 9e-4},
        {"schedule__min_learning_rate": 1e-3, "schedule__name": "constant"},
        {"model__head_dim": 64, "model__hidden_size": 100},
        {"model__num_experts": 4, "model__num_experts_per_tok": 4},
        {"checkpoint__resume": "/"},
        {"schedule__name": "wsd", "schedule__decay_steps": 1000},
        sources({"store": "x/same"}, {"store": "y/same", "name": "other"}),
        sources({"store": "my store"}),
        sources({"store": "my store", "name": "mine"}, {"store": "b.2-x_"}),
        mixed([1, 0], (5, [0, 1])),
        mixed([1, 1], (0, [1, 2]), (10**9, [0.0, 3])),
        sources({"store": "a"}) | {"data__weight_changes": [{"step": 5, "weights": [2]}]},
    ],
)
def test_values_on_the_edge_pass(settings):
    assert validate(config(**settings)) == []


FSDP = {"distributed__strategy": "fsdp"}
PP2, PP4 = (FSDP | {"pp_size": size} for size in (2, 4))
TP4 = FSDP | {"tp_size": 4, "model__num_attention_heads": 8, "model__num_key_value_heads": 4}
EP4 = {"dp_replicate_size": 2, "dp_shard_size": 4, "ep_size": 4, "model__num_experts": 8}
SHALLOW = {"model__num_hidden_layers": 3}
ONE_AT_A_TIME = {"training__micro_batch_size": 1, "training__global_batch_size": 64}


def in_full(settings: dict[str, object]) -> dict[str, object]:
    return {name if "__" in name else f"distributed__{name}": value for name, value in settings.items()}


@pytest.mark.parametrize(
    ("world_size", "problem", "settings"),
    [
        (4, "distributed.dp_replicate_size: expected 1 with strategy ddp", {"dp_replicate_size": 2}),
        (4, "distributed.ep_size: expected 1 with strategy ddp", {"ep_size": 2}),
        (4, "distributed.dp_replicate_size * dp_shard_size: expected the world size, 4, found 3 * 1",
         {**FSDP, "dp_replicate_size": 3}),
        (4, "distributed.dp_replicate_size * dp_shard_size: expected the world size, 4, found 2 * 4",
         {**FSDP, "dp_replicate_size": 2, "dp_shard_size": 4}),
        (4, "distributed.dp_replicate_size: expected at most half of the world size, 4, found 4",
         {**FSDP, "dp_replicate_size": 4}),
        (4, "distributed.dp_replicate_size: expected at most half of the ranks of a stage, 2, found 2",
         {**PP2, "dp_replicate_size": 2}),
        (4, "distributed.ep_size: expected a divisor of a replica's 2 ranks, found 4",
         {**FSDP, "dp_replicate_size": 2, "ep_size": 4, "model__num_experts": 8}),
        (4, "distributed.ep_size: expected a divisor of model.num_experts, 6, found 4",
         {**FSDP, "ep_size": 4, "model__num_experts": 6}),
        (2, "distributed.ep_size: expected a divisor of model.num_experts, 0, found 2",
         {**FSDP, "ep_size": 2}),
        (8, "optimizer.name: expected adamw where 4 ranks share the rows of 2 experts, found muon",
         {**FSDP, "ep_size": 2, "model__num_experts": 4, "optimizer__name": "muon"}),
        (2, "distributed.pp_size: expected 1 with strategy ddp", {"pp_size": 2}),
        (4, "distributed.pp_size: expected at most 3 with distributed.pp_schedule 1f1b and",
         {**PP4, **SHALLOW}),
        (2, "distributed.pp_size: expected at most 1 with distributed.pp_schedule interleaved_1f1b and",
         {**PP2, **SHALLOW, "pp_schedule": "interleaved_1f1b"}),
        (2, "optimizer.name: expected adamw with distributed.pp_size 2, found muon",
         {**PP2, "optimizer__name": "muon"}),
        (2, "training.precision: expected fp32 or bf16 with distributed.pp_size 2, found fp16",
         {**PP2, "training__precision": "fp16"}),
        (2, "model.hidden_dropout: expected 0 with distributed.pp_size",
         {**PP2, "model__hidden_dropout": 0.1}),
        (4, "distributed.pp_schedule: expected gpipe, 1f1b or interleaved_1f1b with stages of 2 ranks",
         {**PP2, "pp_schedule": "zbv_zero_bubble"}),
        (2, "training.compile: expected auto or off with distributed.pp_schedule zbv_zero_bubble",
         {**PP2, "pp_schedule": "zbv_zero_bubble", "training__compile": "on"}),
        (2, "training.activation_checkpointing: expected false with distributed.pp_schedule zbv_zero_bubble",
         {**PP2, "pp_schedule": "zbv_zero_bubble", "training__activation_checkpointing": True}),
        (4, "training.global_batch_size: expected at least 4 micro batches a step with distributed.pp_size 4",
         {**PP4, "training__global_batch_size": 3}),
        (2, "training.float8: expected tokens of a micro batch on each of 2 ranks in multiples of 16",
         {**FSDP, "cp_size": 2, "training__float8": True, "training__sequence_length": 48}),
        (2, "training.global_batch_size: expected micro batches a step in multiples of 2",
         {**PP2, "pp_schedule": "interleaved_1f1b", "training__global_batch_size": 7}),
        (8, "model.num_key_value_heads: expected a multiple of distributed.tp_size = 4, found 2",
         {**TP4, "model__num_attention_heads": 6, "model__num_key_value_heads": 2, "model__head_dim": 8}),
        (8, "model.intermediate_size: expected a multiple of distributed.tp_size = 4, found 66",
         {**TP4, "model__intermediate_size": 66}),
        (8, "model.n_shared_experts * expert width: expected a multiple of distributed.tp_size = 4, found 66",
         {**TP4, "model__num_experts": 4, "model__n_shared_experts": 2, "model__moe_intermediate_size": 33}),
        (8, "training.sequence_length: expected a multiple of tp_size = 4, found 30",
         {**TP4, "training__sequence_length": 30}),
        (2, "training.sequence_length: expected a multiple of 2 * cp_size * tp_size = 4, found 30",
         {**FSDP, "cp_size": 2, "training__sequence_length": 30}),
        (8, "model.vocab_size: expected a multiple of distributed.tp_size = 4, found 258",
         {**TP4, "model__vocab_size": 258}),
        (8, "optimizer.name: expected adamw with distributed.tp_size = 4, found muon",
         {**TP4, "optimizer__name": "muon"}),
        (8, "training.loss_implementation: expected auto or fused with distributed.tp_size = 4, found full",
         {**TP4, "training__loss_implementation": "full"}),
        (8, "training.float8: expected false with distributed.tp_size = 4, found true",
         {**TP4, "training__float8": True, "training__precision": "bf16"}),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_named(world_size: int, problem: str, settings: dict[str, object]):
    (found,) = validate(config(**ONE_AT_A_TIME | in_full(settings)), world_size)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {**FSDP, **EP4}),
        (8, {**FSDP, **EP4}),
        (8, TP4),
    ],
)
def test_a_mesh_that_fits_and_one_process_are_accepted(world_size: int, settings: dict[str, object]):
    assert not validate(config(**ONE_AT_A_TIME | in_full(settings)), world_size)


def test_a_vocabulary_that_is_not_known_yet_is_a_multiple_of_64():
    heads = {"model__num_attention_heads": 6, "model__num_key_value_heads": 6, "model__head_dim": 8}
    shape = heads | {"model__intermediate_size": 66}
    batch = {
        "training__micro_batch_size": 1,
        "training__global_batch_size": 6,
        "training__sequence_length": 48,
    }
    (found,) = validate(config(**FSDP, **shape, **batch, distributed__tp_size=3), 3)
    assert found.startswith("distributed.tp_size: expected a divisor of 64, of which the vocabulary")
    assert not validate(config(**FSDP, **shape, **batch, distributed__tp_size=3, model__vocab_size=258), 3)


def test_all_contradictions_are_found_at_once():
    lines = validate(
        config(
            model__num_experts=4,
            model__num_experts_per_tok=8,
            schedule__warmup_steps=2000,
            training__global_batch_size=7,
            run__name="../x",
        )
    )
    assert {line.partition(":")[0] for line in lines} == {
        *("model.num_experts_per_tok", "schedule.warmup_steps", "training.global_batch_size", "run.name")
    }
    lines = validate(config(checkpoint__keep_last=0, training__max_steps=0, run__name="../x"))
    assert {line.partition(":")[0] for line in lines} == {"checkpoint.keep_last", "training.max_steps"}


def test_no_layer_routes_agrees_with_the_tree():
    for layers in range(1, 7):
        for dense in range(layers + 1):
            for every in range(1, 8):
                model = ModelConfig(
                    num_experts=4,
                    num_hidden_layers=layers,
                    first_k_dense_replace=dense,
                    decoder_sparse_step=every,
                )
                lines = validate(Config(model=model), needs_data=False)
                assert bool(lines) == (not model.moe_layers)


@pytest.mark.parametrize("micro", [1, 6, 8])
@pytest.mark.parametrize("total", [7, 50, 96])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_sizes_that_would_work_do(total, micro, world_size):
    candidate = config(training__global_batch_size=total, training__micro_batch_size=micro)
    lines = validate(candidate, world_size)
    assert bool(lines) == (total % (micro * world_size) != 0)
    if not lines:
        return
    advice = re.findall(r"\d+", lines[0].partition("; ")[2])
    assert advice
    for size in map(int, advice):
        assert size % (micro * world_size) == 0
        assert abs(size - total) < micro * world_size


def test_a_name_that_stands_twice_is_reported_with_both_places():
    (line,) = validate(config(**sources(*({"store": name} for name in ("x/same", "b", "y/same")))))
    assert line.startswith("data.sources[2].name: ")
    assert "data.sources[0]" in line
    assert "'same'" in line


def test_samples_fit_into_the_model():
    sizes = {"model__max_position_embeddings": 64, "training__sequence_length": 32}
    sizes |= {"evaluation__sample_prompts": ["a"], "evaluation__sample_tokens": 64}
    (line,) = validate(config(**sizes))
    assert re.match(r"evaluation\.sample_tokens: expected less than .* = 64, found 64", line)
    assert validate(config(**sizes | {"evaluation__sample_tokens": 63})) == []
    assert validate(config(**sizes | {"evaluation__sample_prompts": []})) == []


@pytest.mark.parametrize(
    ("value", "settings", "words"),
    [
        ("varlen", {"training__precision": "fp32"}, "training.precision fp32"),
        ("varlen", {"model__attention_dropout": 0.1}, "model.attention_dropout 0.1"),
    ],
)
def test_a_kernel_that_other_fields_exclude_is_refused_by_name(value: str, settings: dict, words: str):
    kernel, bf16 = {"training__attention_implementation": value}, {"training__precision": "bf16"}
    (line,) = validate(config(**bf16 | kernel | settings))
    assert re.match(rf"training\.attention_implementation: .*{re.escape(words)}", line)
    assert f"found {value}" in line
    assert validate(config(**bf16 | settings)) == validate(config(**bf16 | kernel)) == []


def test_a_kernel_for_cuda_is_refused_on_a_cpu():
    asked = {"training__attention_implementation": "varlen", "training__precision": "bf16"}
    message = r"^training\.attention_implementation: .* found varlen, which needs CUDA$"
    with pytest.raises(ConfigError, match=message):
        build_model(config(**asked, model__vocab_size=64), torch.device("cpu"))


CURVE = [PredictedLoss(10, 4.0, 3.8, 4.2), PredictedLoss(20, 3.0, 2.9, 3.3)]


def test_a_prediction_is_interpolated_between_its_steps():
    config = EvaluationConfig(prediction=CURVE)
    assert [config.predicted(each.step) for each in CURVE] == CURVE, "to the last bit"
    assert config.predicted(15) == PredictedLoss(15, 3.5, pytest.approx(3.35), pytest.approx(3.75))
    assert config.predicted(9) is None
    assert config.predicted(21) is None
    assert EvaluationConfig(prediction=CURVE[:1]).predicted(11) is None
    assert EvaluationConfig().predicted(0) is None
