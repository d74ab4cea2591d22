"""Ranks that were started differently stop before the first step, each with one line that says how."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import engine_class, small_config
from support.fork_server import SCRIPTS, Request, fork_server
from support.launching import TIMEOUT_SECONDS, run_options

from llm_pretrain.distributed import collectives
from llm_pretrain.errors import ConfigError, DivergedError
from llm_pretrain.training import agreement

TORCHRUN, ACCELERATE = SCRIPTS["torchrun"], SCRIPTS["accelerate"]


def run(
    store: Path,
    folder: Path,
    *changes: str,
    scripts: tuple[str, str] = (TORCHRUN, TORCHRUN),
    before: Any = (),
    steps: int = 2,
) -> tuple[list[int], list[str]]:
    """Exit codes and error lines of two ranks, the second with `changes`."""
    options = run_options(
        "tiny-dense",
        store,
        f"logging.report=false training.max_steps={steps} schedule.warmup_steps=0 "
        "evaluation.eval_steps=0 distributed.timeout_seconds=30",
        folder=folder,
    )
    output = folder.with_suffix(".output")
    request = Request(
        "support.fork_server:run_own_script",
        [scripts, [options, [*options, *changes]]],
        2,
        launcher="torchrun",
        output=str(output),
        before=list(before),
    )
    codes = fork_server().run(request, TIMEOUT_SECONDS)
    text = output.read_text()
    assert "Traceback" not in text, text[-3000:]
    return codes, [line for line in text.splitlines() if line.startswith("error:")]


def check_refused(result: tuple[list[int], list[str]], name: str, own: str, other: str) -> None:
    """Both ranks leave with code 2 and one line with the name and both values."""
    codes, lines = result
    assert codes == [2, 2], lines
    assert len(lines) == 2, lines
    named = f"{name}: expected the same on all ranks, found {own} on rank 0; {other} on rank 1; start all"
    assert {line.removeprefix("error: rank 1: ").removeprefix("error: ") for line in lines} != set(lines)
    assert all(named in line for line in lines), lines


def test_one_rank_of_each_script(plain_store: Path, tmp_path: Path):
    codes, lines = run(plain_store, tmp_path / "run", scripts=(TORCHRUN, ACCELERATE))
    assert codes == [2, 2]
    assert len(lines) == 2
    assert all("script: expected the same on all ranks, found train_pretrain.py " in line for line in lines)
    assert all("train_pretrain_accelerate.py " in line for line in lines)


@pytest.mark.parametrize(
    ("script", "name", "own", "other"),
    [
        (TORCHRUN, "optimizer.learning_rate", "0.003", "0.002"),
        pytest.param(ACCELERATE, "model.rope_theta", "1000000.0", "5000.0", marks=pytest.mark.slow),
    ],
)
def test_other_settings(plain_store: Path, tmp_path: Path, script: str, name: str, own: str, other: str):
    result = run(plain_store, tmp_path / "run", f"--{name}", other, scripts=(script, script))
    check_refused(result, name, own, other)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_store(plain_store: Path, changed_store: Path, tmp_path: Path):
    other = ("--data.sources", f"[{{store: {changed_store}}}]")
    codes, lines = run(plain_store, tmp_path / "run", *other)
    assert codes == [2, 2]
    assert all("data.sources[0].store: expected the same on all ranks" in line for line in lines)


@pytest.mark.slow
def test_what_a_machine_decides_may_differ(plain_store: Path, tmp_path: Path):
    shutil.copytree(plain_store, tmp_path / "copy")
    mine = [
        *("--data.sources", f"[{{store: {tmp_path / 'copy'}}}]", "--distributed.cpu_threads", "2"),
        *("--run.output_dir", f"{tmp_path}/../{tmp_path.name}/run", "--data.num_workers", "1"),
    ]
    codes, lines = run(plain_store, tmp_path / "run", *mine)
    assert (codes, lines) == ([0, 0], [])


@pytest.mark.slow
@pytest.mark.parametrize("script", [TORCHRUN, ACCELERATE])
def test_parameters_that_drift_apart_are_not_saved(plain_store: Path, tmp_path: Path, script: str):
    before = [("support.process_faults:flip_a_bit_of_rank_1", [])]
    codes, lines = run(plain_store, tmp_path / "run", scripts=(script, script), before=before)
    assert codes == [DivergedError.exit_code] * 2
    assert len(lines) == 2
    assert all("model.norm.weight at step 2: expected the same on all ranks" in line for line in lines)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def launch_facts(store: Path, **changes: Any) -> dict[str, str]:
    config = small_config(store, **changes)
    engine: Any = object.__new__(engine_class("torchrun"))
    engine.device = torch.device("cpu")
    return agreement.launch_facts(config, engine)


def test_what_is_compared(plain_store: Path, monkeypatch: pytest.MonkeyPatch):
    facts = launch_facts(plain_store)
    assert {"optimizer.learning_rate", "package torch", "source llm_pretrain/model/moe.py"} < facts.keys()
    changed = launch_facts(plain_store, model={"init_from": "/here"}, data={"num_workers": 3})
    assert changed == facts | {"model.init_from": "a path"}
    assert changed == launch_facts(plain_store, model={"init_from": "/there"})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert launch_facts(plain_store) == facts | {"environment variable NVIDIA_TF32_OVERRIDE": "0"}


def test_every_difference_is_named_with_its_ranks(monkeypatch: pytest.MonkeyPatch):
    mine = {"training.precision": "bf16", "same": "0", "only": "here"}
    other = {"training.precision": "fp32", "same": "0"}

    def gather(value: Any, world_size: int) -> list[Any]:
        """What two other ranks have, as digests or whole."""
        digests = isinstance(value, str)
        return [value, *(collectives._digest(each) if digests else each for each in (mine, other))]

    monkeypatch.setattr(collectives, "_gather", gather)
    ranks: Any = SimpleNamespace(rank=0, world_size=3)
    with pytest.raises(ConfigError) as caught:
        collectives.check_same(ranks, mine)
    assert not caught.value.shared
    precision, only = caught.value.problems
    assert "training.precision: expected the same on all ranks, found bf16 on ranks 0, 1; fp32 " in precision
    assert precision.endswith("on machines with different hardware set bf16 or fp32 instead of auto")
    assert "found here on ranks 0, 1; none on rank 2;" in only
    with pytest.raises(DivergedError, match=r"and 1 more differences"):
        collectives.check_same(ranks, mine, DivergedError, limit=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_digest_of_parameters_sees_every_element(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Whatever their number and their place in a larger tensor."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(agreement, "check_same", lambda ranks, facts, *_, **__: seen.append(facts))
    engine: Any = SimpleNamespace(world_size=2, pipeline=None)
    for index in range(13):  # the first is not one of them
        odd = torch.ones(13).to(dtype)
        odd[index] = 0
        tensors = {"odd": odd[1:], "one": torch.ones(()).to(dtype)}
        model: Any = SimpleNamespace(state_dict=lambda tensors=tensors: tensors)
        agreement.check_parameters(engine, model, "now")
    assert seen[0].keys() == {"odd now", "one now"}
    assert all(each["odd now"] != seen[0]["odd now"] for each in seen[1:])
    assert len({each["one now"] for each in seen}) == 1
