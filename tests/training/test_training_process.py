"""What a process does before it trains, and how it leaves; whole launches are in tests/distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from llm_pretrain.config import Config, DistributedConfig
from llm_pretrain.errors import ConfigError, DataError, ResourceError
from llm_pretrain.training import process

WHOLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WHOLE, "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_trained", None)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("missing", WHOLE)
def test_half_of_a_launcher_s_variables_stop_the_run(missing: str, monkeypatch: pytest.MonkeyPatch):
    process.check_environment()
    for name, value in WHOLE.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"without {missing}; set or unset all of them"):
        process.check_environment()
    monkeypatch.setenv(missing, WHOLE[missing])
    process.check_environment()


def test_an_address_alone_is_no_launch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    process.check_environment()


@pytest.mark.parametrize("value", ["2", "-1", "one"])
def test_a_rank_outside_the_world_stops_the_run(value: str, monkeypatch: pytest.MonkeyPatch):
    for name, whole in WHOLE.items():
        monkeypatch.setenv(name, whole)
    monkeypatch.setenv("LOCAL_RANK", value)
    with pytest.raises(ConfigError, match=f"LOCAL_RANK: expected 0 to .* found '{value}'"):
        process.check_environment()


@pytest.mark.parametrize(
    ("variables", "processes"),
    [({}, 1), ({"WORLD_SIZE": "2"}, 2), ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2)],
)
def test_threads_share_the_machine(
    variables: dict[str, str], processes: int, monkeypatch: pytest.MonkeyPatch
):
    """Without LOCAL_WORLD_SIZE, as when variables are set by hand, all processes count as this machine's."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert process.cpu_threads(Config()) == 8 // processes
    assert process.cpu_threads(Config(distributed=DistributedConfig(cpu_threads=3))) == 3


def test_the_number_of_threads_is_said_to_libraries_that_would_choose_their_own():
    before = torch.get_num_threads()
    try:
        process._set_threads(1)
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("trained", "wanted", "stops"), [(2, 2, True), (2, 1, False), (1, 2, False)])
def test_a_fork_does_not_wait_for_threads_that_it_has_not(
    trained: int, wanted: int, stops: bool, monkeypatch: pytest.MonkeyPatch
):
    """What a fork inherits is the number of the process that trained, which is not its own."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    process._set_threads(trained)
    process._set_threads(wanted)  # the same process may train again
    number = os.getpid()
    process._set_threads(trained)
    monkeypatch.setattr(process.os, "getpid", lambda: number + 1)
    if not stops:
        process._set_threads(wanted)
        assert chosen == [trained, wanted, trained, wanted]
        return
    with pytest.raises(ConfigError, match="restart the notebook's kernel"):
        process._set_threads(wanted)
    assert chosen == [trained, wanted, trained]


def test_a_process_alone_is_never_ended_outright(group_of_one: None, monkeypatch: pytest.MonkeyPatch):
    """It may be a notebook's kernel."""
    monkeypatch.setattr(process.os, "_exit", lambda code: pytest.fail("ended outright"))
    with pytest.raises(SystemExit) as left, process.report_errors():
        raise DataError("no data")
    assert left.value.code == DataError.exit_code
    with pytest.raises(ZeroDivisionError), process.report_errors():
        print(1 / 0)


def test_a_rank_with_peers_leaves_at_once(group_of_one: None, monkeypatch: pytest.MonkeyPatch):
    """Its process group's clean-up would wait for them."""
    ended: list[int] = []
    monkeypatch.setattr(process.os, "_exit", ended.append)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SystemExit), process.report_errors():
        raise DataError("no data")
    assert ended == [DataError.exit_code]


def test_a_process_group_that_does_not_come_about_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left, process.report_errors():
        raise torch.distributed.DistStoreError("timed out\nframe 1")
    assert left.value.code == ResourceError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1: launch: timed out (rank 1 of 2, meeting at 127.0.0.1:1); start")


class Launcher:
    """A parent process with a command line."""

    def __init__(self, *words: str):
        self.words = list(words)

    def parent(self) -> Launcher:
        return self

    def cmdline(self) -> list[str]:
        return self.words


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("bash",), 1),
        (("python", "accelerate", "launch", "train_pretrain_accelerate.py"), 2),
        (("python", "accelerate", "launch", "--num_processes", "1", "train_pretrain_accelerate.py"), 1),
    ],
)
def test_the_file_that_accelerate_finds_by_itself_counts(
    words: tuple[str, ...], asked: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A file in the user's home may ask for two processes and start one, as a named one may."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    process.default_accelerate_file().parent.mkdir()
    process.default_accelerate_file().write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    monkeypatch.setattr(psutil, "Process", lambda: Launcher(*words))
    process.check_world_size(asked)
    with pytest.raises(ConfigError, match=f"{asked} processes were asked for, 3 joined"):
        process.check_world_size(3)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("elastic", [True, False])
def test_only_a_launcher_s_process_dies_with_its_parent(elastic: bool, monkeypatch: pytest.MonkeyPatch):
    """A process from a shell may outlive it on purpose, and a notebook's kernel is nobody's worker."""
    asked: list[tuple[int, ...]] = []
    library = type("Library", (), {"prctl": staticmethod(lambda *words: asked.append(words))})
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(psutil, "Process", lambda: Launcher("bash"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    process.die_with_launcher()
    assert [words[0] for words in asked] == ([process.PR_SET_PDEATHSIG] if elastic else [])
