"""The memory of a training step on a GPU, counted storage by storage, against the estimate."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from fake_memory import eight_ranks, saved_bytes, start_up_peak, tracked_peak
from fake_steps import DENSE, MOE, fake_config
from support.launching import ROOT

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.memory import TOLERANCE, estimate_memory

PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def preset(name: str, world_size: int, accumulation: int, *options: str) -> Config:
    """Four layers of a preset, uncompiled and with whole experts, and two sequences in a micro batch."""
    return load_config(
        [
            *("--config", name, "--model.num_hidden_layers", "4"),
            *("--model.vocab_size", "256" if name.startswith("char-") else "50304"),
            *("--training.compile", "off", "--training.precision", "bf16"),
            *("--training.micro_batch_size", "2", "--distributed.cpu_threads", "1"),
            *("--distributed.ep_size", "1"),
            *("--training.global_batch_size", str(2 * world_size * accumulation)),
            *("--distributed.strategy", "fsdp" if world_size > 1 else "ddp", *options),
        ],
        needs_data=False,
        has_bf16=True,
        world_size=world_size,
    )


def agrees(estimated: int, tracked: int) -> None:
    """A run that is said to fit must fit: less may be missing than may be too much."""
    assert 0.9 <= estimated / tracked <= 1 + TOLERANCE


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world_size", [1, 8])
def test_the_estimate_of_every_preset(name: str, accumulation: int, world_size: int):
    config = preset(name, world_size, accumulation)
    with eight_ranks() if world_size > 1 else nullcontext():
        tracked = tracked_peak(config, world_size)
        agrees(estimate_memory(config, world_size, on_gpu=True).peak, tracked)


def test_gradients_that_wait_for_the_last_micro_batch_are_counted():
    waiting = preset("olmoe-1b-7b", 8, 3, "--distributed.sync_each_batch", "false")
    with eight_ranks():
        tracked = tracked_peak(waiting, 8)
        assert tracked > tracked_peak(preset("olmoe-1b-7b", 8, 3), 8) * 1.3
    agrees(estimate_memory(waiting, 8, on_gpu=True).peak, tracked)


def test_a_sharded_start_holds_no_more_than_this_ranks_parts():
    with eight_ranks():
        peak, remaining = start_up_peak(preset("olmoe-1b-7b", 8, 1))
    assert peak <= 1.02 * remaining


@pytest.mark.filterwarnings("ignore")  # torch's tracing does what its warnings advise against
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_a_compiled_layer_keeps_what_is_estimated(model: dict[str, Any]):
    """Three layers less two."""

    def config(layers: int, compiles: str) -> Config:
        # so many tokens that the weights' copies in low precision do not count
        training = {"compile": compiles, "micro_batch_size": 16, "global_batch_size": 16}
        return fake_config(model | {"num_hidden_layers": layers}, training=training)

    def estimated() -> int:
        two, three = (estimate_memory(config(layers, "on"), on_gpu=True).activations for layers in (2, 3))
        return three - two

    # Inductor's partition of the graph, without its kernels
    two, three = (saved_bytes(config(layers, "off"), "aot_eager_decomp_partition") for layers in (2, 3))
    assert estimated() == pytest.approx(three - two, rel=0.1)
