"""The estimated peak of a rank against simulated ones: at most a tenth below, at most `TOLERANCE` above.

A run that is said to fit must fit, so the bound below is the tighter one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.simulated_meshes import OnCopies

from llm_pretrain.config.loading import from_dict, load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.forecast.simulated_steps import Simulator, different_ranks, simulator
from llm_pretrain.forecast.simulation.trace import traced_step
from llm_pretrain.forecast.simulation.worker import fake_ranks
from llm_pretrain.hardware import CLUSTERS
from llm_pretrain.memory import TOLERANCE, estimate_memory

SHORT = 0.1
"""Most that an estimate may be below."""


def model(
    vocab_size: int, hidden_size: int, intermediate_size: int, *heads: int, **more: Any
) -> dict[str, Any]:
    """`heads` are those of queries and of keys."""
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return sizes | dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)) | more


def experts(number: int, chosen: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": number, "num_experts_per_tok": chosen, "tie_word_embeddings": False} | more


LLAMA_8B = model(128_256, 4096, 14_336, 32, 8, qk_norm=False, tie_word_embeddings=False)
MIXTRAL = LLAMA_8B | {"vocab_size": 32_000} | experts(8, 2, moe_intermediate_size=14_336)
OLMOE = model(50_304, 2048, 1024, 16, 16) | experts(64, 8)
DEEPSEEK_16B = model(102_400, 2048, 10_944, 16, 16)
DEEPSEEK_16B |= experts(64, 6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1)
QWEN3_600M = model(151_936, 1024, 3072, 16, 8, head_dim=128)
GEMMA_2B = model(256_000, 2048, 16_384, 8, 1, head_dim=256)
GPT2_MEDIUM = model(50_304, 1024, 2816, 16, 16, qk_norm=False)
RECOMPUTED = {"training.activation_checkpointing": True}
FP32 = {"training.precision": "fp32"}


def mesh(schedule: str = "", **sizes: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"distributed.{name}_size": size for name, size in sizes.items()}
    return found | ({"distributed.pp_schedule": schedule} if schedule else {})


Case = tuple[dict[str, Any], int, int, int, int, int, dict[str, Any]]
# name: model, layers, GPUs, sequences, tokens of each, micro batches, further settings
CASES: dict[str, Case] = {
    "dense, one GPU": (GPT2_MEDIUM, 3, 1, 16, 1024, 1, {}),
    "dense in fp32": (GPT2_MEDIUM, 3, 1, 16, 256, 4, FP32),
    "wide tied embedding": (GEMMA_2B, 2, 1, 2, 2048, 4, RECOMPUTED),
    "dense, FSDP": (LLAMA_8B, 3, 16, 1, 8192, 2, RECOMPUTED),
    "dense, matrices divided": (QWEN3_600M, 3, 8, 2, 2048, 4, mesh(tp=4)),
    "dense, stages": (QWEN3_600M, 4, 8, 1, 2048, 8, mesh("1f1b", pp=2) | RECOMPUTED),
    "mixture, replicas": (MIXTRAL, 3, 16, 1, 4096, 2, mesh(dp_replicate=2) | RECOMPUTED),
    "mixture, experts divided": (MIXTRAL, 2, 8, 1, 4096, 2, mesh(ep=8) | RECOMPUTED),
    "mixture, stages": (OLMOE, 2, 8, 1, 2048, 4, mesh("gpipe", pp=2)),
    "shared experts": (DEEPSEEK_16B, 2, 8, 2, 2048, 1, {}),
    "long sequences": (DEEPSEEK_16B, 3, 1, 1, 16_384, 2, RECOMPUTED),
    "dense, mask of pairs": (QWEN3_600M, 4, 1, 2, 2048, 2, {"training.attention_implementation": "sdpa"}),
    "dense, positions divided": (LLAMA_8B, 4, 8, 1, 8192, 4, mesh(cp=4) | RECOMPUTED),
    "dense, two stages on a rank": (LLAMA_8B, 4, 8, 1, 2048, 4, mesh("interleaved_1f1b", pp=2)),
    "whole logits": (GPT2_MEDIUM, 4, 2, 8, 1024, 2, {"training.loss_implementation": "full"}),
    "muon and an average": (
        *(GPT2_MEDIUM, 6, 1, 8, 1024, 2),
        {"optimizer.name": "muon", "optimizer.ema_decay": 0.999},
    ),
    "muon, sharded": (GPT2_MEDIUM, 6, 8, 4, 1024, 2, {"optimizer.name": "muon"}),
    "mixture, experts and matrices divided": (OLMOE, 4, 8, 2, 2048, 2, mesh(ep=4, tp=2) | RECOMPUTED),
    "replicas, experts divided": (
        *(DEEPSEEK_16B, 4, 32, 2, 4096, 2),
        mesh(dp_replicate=2, ep=4) | RECOMPUTED,
    ),
    "more ranks than experts": (MIXTRAL, 3, 32, 1, 2048, 2, RECOMPUTED),
}
QUICK = "dense in fp32"
"""The others take two CPU seconds each."""

# preset, GPUs, further settings: GiB; the peaks of `simulate` in the presets and docs/beyond_one_machine.md
LONG = {"distributed.strategy": "fsdp", "training.sequence_length": 32_768, "training.micro_batch_size": 1}
LONG |= {"training.global_batch_size": 64}
REPLICAS = LONG | mesh(dp_replicate=8)
EXPERTS = mesh(dp_replicate=4, ep=8)
DOCUMENTED: list[tuple[str, int, dict[str, Any], float]] = [
    ("olmoe-1b-7b", 8, {}, 23.3),
    ("qwen3-30b-a3b", 8, {}, 63.6),
    ("qwen3-30b-a3b", 8, mesh(ep=1), 68.2),
    ("qwen3-30b-a3b", 64, mesh(ep=1), 18.5),
    ("qwen3-30b-a3b", 64, mesh(ep=1, dp_replicate=4), 39.8),
    ("qwen3-30b-a3b", 64, EXPERTS, 35.0),
    ("qwen3-30b-a3b", 64, EXPERTS | mesh(tp=2), 31.8),
    ("qwen3-30b-a3b", 64, EXPERTS | mesh("1f1b", pp=2), 39.5),
    ("qwen3-0.6b", 64, LONG, 7.1),
    ("qwen3-0.6b", 64, REPLICAS, 7.8),
    ("qwen3-0.6b", 64, REPLICAS | mesh(cp=2), 5.3),
    ("qwen3-0.6b", 64, REPLICAS | mesh(cp=8), 3.4),
    ("qwen3-0.6b", 64, REPLICAS | mesh(tp=2), 4.7),
    ("qwen3-0.6b", 64, REPLICAS | mesh(tp=8), 2.1),
]


def options(case: Case) -> list[str]:
    model, layers, ranks, rows, length, micro_batches, more = case
    settings = {f"model.{name}": value for name, value in model.items()}
    settings |= {"model.num_hidden_layers": layers, "model.max_position_embeddings": length}
    settings |= {"training.micro_batch_size": rows, "training.sequence_length": length}
    settings |= {"training.global_batch_size": rows * ranks * micro_batches, "training.precision": "bf16"}
    settings["distributed.strategy"] = "fsdp" if ranks > 1 else "ddp"
    return words(settings | more)


def words(settings: dict[str, Any]) -> list[str]:
    values = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()
    }
    uncompiled = {"training.compile": "off"}  # as simulated
    return [word for name, value in (values | uncompiled).items() for word in (f"--{name}", str(value))]


def loaded(options: list[str], ranks: int) -> Config:
    return load_config(options, needs_data=False, has_bf16=True, world_size=ranks)


def check(worker: Simulator, options: list[str], ranks: int) -> None:
    config = loaded(options, ranks)
    simulated = [worker.raw(options, ranks, rank=rank) for rank in different_ranks(config, ranks)]
    agrees(estimate_memory(config, ranks, on_gpu=True).peak, max(each["peak"] for each in simulated))


def agrees(estimated: int, peak: float) -> None:
    assert 1 - SHORT <= estimated / peak <= 1 + TOLERANCE


@pytest.fixture(scope="module")
def h100() -> Iterator[Simulator]:
    with simulator(CLUSTERS["h100"]) as worker:
        yield worker


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_estimate_and_simulation_agree(name, h100):
    check(h100, options(CASES[name]), CASES[name][2])


@pytest.mark.slow
def test_an_older_gpus_experts_agree():
    """Without torch's grouped products."""
    case = CASES["shared experts"]
    with simulator(CLUSTERS["a100"]) as worker:
        check(worker, options(case), case[2])


@pytest.mark.parametrize(("preset", "ranks", "settings", "gibibytes"), DOCUMENTED)
def test_estimates_and_documented_peaks_agree(preset, ranks, settings, gibibytes):
    config = loaded(["--config", preset, *words(settings)], ranks)
    agrees(estimate_memory(config, ranks, on_gpu=True).peak, gibibytes * 2**30)


@pytest.mark.parametrize(("experts", "precision", "recomputed"), [(0, "bf16", True), (8, "fp32", False)])
def test_estimate_and_a_cpus_step_agree(experts, precision, recomputed):
    """A step with values, by a CPU's kernels; the heap's holes are beside the storages that are counted."""
    model = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": experts}
    training = {"precision": precision, "micro_batch_size": 4, "sequence_length": 256, "compile": "off"}
    training |= {"global_batch_size": 8, "activation_checkpointing": recomputed}
    config = from_dict({"model": model, "training": training})
    with fake_ranks(1, "fake"):
        peak = traced_step(config, torch.device("cpu"), real=OnCopies()).peak
    memory = estimate_memory(config)
    agrees(memory.peak - memory.heap_holes, peak)
