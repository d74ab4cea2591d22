"""The estimated peak of a rank against the simulated one, for shapes that no term was derived from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_pretrain.commands._simulated_steps import Simulator, simulator
from llm_pretrain.config import load_config
from llm_pretrain.memory import estimate_memory
from llm_pretrain.tracking import MACHINES

BOUND = 0.05

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "qk_norm": False,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA_8B | {
    "vocab_size": 32_000,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14_336,
}
DEEPSEEK_16B: dict[str, Any] = {
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
GEMMA_2B: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GPT2_MEDIUM: dict[str, Any] = {
    "vocab_size": 50_304,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_norm": False,
}
CHECKPOINTED = {"training.activation_checkpointing": True}
ONCE = {"distributed.sync_each_batch": False}

# name: model, layers, GPUs, sequences, tokens of each, micro batches, further settings
CASES: dict[str, tuple[dict[str, Any], int, int, int, int, int, dict[str, Any]]] = {
    "dense, one GPU": (GPT2_MEDIUM, 3, 1, 16, 1024, 1, {}),
    "dense in fp32": (GPT2_MEDIUM, 3, 1, 16, 256, 4, {"training.precision": "fp32"}),
    "wide tied embedding": (GEMMA_2B, 2, 1, 2, 2048, 4, CHECKPOINTED),
    "dense, FSDP": (LLAMA_8B, 3, 16, 1, 8192, 2, CHECKPOINTED),
    "dense, reduced once": (LLAMA_8B, 2, 8, 2, 2048, 2, ONCE),
    "mixture, replicas": (MIXTRAL, 3, 16, 1, 4096, 2, {"distributed.dp_replicate_size": 2} | CHECKPOINTED),
    "mixture, experts divided": (MIXTRAL, 2, 8, 1, 4096, 2, {"distributed.ep_size": 8} | CHECKPOINTED),
    "shared experts": (DEEPSEEK_16B, 2, 8, 2, 2048, 1, {}),
}
SLOW_CASES: dict[str, tuple[dict[str, Any], int, int, int, int, int, dict[str, Any]]] = {
    "short sequences": (GEMMA_2B, 4, 4, 8, 64, 1, {}),
    "long sequences": (DEEPSEEK_16B, 3, 1, 1, 16_384, 2, CHECKPOINTED),
    "mixture in fp32": (DEEPSEEK_16B, 3, 8, 1, 2048, 2, {"training.precision": "fp32"}),
    "dense in fp16": (LLAMA_8B, 3, 1, 2, 2048, 2, {"training.precision": "fp16"}),
    "whole logits": (GPT2_MEDIUM, 4, 2, 8, 1024, 2, {"training.loss_implementation": "full"}),
    "muon and an average": (
        *(GPT2_MEDIUM, 6, 1, 8, 1024, 2),
        {"optimizer.name": "muon", "optimizer.ema_decay": 0.999},
    ),
    "replicas, experts divided": (
        *(DEEPSEEK_16B, 4, 32, 2, 4096, 2),
        {"distributed.dp_replicate_size": 2, "distributed.ep_size": 4} | CHECKPOINTED,
    ),
    "more ranks than experts": (MIXTRAL, 3, 32, 1, 2048, 2, CHECKPOINTED),
}
PRESETS = {
    "minimind-104m": (1, {}),
    "quickstart-chat": (2, {"distributed.strategy": "fsdp", "model.vocab_size": 4096}),
    "qwen3-30b-a3b": (64, {}),
}


def options(case: tuple[dict[str, Any], int, int, int, int, int, dict[str, Any]]) -> list[str]:
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


def check(worker: Simulator, options: list[str], ranks: int) -> None:
    config = load_config(options, needs_data=False, has_bf16=True, world_size=ranks)
    simulated = worker.raw(options, ranks)["peak"]
    assert estimate_memory(config, ranks, on_gpu=True).peak == pytest.approx(simulated, rel=BOUND)


@pytest.fixture(scope="module")
def h100() -> Iterator[Simulator]:
    with simulator(MACHINES["h100"]) as worker:
        yield worker


@pytest.mark.parametrize("name", CASES)
def test_estimate_and_simulation_agree(name: str, h100: Simulator):
    check(h100, options(CASES[name]), CASES[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_further_estimates_and_simulations_agree(name: str, h100: Simulator):
    check(h100, options(SLOW_CASES[name]), SLOW_CASES[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_estimates_and_simulations_of_whole_presets_agree(name: str, h100: Simulator):
    ranks, more = PRESETS[name]
    check(h100, ["--config", name, *words(more)], ranks)


@pytest.mark.slow
def test_an_older_gpus_experts_agree():
    """Without torch's grouped products."""
    case = CASES["shared experts"]
    with simulator(MACHINES["a100"]) as worker:
        check(worker, options(case), case[2])
