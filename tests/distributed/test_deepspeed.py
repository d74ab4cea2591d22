"""DeepSpeed's ZeRO against DDP: the same numbers, the same checkpoints, and no silent change of either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import small_config
from support.launching import Finished, assert_same_tensors, checkpoint_tensors
from support.stepping import relative_error
from support.zero_cases import DIVERGING_STEP, MASKED_STEP, SAVED, STEPS, WORLD_SIZE, run_cases

from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.config.loading import validate
from llm_pretrain.config.tree import Config
from llm_pretrain.distributed import deepspeed
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import check_accelerate_settings

BOUND = 1e-5
"""Of ZeRO-2 and 3, which add up micro batches in another order."""


@pytest.fixture(scope="module")
def cases(masked_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of `support.zero_cases`, which take a minute: the tests that use it are slow."""
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed; make setup installs it")
    folder = tmp_path_factory.mktemp("zero")
    run_cases(masked_store, folder)
    return folder


def run(cases: Path, name: str) -> Finished:
    return Finished(0, "", cases / name)


def relative_difference(left: Finished, right: Finished) -> float:
    """Norm of the difference over the norm, of all parameters."""
    tensors = (checkpoint_tensors(each.folder, STEPS) for each in (left, right))
    found, expected = (
        {name: tensor for name, tensor in each.items() if not name.startswith("optimizer.")}
        for each in tensors
    )
    return relative_error(found, expected)


def scalars(folder: Path) -> dict:
    """What a manifest says of the optimizer: AdamW's steps, its groups."""
    manifest = json.loads((folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    return {name: manifest[name] for name in ("scalars", "optimizer")}


def assert_same_run(left: Finished, right: Finished, *, since: int = 0) -> None:
    rows = {step: row for step, row in left.exact_rows().items() if step > since}
    assert rows == {step: row for step, row in right.exact_rows().items() if step > since}
    assert set(rows) >= set(range(since + 1, STEPS + 1))
    assert_same_tensors(checkpoint_tensors(left.folder, STEPS), checkpoint_tensors(right.folder, STEPS))
    assert scalars(left.folder) == scalars(right.folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", " bf16"])
def test_zero_1_is_ddp_to_the_last_bit(cases: Path, kind: str):
    """In both precisions, and past a step in which no token counts."""
    ours, expected = run(cases, f"zero1{kind}"), run(cases, f"ddp{kind}")
    assert_same_run(ours, expected)
    assert ours.rows[MASKED_STEP + 1]["train/skipped"] == "no_loss_tokens"
    assert ours.rows[STEPS]["train/skipped"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3 moe"])
def test_sharded_gradients_and_parameters_stay_within_their_bound(cases: Path, name: str):
    ours, expected = run(cases, name), run(cases, name.replace("zero2", "ddp").replace("zero3", "ddp"))
    assert relative_difference(ours, expected) < BOUND
    for step, row in expected.rows.items():
        assert ours.rows[step].get("data/batch_sha256") == row.get("data/batch_sha256")
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            if row.get(key) is not None:
                assert ours.rows[step][key] == pytest.approx(row[key], rel=BOUND), (step, key)
            else:
                assert ours.rows[step].get(key) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resumed", "uninterrupted"),
    [("zero1 resumed", "zero1"), ("zero3 resumed", "zero3 moe"), ("ddp then zero1", "ddp")],
)
def test_a_resumed_run_is_the_uninterrupted_one(cases: Path, resumed: str, uninterrupted: str):
    ours = run(cases, resumed)
    assert ours.raw_steps()[0] == SAVED + 1
    assert_same_run(ours, run(cases, uninterrupted), since=SAVED)


@pytest.mark.slow
def test_a_zero_3_checkpoint_continues_under_ddp(cases: Path):
    ours = run(cases, "zero3 then ddp")
    assert ours.raw_steps()[0] == SAVED + 1
    assert relative_difference(ours, run(cases, "ddp moe")) < BOUND
    assert scalars(ours.folder) == scalars(cases / "ddp moe")


@pytest.mark.slow
def test_an_infinite_gradient_stops_every_rank_before_it_is_saved(cases: Path):
    """On one rank it is infinite; DeepSpeed has no way back from a step, so none of it may reach a file."""
    ours = run(cases, "diverges")
    for rank in range(WORLD_SIZE):
        error = (cases / f"diverges-{rank}.error").read_text()
        assert error.startswith("DivergedError: distributed.strategy: deepspeed")
        assert f"step {DIVERGING_STEP + 1} " in error
        assert "\n" not in error
    assert (ours.status["state"], ours.status["exit_code"]) == ("diverged", 70)
    assert max(ours.rows) == DIVERGING_STEP
    assert [path.name for path in (ours.folder / "checkpoints").iterdir()] == [f"step-{SAVED:08d}"]
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(ours.folder, SAVED).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero3 moe"])
def test_half_precision_weights_are_the_checkpoint_s_parameters(cases: Path, name: str):
    model = open_model(cases / name / "weights" / f"step-{STEPS:08d}").model
    tensors = checkpoint_tensors(cases / name, STEPS)
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter.bfloat16(), tensors[parameter_name].bfloat16()), parameter_name


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["own norm", "divided twice"])
def test_mistakes_are_seen(cases: Path, mistake: str):
    assert relative_difference(run(cases, mistake), run(cases, "ddp")) > 0


def zero_config(**fields: object) -> Config:
    config = Config()
    return replace(config, distributed=replace(config.distributed, strategy="deepspeed", **fields))


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ACCELERATE_USE_FSDP", "true", ("distributed.strategy: deepspeed", "runs fsdp")),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2", ("distributed.zero_stage: 3", "zero_stage is 2")),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", ("training.max_grad_norm: 1.0", "gradient_clipping is 0.5")),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", ("makes 3 accumulation", "steps is 7")),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", ("offload_optimizer_device", "is cpu")),
    ],
)
def test_what_was_launched_is_held_against_the_configuration(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: tuple[str, ...]
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    check_accelerate_settings(zero_config(zero_stage=3), 3)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        check_accelerate_settings(zero_config(zero_stage=3), 3)
    for part in named:
        assert part in caught.value.problems[0]


def test_deepspeed_is_never_run_unasked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=r"distributed\.strategy: ddp, but accelerate runs deepspeed"):
        check_accelerate_settings(Config(), 1)


def test_fp16_is_refused_in_one_line(masked_store: Path):
    config = small_config(masked_store, distributed={"strategy": "deepspeed"}, training={"precision": "fp16"})
    (line,) = validate(config)
    assert line.startswith("training.precision: expected fp32 or bf16 with distributed.strategy deepspeed")


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"found none; .*pip install .*llm_pretrain\[deepspeed\]"):
        deepspeed.prepare_deepspeed()
