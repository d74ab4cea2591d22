"""Both launchers on one GPU, deterministic: the same bits, also after a kill, in bf16 and in fp16."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from support.interrupting import wait_for_step
from support.launching import (
    ROOT,
    Finished,
    assert_same_tensors,
    checkpoint_tensors,
    finish,
    kill_outright,
    launch,
    start,
)

pytestmark = pytest.mark.gpu

STEPS, KILL_STEP = 40, 17


def options(preset: str, store: Path, precision: str) -> list[str]:
    return [
        *("--config", str(ROOT / "configs" / preset), "--data.sources", f"[{{store: {store}}}]"),
        *("--training.precision", precision, "--training.deterministic", "true"),
        *("--training.max_steps", str(STEPS), "--checkpoint.save_steps", "5"),
        *("--evaluation.eval_steps", str(STEPS), "--evaluation.max_batches", "1"),
        *("--logging.logging_steps", "1", "--logging.wandb_mode", "disabled"),
    ]


@pytest.mark.parametrize("preset", ["quickstart.yaml", "tiny-dense.yaml"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_launchers_agree_and_resume_exactly(masked_store: Path, tmp_path: Path, preset: str, precision: str):
    chosen = options(preset, masked_store, precision)
    by_hand = launch("torchrun", 1, tmp_path / "torchrun", chosen, gpu=True)
    accelerated = launch("accelerate", 1, tmp_path / "accelerate", chosen, gpu=True)
    assert set(by_hand.rows) == set(range(STEPS + 1))
    assert by_hand.exact_rows() == accelerated.exact_rows()
    tensors = checkpoint_tensors(by_hand.folder, STEPS)
    assert_same_tensors(tensors, checkpoint_tensors(accelerated.folder, STEPS))
    if precision == "fp16":
        assert by_hand.rows[STEPS]["train/loss_scale"] is not None

    folder = tmp_path / "killed"
    process = start("torchrun", 1, folder, chosen, gpu=True)
    wait_for_step(process, folder, KILL_STEP)
    kill_outright(process)
    finish(process, folder)
    launch("accelerate", 1, folder, chosen, gpu=True)
    continued = Finished(0, "", folder)
    assert continued.exact_rows() == by_hand.exact_rows()
    assert_same_tensors(tensors, checkpoint_tensors(folder, STEPS))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sharded_runs_agree_and_continue_each_other(masked_store: Path, tmp_path: Path, precision: str):
    """By hand, through Accelerate from the first one's checkpoint, and against DDP, on two GPUs."""
    chosen = [*options("quickstart.yaml", masked_store, precision), "--training.global_batch_size", "32"]
    sharded = [*chosen, "--distributed.strategy", "fsdp"]
    file = tmp_path / "fsdp2.yaml"
    text = (ROOT / "configs" / "accelerate" / "fsdp2.yaml").read_text()
    file.write_text(text.replace("use_cpu: true", "use_cpu: false"))
    by_hand = launch("torchrun", 2, tmp_path / "torchrun", sharded, gpu=True)
    later = [f"step-{step:08d}" for step in range(21, STEPS + 1)]
    ignored = shutil.ignore_patterns(*later, "best", "metrics.jsonl")
    shutil.copytree(by_hand.folder, tmp_path / "accelerate", ignore=ignored)
    continued = launch(
        "accelerate", 2, tmp_path / "accelerate", sharded, gpu=True, accelerate_file=file
    ).exact_rows()
    assert max(continued) == STEPS
    rows = by_hand.exact_rows()
    assert continued == {step: rows[step] for step in continued}
    tensors = checkpoint_tensors(by_hand.folder, STEPS)
    assert_same_tensors(tensors, checkpoint_tensors(tmp_path / "accelerate", STEPS))
    whole = launch("torchrun", 2, tmp_path / "ddp", chosen, gpu=True).rows
    for step in range(1, STEPS + 1):
        assert rows[step]["data/batch_sha256"] == whole[step]["data/batch_sha256"]
    bound = 1e-5 if precision == "fp32" else 1e-2
    assert math.isclose(rows[STEPS]["train/loss"], whole[STEPS]["train/loss"], rel_tol=bound)


def test_weights_open_in_transformers_with_the_same_logits(plain_store: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from llm_pretrain.export.huggingface import load_pretrained

    chosen = options("quickstart.yaml", plain_store, "bf16")
    launch("torchrun", 1, tmp_path / "run", chosen, gpu=True)
    weights = tmp_path / "run" / "weights" / f"step-{STEPS:08d}"
    ours = load_pretrained(weights).eval().cuda()
    theirs = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval().cuda()
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(0, 256, (2, 48), generator=generator).cuda()
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens).logits
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
