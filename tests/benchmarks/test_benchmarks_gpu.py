"""The rounds for a GPU machine: every part runs on a CPU, and one that fails stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import parts, rounds
from benchmarks.gpu.parts import CASES, Case, Context, case_options, dense_twin
from benchmarks.gpu.rounds import Part
from benchmarks.gpu.where import busy, read_kernels
from benchmarks.measuring import ROOT
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.model.sizes import flops_per_token

EXPECTED = {
    "1": {
        *("kernels", "tests", "tiny-moe, cold: seconds to the first step", "tiny-moe, the script: tokens/s"),
        *("tiny-moe fp32: torchrun / accelerate", "tiny-moe fp32: torchrun / resumed"),
        *("tiny-dense, compile off: waits of the host a step", "copy, host to device"),
    },
    "2": {
        *(f"{case}, {side}: tokens/s" for case in ("gpt2-124m", "qwen3-0.6b")
          for side in ("default", "joined", "loop", "trainer", "uncompiled", "peers_size")),
        *("gpt2-124m, nanogpt: tokens/s", "minimind3-64m, joined: tokens/s"),
    },
    "3": {
        *(f"{case}: profiled ms a step · with a kernel running · idle share"
          for case in ("gpt2-124m", "qwen3-0.6b", "finegrained-moe-136m", "mixture")),
        *("gpt2-124m, checkpointing: tokens/s", "gpt2-124m, float8: not here", "gpt2-124m, logits: tokens/s"),
    },
}  # fmt: skip


def results_of(output: Path) -> dict[str, Any]:
    lines = (output / "results.jsonl").read_text().splitlines()
    return {row["what"]: row["value"] for row in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("number", EXPECTED)
def test_every_part_of_a_dry_round_passes(number, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", number, "--dry", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "summary.txt").read_text()
    assert done.stdout.endswith(summary)
    assert len(summary) < 11_500
    names = [part.name for group in rounds.rounds()[number] for part in group]
    assert summary.splitlines()[-len(names) :] == [f"{name}: passed" for name in names]
    found = results_of(tmp_path)
    assert found.keys() >= EXPECTED[number]
    if number == "1":
        assert found["tiny-moe fp32: torchrun / accelerate"] == "identical"
        assert found["tiny-moe fp32: torchrun / resumed"] == "identical"
    if number == "2":
        assert any(" / its dense twin" in what for what in found)
        assert "tokens/s of ours (joined) / trainer" in summary


def run_parts(
    monkeypatch: pytest.MonkeyPatch, output: Path, *chosen: Part, seconds: float = 60
) -> dict[str, str]:
    """Run these parts in groups of one; the state of each."""
    monkeypatch.setattr(rounds, "rounds", lambda: {"1": [[part] for part in chosen]})
    main(["gpu", "1", "--dry", "--output", str(output), "--seconds", str(seconds)])
    return {part.name: part.state for part in chosen}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_stops_no_other(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rounds, "_DRY_PATIENCE", 1)
    states = run_parts(
        monkeypatch, tmp_path, Part("unknown", "contact.nothing", (), 60),
        Part("hangs", "contact.start", ("gpt2-124m", "30"), 0.5, 0),
        Part("late", "contact.facts", (), 60, 1e9),
    )  # fmt: skip
    assert states["unknown"] == "failed with exit code 1"
    assert states["hangs"].startswith("stopped at its limit of ")
    assert states["late"].startswith("not started, ")
    assert capsys.readouterr().out.endswith((tmp_path / "summary.txt").read_text())
    assert "has no attribute 'nothing'" in (tmp_path / "log.txt").read_text()


def test_ours_is_compared_with_peers_on_joined_documents(tmp_path):
    rows = [
        {"part": "a", "what": f"gpt2-124m, {side}: tokens/s", "value": value, "case": "gpt2-124m",
         "side": side, "show": True, "goal": goal, "peak_gib": memory, "micro_batch": size}
        for side, value, goal, memory, size in (
            ("default", 440e3, 430e3, 30.0, "64 x 1024"), ("joined", 420e3, 430e3, 30.0, "64 x 1024"),
            ("nanogpt", 400e3, None, 45.0, "64 x 1024, 1 times"),
            ("trainer", 200e3, None, 20.0, "32 x 1024, 2"),
        )
    ]  # fmt: skip
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = rounds.summary(file, [Part("a", "", (), 1)])
    assert "| gpt2-124m: tokens/s of ours (joined) / nanogpt | 1.05 | ≥ 1.1: **missed** |" in text
    assert "| gpt2-124m: tokens/s of ours (joined) / trainer | 2.1 | ≥ 1.5: met |" in text
    assert "| gpt2-124m: tokens/s of ours (default) / trainer | 2.2 |  |" in text
    assert "| gpt2-124m, joined: tokens/s | 420,000 | ≥ 430,000: **missed** |" in text
    assert "| gpt2-124m: peak memory of nanogpt / ours | 1.5 | ≥ 1: met |" in text
    assert "peak memory of trainer" not in text, "of another micro batch"


@pytest.mark.parametrize("name", ["finegrained-moe-136m", "mixture"])
def test_a_dense_twin_has_the_mixtures_flops(name):
    def flops(case: Case) -> float:
        options = case_options(case, Path("unused"), Path("unused"))
        config = load_config(options, needs_data=False, has_bf16=True)
        return flops_per_token(resolve_model(config, 4096).model, case.length)

    twin = dense_twin(CASES[name])
    assert flops(twin) == pytest.approx(flops(CASES[name]), rel=0.02)
    if name == "mixture":  # the pair of which lower bounds are counted
        assert flops(twin) == flops(CASES["dense of equal FLOPs"])


def test_carried_wheels_reach_what_a_part_launches(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "FOUND = 7\n")
    monkeypatch.setattr(rounds, "WHEELS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    environment = rounds._Round(tmp_path, tmp_path, True).environment
    found = environment["PYTHONPATH"].split(os.pathsep)
    assert found[:2] == [str(ROOT), str(tmp_path / "given")]
    launched = "import subprocess, sys; from benchmarks.launching import environment as e; "
    launched += (
        "sys.exit(subprocess.call([sys.executable, '-c', 'import carried; exit(carried.FOUND)'], env=e()))"
    )
    assert subprocess.call([sys.executable, "-c", launched], env=environment) == 7


def event(category: str, name: str, start: float, duration: float, thread: int = 1, **arguments: int) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "pid": 1,
            "args": arguments}  # fmt: skip


def test_kernels_belong_to_parts_by_name_and_by_launch():
    names = [
        ("nvjet_tst_128x256", 110, "loss head: products"), ("_gradient_kernel", 120, "loss head: memory"),
        ("multi_tensor_apply_kernel", 310, "optimizer"), ("flash_bwd_dq_dk_dv_loop", 500, "attention"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_3", 520, "norms, and what is fused with them"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32", 560, "products of layers"), ("vectorized_add", 570, "other"),
    ]  # fmt: skip
    events = [
        event("user_annotation", "loss head", 100, 50),
        event("user_annotation", "Optimizer.step#AdamW.step", 300, 30),
        event("kernel", "unlaunched", 2000, 1, 7),
    ]
    for number, (name, launched, _) in enumerate(names, 1):
        events += [event("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=number),
                   event("kernel", name, 1000 + 10 * number, 20, 7, correlation=number)]  # fmt: skip
    found = read_kernels(events)
    assert [each.part for each in found] == ["other", *(part for _, _, part in names)]
    assert busy(found) == 1 + 10 * len(names) + 10, "kernels that overlap count once"


def test_memory_that_runs_out_halves_the_micro_batch(monkeypatch, tmp_path):
    started: list[str] = []
    monkeypatch.setattr(parts.os, "execv", lambda _, command: started.append(command[-1]))

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("benchmarks.gpu.contact.facts", fails)
    context = Context("x", "contact.facts", [], str(tmp_path), str(tmp_path), False)
    with pytest.raises(SystemExit):
        context.run()
    again = Context(**json.loads(started[0]))
    assert context.case("gpt2-124m").micro_batch_size == 2 * again.case("gpt2-124m").micro_batch_size
