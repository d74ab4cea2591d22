"""A mixture of sources: the same bits by both launchers and resumed, the same samples on one process."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from support.launching import ROOT, Finished, assert_same_tensors, checkpoint_tensors, launch, train

pytestmark = pytest.mark.slow

STEPS, RESUMED_FROM = 14, 5
LABELS = ("plain", "ragged")


def options(plain_store: Path, masked_store: Path) -> list[str]:
    """128 sequences a step: the change of weights at step 3 begins with the second block, at step 8."""
    sources = f"[{{store: {plain_store}, name: plain}}, {{store: {masked_store}, weight: 2, name: ragged}}]"
    return [
        *("--config", str(ROOT / "configs" / "tiny-moe.yaml"), "--data.sources", sources),
        *("--data.weight_changes", "[{step: 3, weights: [1, 0]}, {step: 100, weights: [1, 1]}]"),
        *("--training.sequence_length", "32", "--training.global_batch_size", "128"),
        *("--training.micro_batch_size", "32", "--training.max_steps", str(STEPS)),
        *("--evaluation.eval_steps", "4", "--evaluation.max_batches", "1"),
        *("--evaluation.sample_prompts", "[one, two]", "--evaluation.sample_tokens", "4"),
        *("--checkpoint.save_steps", str(RESUMED_FROM), "--checkpoint.keep_last", "9"),
        *("--logging.report", "false", "--training.precision", "fp32", "--distributed.cpu_threads", "1"),
    ]


@pytest.fixture(scope="module")
def mixture(
    plain_store: Path, masked_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Finished]:
    """By hand on two processes; from its first checkpoint on through Accelerate; by hand on one process."""
    folder, chosen = tmp_path_factory.mktemp("mixture"), options(plain_store, masked_store)
    straight = launch("torchrun", 2, folder / "straight", chosen)
    resumed = folder / "resumed"
    later = shutil.ignore_patterns("step-0000001*", "best", "metrics.jsonl")
    shutil.copytree(straight.folder, resumed, ignore=later)
    continued = launch("accelerate", 2, resumed, chosen)
    alone = folder / "alone"
    assert train(*chosen, "--run.output_dir", str(alone), "--training.micro_batch_size", "16") == 0
    return {"straight": straight, "resumed": continued, "alone": Finished(0, "", alone)}


def test_a_mixture_is_identical_on_the_other_launcher_and_after_a_resume(mixture: dict[str, Finished]):
    rows, resumed = mixture["straight"].exact_rows(), mixture["resumed"].exact_rows()
    assert sorted(resumed) == list(range(RESUMED_FROM + 1, STEPS + 1))
    assert resumed == {step: rows[step] for step in resumed}
    left, right = (mixture[name].folder for name in ("straight", "resumed"))
    assert_same_tensors(checkpoint_tensors(left, STEPS), checkpoint_tensors(right, STEPS))
    best = [path.name for path in (left / "weights" / "best").iterdir()]
    assert {"model.safetensors", "best.json"} <= set(best)
    for name in best:
        assert (left / "weights" / "best" / name).read_bytes() == (
            right / "weights" / "best" / name
        ).read_bytes(), name
    sampled = [(folder / "samples.jsonl").read_text().splitlines() for folder in (left, right)]
    assert len(sampled[0]) == 2 * 5  # prompts, evaluations
    assert sampled[1] == [*sampled[0], *sampled[0][4:]], "steps 8, 12 and 14 again"


def test_a_mixture_is_the_same_on_one_process(mixture: dict[str, Finished]):
    """Its samples exactly, its losses as far as the split of a batch allows."""
    rows, alone = mixture["straight"].rows, mixture["alone"].rows
    assert set(rows) == set(alone) == set(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        for key in ("data/batch_sha256", *(f"train/source/{label}/loss_tokens" for label in LABELS)):
            assert rows[step][key] == alone[step][key], (step, key)
        for label in LABELS:
            left, right = (each[step][f"train/source/{label}/loss"] for each in (rows, alone))
            assert left == right or math.isclose(left, right, rel_tol=1e-5), (step, label)
    for label in LABELS:
        keys = [f"eval/source/{label}/{name}" for name in ("loss", "bits_per_byte")]
        assert all(math.isclose(rows[0][key], alone[0][key], rel_tol=1e-6) for key in keys)


def test_the_losses_of_a_mixture_s_sources_add_up(mixture: dict[str, Finished]):
    """The comparisons above compare something: each source's loss, and none once a source is left out."""
    for run in mixture.values():
        for step, row in run.rows.items():
            if step == 0:
                continue
            losses, tokens = (
                [row[f"train/source/{label}/{name}"] for label in LABELS] for name in ("loss", "loss_tokens")
            )
            assert sum(tokens) == row["train/loss_tokens"]
            total = sum(loss * count for loss, count in zip(losses, tokens, strict=True) if count)
            assert math.isclose(total / sum(tokens), row["train/loss"], rel_tol=1e-6)
            assert (losses[1] is None) == (tokens[1] == 0) == (step > 8)
