"""Kernels that fail on a device new to a run: replaced on all ranks where `auto` chose, else refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import failing_kernels
from support.launching import launch, run_options

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.self_check import KernelCheck, Part, check_kernels
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.training import kernel_choice
from llm_pretrain.training.kernel_choice import KernelChoice, choose_kernels

Patch = pytest.MonkeyPatch
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 32,
}
RAISED = "raised RuntimeError: no kernel image is available for execution on the device on cpu"
H100 = "NVIDIA H100 80GB HBM3 (9.0)"


def settings(compile: str = "off", **training: Any) -> Config:
    return from_dict({"model": MODEL, "training": {"precision": "fp32", "compile": compile, **training}})


class Engine:
    """Rank 0 of `world_size`; the others answer what `other` makes of its answer."""

    def __init__(self, world_size: int = 1, other: Callable[[Any], Any] = lambda value: value):
        self.rank, self.world_size, self.other = 0, world_size, other
        self.device = torch.device("cpu")

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *(self.other(value) for _ in range(self.world_size - 1))]


def choose(config: Config, folder: Path, engine: Any = None) -> tuple[Config, KernelChoice]:
    first: Any = engine or Engine()
    chosen, choice = choose_kernels(config, first, RunFolder(folder))
    assert choice is not None
    return chosen, choice


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(kernel_choice, "CHECKED_DEVICES", {"cpu"})


def fail(monkeypatch: Patch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(*failing_kernels.PLACES[name], failing_kernels.failing(name))


def test_nothing_is_checked_on_a_cpu(monkeypatch: Patch, tmp_path: Path):
    monkeypatch.setattr(kernel_choice, "CHECKED_DEVICES", {"cuda"})
    monkeypatch.setattr(kernel_choice, "check_kernels", None)
    config, engine = settings(), Engine()
    alone: Any = engine
    alone.gather_objects = None
    assert choose_kernels(config, alone, RunFolder(tmp_path)) == (config, None)


def test_sound_kernels_stay(tmp_path: Path):
    config = settings()
    chosen, choice = choose(config, tmp_path)
    assert chosen == config
    assert (choice.replaced, choice.notes) == ({}, [])
    assert choice.seconds > 0


def test_what_fails_is_replaced_and_checked_again(monkeypatch: Patch, tmp_path: Path):
    fail(monkeypatch, "fused loss")
    checked: list[Any] = []

    def noted(*arguments: Any) -> list[KernelCheck]:
        checked.append(list(arguments[-1]))
        return check_kernels(*arguments)

    monkeypatch.setattr(kernel_choice, "check_kernels", noted)
    chosen, choice = choose(settings(), tmp_path)
    assert chosen.training.loss_implementation == "full"
    assert chosen.training.experts_implementation == "auto"
    assert choice.notes == [f"loss fused {RAISED}; full takes its place"]
    assert checked[1:] == [["loss"]]


@pytest.mark.parametrize(
    ("part", "setting", "found"),
    [("loss", "training.loss_implementation", "fused"), ("norm", "norm", "fused alone")],
)
def test_a_kernel_that_was_named_or_has_no_other_is_refused(
    part: Part, setting: str, found: str, monkeypatch: Patch, tmp_path: Path
):
    def wrong(*arguments: Any) -> list[KernelCheck]:
        checks = check_kernels(*arguments)
        return [replace(check, forward_error=1.0) if check.part == part else check for check in checks]

    monkeypatch.setattr(kernel_choice, "check_kernels", wrong)
    with pytest.raises(ConfigError) as error:
        choose(settings(loss_implementation="fused"), tmp_path)
    advice = "set auto" if part == "loss" else "another training.precision or torch may have one"
    assert str(error.value) == (
        f"{setting}: expected a kernel that computes what its definition does, found {found}, which computed "
        f"results that differ by 1.0e+00 (bound: 3.1e-05) on cpu; {advice}"
    )


def test_all_kernels_that_fail_are_named_at_once(monkeypatch: Patch, tmp_path: Path):
    fail(monkeypatch, "streamed", "fused loss")
    with pytest.raises(ConfigError) as error:
        choose(settings(loss_implementation="fused"), tmp_path)
    first, second = error.value.problems
    assert first == (
        "training.experts_implementation: expected a kernel that computes what its definition does, found "
        f"none: experts streamed {RAISED}; another training.precision may have one"
    )
    assert second.startswith("training.loss_implementation: ")


@pytest.mark.parametrize("missing", [None, "a C compiler (gcc or clang, or CC)"])
def test_layers_that_do_not_compile_run_uncompiled(missing: str | None, monkeypatch: Patch, tmp_path: Path):
    fail(monkeypatch, "compile")
    monkeypatch.setattr(kernel_choice, "missing_compiler", lambda: missing)
    monkeypatch.setattr(
        kernel_choice, "compiles", lambda config, world_size, on_gpu: config.training.compile != "off"
    )
    chosen, choice = choose(settings("auto"), tmp_path)
    assert chosen.training.compile == "off"
    problem = f"raised ConfigError: expected {missing}, found none on cpu" if missing else RAISED
    assert choice.notes == [f"torch.compile {problem}; layers run uncompiled"]
    with pytest.raises(ConfigError, match=r"^training\.compile: .* found on, which raised "):
        choose(settings("on"), tmp_path)


def test_a_failure_of_one_rank_counts_on_all(tmp_path: Path):
    """Only the other rank's fused loss fails, and only until it is replaced."""

    def other(value: Any) -> Any:
        answer, failure = value
        if isinstance(answer, list):
            answer = [
                replace(each, error="RuntimeError: lost")
                if (each.part, each.implementation) == ("loss", "fused")
                else each
                for each in answer
                if isinstance(each, KernelCheck)
            ]
        return answer, failure

    chosen, choice = choose(settings(), tmp_path, Engine(2, other))
    assert chosen.training.loss_implementation == "full"
    assert choice.notes == ["loss fused raised RuntimeError: lost on cpu (rank 1); full takes its place"]


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


def test_the_choice_of_an_earlier_attempt_holds(monkeypatch: Patch, tmp_path: Path):
    fail(monkeypatch, "fused loss")
    first, choice = choose(settings(), tmp_path)
    (tmp_path / "attempts.jsonl").write_text('{"step": 0}\n' + attempt(choice))
    monkeypatch.setattr(kernel_choice, "check_kernels", None)
    again, same = choose(settings(), tmp_path)
    assert again == first
    assert replace(choice, seconds=0.0) == same


@pytest.mark.parametrize(
    "changes",
    [
        {"checked": {"devices": ["another"]}},
        {"checked": None},
        {"replaced": {"training.max_steps": "full"}},
        {"replaced": {"training.loss_implementation": ["full"]}},
        {"notes": None},
        None,
    ],
)
def test_anything_else_is_checked(changes: Any, monkeypatch: Patch, tmp_path: Path):
    _, choice = choose(settings(), tmp_path)
    text = "{}\n{}\n" if changes is None else attempt(choice, **changes)
    (tmp_path / "attempts.jsonl").write_text(text)
    _, again = choose(settings(), tmp_path)
    assert again.seconds
    (tmp_path / "attempts.jsonl").write_text(attempt(choice))
    monkeypatch.setattr(kernel_choice, "check_kernels", lambda *_: [])
    for config in (
        settings(precision="bf16"),
        settings(loss_implementation="full"),
        settings(deterministic=True),
    ):
        assert choose(config, tmp_path)[1].checked != choice.checked
    assert choose(settings(), tmp_path)[1].checked == choice.checked


@pytest.mark.parametrize(
    ("precision", "model", "order"),
    [
        ("bf16", {}, ["varlen", "flex", "sdpa"]),
        ("bf16", {"attention_dropout": 0.1}, ["sdpa"]),
        ("fp32", {}, ["sdpa"]),
    ],
)
def test_attention_falls_back_to_what_is_allowed(
    precision: str, model: Any, order: list[str], monkeypatch: Patch, tmp_path: Path
):
    """On a GPU that is not there: the choice is followed, nothing is computed."""
    problems = walk(
        monkeypatch,
        tmp_path,
        "attention",
        from_dict({"model": MODEL | model, "training": {"precision": precision, "compile": "off"}}),
    )
    assert [line.split()[1] for line in problems] == order


@pytest.mark.parametrize(
    ("precision", "model", "order"),
    [
        ("bf16", {}, ["grouped", "triton", "streamed"]),
        ("bf16", {"moe_intermediate_size": 20}, ["triton", "streamed"]),
        ("fp32", {}, ["triton", "streamed"]),
    ],
)
def test_experts_fall_back(precision: str, model: Any, order: list[str], monkeypatch: Patch, tmp_path: Path):
    config = from_dict({"model": MODEL | model, "training": {"precision": precision, "compile": "off"}})
    problems = walk(monkeypatch, tmp_path, "experts", config)
    assert [line.split()[1] for line in problems] == order


def walk(monkeypatch: Patch, folder: Path, part: Part, config: Config) -> list[str]:
    """The failures of a part of which every kernel fails, on an H100 of which only the name is there."""
    from llm_pretrain.model.kernels import choice as kernels
    from llm_pretrain.model.kernels import layers

    for name, value in {"get_device_capability": (9, 0), "get_device_name": "NVIDIA H100 80GB HBM3"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    monkeypatch.setattr(layers, "HAS_TRITON", True)
    monkeypatch.setattr(kernel_choice, "CHECKED_DEVICES", {"cuda"})
    monkeypatch.setattr(kernel_choice, "_device_error", lambda device: None)
    kernels._capability.cache_clear()

    def checks(model: Any, names: Any, device: Any, dtype: Any, parts: Any) -> list[KernelCheck]:
        chosen = getattr(kernels.resolved_kernels(model, names, device, dtype), part)
        error = "RuntimeError: no"
        return [KernelCheck(part, chosen, "definition", None, None, 1.0, error, 0.0)] if part in parts else []

    monkeypatch.setattr(kernel_choice, "check_kernels", checks)
    engine = Engine()
    engine.device = torch.device("cuda", 0)
    with pytest.raises(ConfigError) as error:
        choose(config, folder, engine)
    (line,) = error.value.problems
    tried = line.split("found none: ")[1].removesuffix("; another training.precision may have one")
    return [each for each in tried.split("; ") if each.startswith(f"{part} ")]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_both_scripts_train_with_what_all_ranks_can_run(launcher: str, plain_store: Path, tmp_path: Path):
    """Rank 1 alone lacks the fused loss; a second attempt takes the first one's choice; a name is refused."""
    options = run_options(
        "tiny-moe", plain_store, "logging.report=false model.vocab_size=1024 evaluation.eval_steps=0"
    )
    before: list[tuple[str, list[Any]]] = [("support.failing_kernels:check_on_cpu", [1, "fused loss"])]
    folder = tmp_path / "run"
    line = f"loss fused {RAISED} (rank 1); full takes its place"
    for steps in ("2", "4"):
        done = launch(launcher, 2, folder, [*options, "--training.max_steps", steps], before=before)
        assert done.output.count(line) == 1, done.output[-3000:]
        assert done.output.count("kernels compared with their definitions in ") == (steps == "2")
        assert "loss_implementation: full" in (folder / "config.yaml").read_text()
    rows = [json.loads(row) for row in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [row["kernels"]["replaced"] for row in rows] == [{"training.loss_implementation": "full"}] * 2

    named = [*options, "--training.loss_implementation", "fused", "--training.max_steps", "2"]
    refused = launch(launcher, 2, tmp_path / "named", named, before=before, exit_code=None)
    lines = [each for each in refused.output.splitlines() if each.startswith("error:")]
    assert lines == [
        "error: training.loss_implementation: expected a kernel that computes what its definition does, "
        f"found fused, which {RAISED} (rank 1); set auto"
    ]
