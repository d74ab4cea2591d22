"""`llm-pretrain estimate`: known sizes, memory by part, time and cost."""

from __future__ import annotations

import re

import pytest
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.memory import estimate_memory, estimate_time

CONFIGS = ROOT / "configs"


def preset(name: str, *options: str) -> Config:
    return load_config(["--config", str(CONFIGS / f"{name}.yaml"), *options], needs_data=False)


def estimate(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> str:
    assert main(["estimate", "--config", str(CONFIGS / f"{name}.yaml"), *options]) == 0
    return capsys.readouterr().out


def test_published_sizes(capsys):
    # arXiv:2505.09388, tables 1 and 2: 0.6B, of which 0.44B are no embedding; 30.5B, 3.3B active
    text = estimate(capsys, "qwen3-0.6b", "--gpu", "h200", "--price", "3.5", "--tokens", "1e9")
    assert "596,049,920 total" in text
    assert "11.9B tokens (20 per active parameter)" in text
    assert "cost" in text
    text = estimate(capsys, "qwen3-30b-a3b", "--world-size", "64", "--distributed.strategy", "fsdp")
    assert "30,532,122,624 total, 3,353,032,704 active" in text


def test_time_is_tokens_times_flops_over_what_the_devices_reach():
    config = preset("gpt2-124m")
    time = estimate_time(config, 8, tokens=10**10, flops=1e15, mfu=0.5)
    assert time.tokens_per_second == pytest.approx(8 * 0.5e15 / time.flops_per_token)
    assert time.hours * 3600 * time.tokens_per_second == pytest.approx(1e10)
    assert time.device_hours == pytest.approx(8 * time.hours)
    # 6 x 123.6M and 12 x 12 layers x 768 x 1024 positions, less the norms' few
    assert time.flops_per_token == pytest.approx(6 * 123.587e6 + 12 * 12 * 768 * 1024, rel=1e-3)


def test_parts_follow_the_optimizer_and_the_shards():
    base, count = preset("minimind3-64m", "--training.precision", "bf16"), 63_912_192
    memory = estimate_memory(base)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * count, 4 * count, 8 * count)
    averaged = preset("minimind3-64m", "--optimizer.ema_decay", "0.99")
    assert estimate_memory(averaged).optimizer == 12 * count
    muon = estimate_memory(preset("minimind3-64m", "--optimizer.name", "muon")).optimizer
    assert 4 * count < muon < 5 * count
    sharded = estimate_memory(preset("minimind3-64m", "--distributed.strategy", "fsdp"), 4)
    assert sharded.weights == -(-4 * count // 4)
    assert sharded.optimizer == 2 * count
    assert estimate_memory(preset("minimind3-64m", "--checkpoint.async_save", "true")).staging == 12 * count


@pytest.mark.parametrize(("here", "gpu", "found"), [(False, "h100", "bf16"), (True, "t4", "fp32")])
def test_auto_is_what_it_would_be_on_the_gpu_that_is_named(here, gpu, found, capsys, monkeypatch):
    monkeypatch.setattr("llm_pretrain.config.loading.multiplies_in_bf16", lambda: here)
    options = ["--training.precision", "auto"]
    assert f"(ddp, {found}, " in estimate(capsys, "minimind3-64m", "--gpu", gpu, *options)
    assert f"(ddp, {'bf16' if here else 'fp32'}, " in estimate(capsys, "minimind3-64m", *options)


def test_no_time_is_told_by_peaks_of_another_precision(capsys):
    text = estimate(capsys, "minimind3-64m", "--gpu", "h100", "--training.precision", "fp32")
    assert "time: not estimated in fp32" in text
    assert "tokens per second" not in text


def test_short_runs_are_told_in_minutes_or_seconds(capsys):
    for tokens, form in (("1e6", r"\d+s"), ("1e8", r"\d+m\d\ds"), ("1e12", r"\d+h\d\dm")):
        text = estimate(capsys, "minimind3-64m", "--gpu", "h100", "--tokens", tokens)
        line = next(line for line in text.splitlines() if "tokens in" in line)
        assert re.search(f" in  {form}$", line.split(",")[0]), line


def test_all_wrong_options_are_named_at_once(capsys):
    options = ["--mfu", "2", "--tokens", "-1", "--price", "-1"]
    assert main(["estimate", "--config", str(CONFIGS / "minimind3-64m.yaml"), *options]) == 2
    text = capsys.readouterr().err
    places = [text.index(f"{name}: expected") for name in ("--mfu", "--price", "--tokens")]
    assert places == sorted(places)


def test_the_heaps_holes_are_a_cpus_alone():
    config = preset("minimind3-64m")
    assert estimate_memory(config, on_gpu=True).heap_holes == 0
    found = estimate_memory(config)
    assert 0 < found.heap_holes < found.peak / 4


def test_the_peak_is_printed_as_coarse_and_a_mesh_is_estimated(capsys):
    text = estimate(capsys, "minimind3-64m")
    assert "coarse: within 25%" in text
    assert "peak, about" in text
    mesh = ["--distributed.dp_replicate_size", "4", "--distributed.ep_size", "8"]
    whole = estimate(capsys, "qwen3-30b-a3b", "--gpu", "h100", "--world-size", "64", *mesh)
    divided = estimate(
        *(capsys, "qwen3-30b-a3b", "--gpu", "h100", "--world-size", "64", *mesh),
        *("--distributed.tp_size", "2"),
    )
    assert whole != divided
    assert "llm-pretrain simulate" in divided


@pytest.mark.parametrize(("rows", "told"), [("8", "  fits into"), ("96", "may NOT fit"), ("400", "does NOT")])
def test_it_is_said_whether_it_fits(rows, told, capsys):
    options = ["--training.micro_batch_size", rows, "--training.global_batch_size", rows]
    assert told in estimate(capsys, "qwen3-0.6b", "--gpu", "h100", *options)
