"""Traps of launching and leaving: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.fork_server import SCRIPTS, fork_server
from support.launching import (
    ACCELERATE_SCRIPT,
    ROOT,
    TIMEOUT_SECONDS,
    Finished,
    finish,
    launch,
    run_options,
    script_request,
    start_command,
    tiny_options,
    train_tiny,
)
from support.probes import ACCELERATE

import llm_pretrain.training.trainer as trainer
from llm_pretrain.errors import EXIT_PREEMPTED
from llm_pretrain.runs.status import Status, read_status

HOW_TO_LAUNCH = ("accelerate launch --config_file configs/accelerate/cpu2.yaml", "torchrun --nproc_per_node")
YAML = "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_machines: 1\nmachine_rank: 0\n"
YAML += "num_processes: 2\nmixed_precision: 'no'\n"


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["by options", "by a file"])
def test_a_launch_of_too_few_processes_stops_and_says_how_to(asked: str, plain_store: Path, tmp_path: Path):
    (tmp_path / "multi_cpu.yaml").write_text(YAML + "distributed_type: MULTI_CPU\n")
    by_file = ["--config_file", str(tmp_path / "multi_cpu.yaml")]
    how = by_file if asked == "by a file" else ["--cpu", "--num_processes", "2"]
    folder = tmp_path / "run"
    process = start_command(
        [*ACCELERATE, *how, str(ACCELERATE_SCRIPT)], folder, tiny_options(plain_store, folder)
    )
    finished = finish(process, folder)
    assert finished.exit_code != 0
    lines = [line for line in finished.output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert all(text in lines[0] for text in ("2 processes were asked for, 1 joined", *HOW_TO_LAUNCH))


def test_accelerate_under_torchrun_connects_its_processes(plain_store: Path, tmp_path: Path):
    def check(folder: Path, *mistake: str) -> None:
        small = "model.hidden_size=32 training.max_steps=1 schedule.warmup_steps=0 evaluation.eval_steps=0"
        options = run_options("tiny-moe", plain_store, small)
        before = [(f"support.probes:{name}", []) for name in mistake]
        request = script_request("accelerate", 2, folder, options, output=f"{folder}.log", before=before)
        request = replace(request, launcher="torchrun", launcher_options=[])
        codes = fork_server().run(request, TIMEOUT_SECONDS)
        assert codes == [0, 0], Path(f"{folder}.log").read_text()
        assert Finished(0, "", folder).attempts[0]["world_size"] == 2

    check(tmp_path / "ours")
    with pytest.raises(AssertionError, match="2 processes were asked for, 1 joined"):
        check(tmp_path / "trap", "build_a_bare_accelerator")


def test_an_fsdp_file_does_not_train_something_else(plain_store: Path, tmp_path: Path):
    file, options = tmp_path / "fsdp.yaml", tiny_options(plain_store, tmp_path / "run")
    file.write_text(YAML + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    run = launch("accelerate", 2, tmp_path / "run", options, accelerate_file=file, exit_code=None)
    assert run.exit_code != 0
    assert "distributed.strategy: ddp, but accelerate runs fsdp" in run.output


FORMING = ("init_process_group", "InitProcessGroupKwargs", "PartialState", "init_distributed")


def check_meeting_points(source: str) -> None:
    """Whatever forms a process group forms it at the attempt's own meeting point."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    forming = [call for call in calls if ast.unparse(call.func).split(".")[-1] in FORMING]
    assert forming
    for call in forming:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("init_method") == "rendezvous_init_method()", ast.unparse(call)


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_process_group_is_formed_at_the_meeting_point(script):
    check_meeting_points((ROOT / f"{script}.py").read_text())
    with pytest.raises(AssertionError):
        check_meeting_points("dist.init_process_group(backend, timeout=timeout)")


def test_the_status_file_knows_what_the_launcher_does_not_say(masked_store, tmp_path, monkeypatch):
    def check(folder: Path, *, forgets: bool = False) -> None:
        with monkeypatch.context() as patch:
            if forgets:
                patch.setattr(Status, "ended", lambda *_: None)
            patch.setattr(trainer.Trainer, "_stop_requested", lambda self: self.progress.step == 1)
            with suppress(AssertionError):  # on the exit code, which is 75
                train_tiny(masked_store, folder)
        assert read_status(folder / "status.json")["exit_code"] == EXIT_PREEMPTED

    check(tmp_path / "ours")
    with pytest.raises(AssertionError):
        check(tmp_path / "trap", forgets=True)
