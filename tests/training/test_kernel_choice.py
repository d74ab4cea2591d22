"""Kernels that fail on a device new to a run: replaced on all ranks where `auto` chose, else refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import failing_kernels
from support.launching import Finished, launch, run_options, train

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.kernels.loss import fused_linear_cross_entropy
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.training import kernel_choice
from llm_pretrain.training.kernel_choice import KernelChoice, choose_kernels

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 32,
}
RAISED = "raised RuntimeError: no kernel image is available for execution on the device on cpu"
LOSS = "training.loss_implementation"
LARGE = "model.vocab_size=1024"
"""For which `auto` takes the fused loss."""
COMPARED = "kernels compared with their definitions in "


def settings(compile: str = "off", **training: Any) -> Config:
    return from_dict({"model": MODEL, "training": {"precision": "fp32", "compile": compile, **training}})


class Engine:
    """One process."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def choose(config: Config, folder: Path) -> tuple[Config, KernelChoice]:
    engine: Any = Engine()
    chosen, choice = choose_kernels(config, engine, RunFolder(folder))
    assert choice is not None
    return chosen, choice


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(kernel_choice, "CHECKED_DEVICES", {"cpu"})


def fail(monkeypatch: Patch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(*failing_kernels.PLACES[name], failing_kernels.failing(name))


def run(store: Path, folder: Path, settings: str = "", steps: int = 1) -> int:
    quick = f"training.max_steps={steps} schedule.warmup_steps=0 evaluation.eval_steps=0 model.hidden_size=64"
    return train(*run_options("tiny-moe", store, f"{quick} {LARGE} {settings}", folder=folder))


def kernels_of(folder: Path) -> list[dict[str, Any]]:
    """What each attempt recorded of its kernels."""
    return [row.get("kernels") for row in Finished(0, "", folder).attempts]


def test_nothing_is_checked_on_a_cpu(monkeypatch: Patch, plain_store: Path, tmp_path: Path, capsys: Capture):
    monkeypatch.setattr(kernel_choice, "CHECKED_DEVICES", {"cuda"})
    assert run(plain_store, tmp_path / "run") == 0
    assert COMPARED not in capsys.readouterr().out
    assert kernels_of(tmp_path / "run") == [None]


@pytest.mark.parametrize(
    ("fails", "replaced", "notes"),
    [
        ((), {}, []),
        (("fused loss",), {LOSS: "full"}, [f"loss fused {RAISED}; full takes its place"]),
    ],
    ids=["sound", "the loss fails"],
)
def test_what_fails_is_replaced_and_the_choice_holds(
    fails: tuple[str, ...],
    replaced: dict[str, str],
    notes: list[str],
    monkeypatch: Patch,
    plain_store: Path,
    tmp_path: Path,
    capsys: Capture,
):
    """The second attempt has sound kernels, and neither compares them nor goes back to them."""
    with monkeypatch.context() as patch:
        fail(patch, *fails)
        assert run(plain_store, tmp_path / "run") == 0
    assert capsys.readouterr().out.count(COMPARED) == 1
    assert run(plain_store, tmp_path / "run", steps=2) == 0
    assert COMPARED not in capsys.readouterr().out
    for kernels in kernels_of(tmp_path / "run"):
        assert (kernels["replaced"], kernels["notes"]) == (replaced, notes)
    chosen = "full" if replaced else "auto"
    assert f"loss_implementation: {chosen}" in (tmp_path / "run" / "config.yaml").read_text()


EXPECTED = "expected a kernel that computes what its definition does, found"
NO_EXPERTS = f"experts_implementation: {EXPECTED} none: experts streamed {RAISED}"


@pytest.mark.parametrize(
    ("fails", "settings", "lines"),
    [
        (("fused loss",), f"{LOSS}=fused", [f"{LOSS}: {EXPECTED} fused, which {RAISED}; set auto"]),
        (
            ("streamed", "fused loss"),
            f"{LOSS}=fused",
            [
                f"training.{NO_EXPERTS}; another training.precision may have one",
                f"{LOSS}: {EXPECTED} fused, which {RAISED}; set auto",
            ],
        ),
        (("compile",), "training.compile=on", ["training.compile: expected "]),
    ],
    ids=["named", "all at once", "compiling"],
)
def test_what_was_named_or_has_no_other_is_refused(
    fails: tuple[str, ...],
    settings: str,
    lines: list[str],
    monkeypatch: Patch,
    plain_store: Path,
    tmp_path: Path,
    capsys: Capture,
):
    fail(monkeypatch, *fails)
    assert run(plain_store, tmp_path / "run", settings) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(lines)
    for error, line in zip(errors, lines, strict=True):
        assert error.startswith(f"error: {line}")


def test_results_that_differ_are_refused_with_their_bound(monkeypatch: Patch, tmp_path: Path):
    def wrong(*tensors: Any) -> Any:
        sums = fused_linear_cross_entropy(*tensors)
        return sums._replace(loss=2 * sums.loss)

    monkeypatch.setattr(*failing_kernels.PLACES["fused loss"], wrong)
    with pytest.raises(ConfigError, match=r"which computed results that differ by 1\.0e\+00 \(bound: 3"):
        choose(settings(loss_implementation="fused"), tmp_path)


def test_a_device_that_a_kernel_broke_ends_the_run(monkeypatch: Patch, tmp_path: Path):
    fail(monkeypatch, "fused loss")
    monkeypatch.setattr(kernel_choice, "_device_error", lambda device: "AcceleratorError")
    with pytest.raises(
        ConfigError, match=r"^training\.loss_implementation: .* left the device unusable .*; set full$"
    ):
        choose(settings(), tmp_path)


def attempt(choice: KernelChoice, **changes: Any) -> str:
    row = {
        "step": 0,
        "kernels": {"checked": choice.checked, "replaced": choice.replaced, "notes": choice.notes},
    }
    row["kernels"] |= changes
    return json.dumps(row) + "\n"


def test_another_attempts_choice_holds_where_it_was_checked_alone(monkeypatch: Patch, tmp_path: Path):
    _, choice = choose(settings(), tmp_path)
    for changes in ({"checked": {"devices": ["another"]}}, {"replaced": {"training.max_steps": "full"}}):
        (tmp_path / "attempts.jsonl").write_text(attempt(choice, **changes))
        assert choose(settings(), tmp_path)[1].seconds
    (tmp_path / "attempts.jsonl").write_text(attempt(choice))
    monkeypatch.setattr(kernel_choice, "check_kernels", lambda *_: [])
    for training in ({"precision": "bf16"}, {"loss_implementation": "full"}, {"deterministic": True}):
        assert choose(settings(**training), tmp_path)[1].checked != choice.checked
    assert choose(settings(), tmp_path)[1].checked == choice.checked


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_both_scripts_train_with_what_all_ranks_can_run(launcher: str, plain_store: Path, tmp_path: Path):
    """Rank 1 alone lacks the fused loss; a second attempt takes the first one's choice."""
    options = run_options(
        "tiny-moe", plain_store, "logging.report=false model.vocab_size=1024 evaluation.eval_steps=0"
    )
    before: list[tuple[str, list[Any]]] = [("support.failing_kernels:check_on_cpu", [1, "fused loss"])]
    folder = tmp_path / "run"
    line = f"loss fused {RAISED} (rank 1); full takes its place"
    for steps in ("2", "4"):
        done = launch(launcher, 2, folder, [*options, "--training.max_steps", steps], before=before)
        assert done.output.count(line) == 1, done.output[-3000:]
        assert done.output.count(COMPARED) == (steps == "2")
        assert "loss_implementation: full" in (folder / "config.yaml").read_text()
    rows = [json.loads(row) for row in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [row["kernels"]["replaced"] for row in rows] == [{"training.loss_implementation": "full"}] * 2
