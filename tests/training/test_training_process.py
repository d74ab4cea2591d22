"""What a process does before it trains, and how it leaves; whole launches are in tests/distributed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.launching import ROOT, environment, launch_command
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import MAX_LINE, ConfigError, DataError, PretrainError, ResourceError, StuckError
from llm_pretrain.launch import checks as launch_checks
from llm_pretrain.launch import process

WHOLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WHOLE, "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", process._EXPORTED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_trained", None)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def export(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_all_of_a_launch_or_nothing_of_it_passes(monkeypatch: pytest.MonkeyPatch):
    for variables in ({}, {"MASTER_ADDR": "127.0.0.1"}, WHOLE):
        export(monkeypatch, variables)
        launch_checks.check_environment()
    for missing in WHOLE:
        with monkeypatch.context() as patch:
            patch.delenv(missing)
            with pytest.raises(ConfigError, match=f"without {missing}; set or unset"):
                launch_checks.check_environment()


def test_what_is_left_over_in_a_shell_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv(process._ELASTIC, raising=False)
    for name in launch_checks._OTHER_SIZES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            launch_checks.check_environment()
            patch.setenv(name, "2")
            with pytest.raises(
                ConfigError, match=f"found {name}=2 without RANK, .*; set or unset all of them"
            ):
                launch_checks.check_environment()
            export(patch, WHOLE)
            launch_checks.check_environment()  # mpirun and srun also start ranks by hand
    assert capsys.readouterr().err == ""
    export(monkeypatch, WHOLE)
    launch_checks.check_environment()
    start = (
        "note: by RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, this process waits for the other ranks; unset RANK, "
    )
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.parametrize(("elastic", "bare"), [(False, True), (True, True), (True, False)])
def test_a_stop_signal_promises_no_save_that_may_not_come(elastic: bool, bare: bool, monkeypatch, capfd):
    monkeypatch.delenv(process._ELASTIC, raising=False)
    if elastic:
        monkeypatch.setenv(process._ELASTIC, "x")
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM" if bare else "SIGQUIT")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
    with process.SignalHandler():
        signal.raise_signal(signal.SIGTERM)
    said = "SIGTERM: the run saves and stops after this step" + ", unless another rank failed" * elastic
    said += " (its launcher waits 9 s, then kills it, and prints a traceback)" * (elastic and bare)
    assert capfd.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(
    ("variables", "processes"),
    [({}, 1), ({"WORLD_SIZE": "2"}, 2), ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2)],
)
def test_threads_share_the_machine(
    variables: dict[str, str], processes: int, monkeypatch: pytest.MonkeyPatch
):
    """Without LOCAL_WORLD_SIZE, as when variables are set by hand, all processes count as this machine's."""
    export(monkeypatch, variables)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert process.cpu_threads(Config()) == 8 // processes
    assert process.cpu_threads(Config(distributed=DistributedConfig(cpu_threads=3))) == 3


def test_exported_threads_are_honoured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: range(8), raising=False)
    exported = {"3": 3, "2,1": 2, "": None, "0": None, "all": None, "9" * 5000: None}
    for value, threads in exported.items():
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert process.exported_threads() == threads
        assert process.cpu_threads(Config()) == (threads or 8)
        assert process.cpu_threads(Config(distributed=DistributedConfig(cpu_threads=5))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("exported", [None, "3"])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_pass_on_what_is_exported(launcher: str, exported: str | None, tmp_path: Path):
    """Both set OMP_NUM_THREADS themselves where it is unset."""
    (tmp_path / "probe.py").write_text(
        "import os\nfrom llm_pretrain.launch.process import exported_threads\n"
        "print('found', exported_threads(), os.environ['OMP_NUM_THREADS'])\n"
    )
    own = {} if exported is None else {"OMP_NUM_THREADS": exported}
    kept = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    command = [*launch_command(launcher, 2)[:-1], str(tmp_path / "probe.py")]
    printed = subprocess.run(command, env=kept | own, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in printed.stdout.splitlines() if line.startswith("found")]
    assert lines == [f"found {exported} {exported or 1}"] * 2


def test_a_fork_does_not_wait_for_threads_that_it_has_not(monkeypatch: pytest.MonkeyPatch):
    """What a fork inherits is the number of the process that trained, which is not its own."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    process._set_threads(2)
    process._set_threads(2)  # the same process may train again
    number = os.getpid()
    monkeypatch.setattr(process.os, "getpid", lambda: number + 1)
    with pytest.raises(ConfigError, match="restart the notebook's kernel"):
        process._set_threads(2)
    process._set_threads(1)


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
    export(monkeypatch, WHOLE)
    with pytest.raises(SystemExit) as left, process.report_errors():
        raise torch.distributed.DistStoreError("timed out\nframe 1")
    assert left.value.code == ResourceError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1: launch: timed out (rank 1 of 2, rendezvous at 127.0.0.1:1); start")


def test_two_processes_of_one_rank_are_named(monkeypatch: pytest.MonkeyPatch):
    """They and all others would wait for the missing rank until the time-out."""
    store = dist.HashStore()
    monkeypatch.setattr(process.distributed, "rendezvous", lambda url, **_: iter([(store, 1, 3)]))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for _ in range(2):  # one process may form its group again
        assert next(process._rendezvous("pretrain://"))[1:] == (1, 3)
    monkeypatch.setattr(process.os, "getpid", lambda: 4)
    with pytest.raises(ConfigError, match=r"^RANK: .*, found 1 in process \d+ on"):
        next(process._rendezvous("pretrain://"))


class QuietStore(dist.HashStore):
    """Without waits that may time out, of which torch's TCPStore logs two lines each."""

    def wait(self, keys: list[str]) -> None:  # type: ignore[override]
        super().wait(keys)


def meet(store: dist.Store, world_size: int) -> list[str]:
    """The attempts that all ranks have joined, the last rank first to come."""
    with ThreadPoolExecutor(world_size) as ranks:
        joining = []
        for rank in reversed(range(world_size)):
            joining.append(ranks.submit(process.join_attempt, store, rank, world_size))
            time.sleep(0.02)
        return [each.result(timeout=20) for each in joining]


def test_restarted_processes_join_one_attempt_in_a_store_that_outlives_them():
    """Whatever was left there: by an attempt of all ranks, of fewer, or one that only rank 0 reached."""
    store = QuietStore()
    names = []
    for world_size in (3, 3, 2, 3):
        (name,) = set(meet(store, world_size))
        names.append(name)
    store.set("attempt_of_3", "died early")
    names += set(meet(store, 3))
    assert len(set(names)) == 5
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="not all of 3 ranks came"):
        process.join_attempt(store, 1, 3)


def test_a_message_is_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]):
    """Names in a damaged file have any length and any characters."""
    name = "\x1b[31m\n" + "x" * 100_000
    with pytest.raises(SystemExit), process.report_errors():
        raise ConfigError(f"{name}: no such setting; see --help", "run.seed: expected an integer")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: \\x1b[31m\\nxxx")
    assert first.endswith("xxx: no such setting; see --help")
    assert len(first) < 2 * MAX_LINE
    assert second == "error: run.seed: expected an integer"


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch):
    """A console that fails shows nothing more: a run would be silent from its first sample on."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with process.report_errors():
        print("caf\u00e9", flush=True)
    assert terminal.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]  # a BytesIO


def test_a_rank_that_never_met_the_others_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Its machine may have other files than rank 0's, and nothing else would say that."""
    export(monkeypatch, WHOLE)
    with pytest.raises(SystemExit), process.report_errors():
        raise ConfigError("no such file")
    assert capsys.readouterr().err == "error: rank 1: no such file\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun prints its first worker's error
    with pytest.raises(SystemExit), process.report_errors():
        raise ConfigError("no such file")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("error", "said"), [(DataError, "rank 1: no data"), (ConfigError, "no data")])
def test_the_launcher_s_traceback_ends_with_the_error(
    error: type[PretrainError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    export(monkeypatch, WHOLE | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    with pytest.raises(SystemExit), process.report_errors():
        raise error("no data")
    assert not list(tmp_path.iterdir()), "not a worker of torchrun"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(SystemExit), process.report_errors():
        raise error("no data")
    failure = ProcessFailure(1, 1, error.exit_code, str(tmp_path / "error.json"))
    *_, last, border = str(ChildFailedError("script", {1: failure})).splitlines()
    assert (last, set(border)) == (f"  traceback : error: {said}", {"="})
    (tmp_path / "error.json").unlink()
    with pytest.raises(SystemExit), process.report_errors():
        raise StuckError("another rank's failure")
    assert not list(tmp_path.iterdir())


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
        (("python", "accelerate", "launch", "--cpu", "train_pretrain_accelerate.py"), 1),
    ],
)
def test_the_file_that_accelerate_finds_by_itself_counts(
    words: tuple[str, ...], asked: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A file in the user's home may ask for two processes and start one, as a named one may."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    launch_checks.default_accelerate_file().parent.mkdir()
    launch_checks.default_accelerate_file().write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    monkeypatch.setattr(psutil, "Process", lambda: Launcher(*words))
    launch_checks.check_world_size(asked)
    with pytest.raises(ConfigError, match=f"{asked} processes were asked for, 3 joined"):
        launch_checks.check_world_size(3)


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        ("bash", False),
        ("python accelerate launch train_pretrain_accelerate.py", True),
        ("python accelerate launch --config_file gpus.yaml train_pretrain_accelerate.py", False),
        ("python accelerate launch --config_file gpus.yaml --cpu train_pretrain_accelerate.py", True),
        ("python accelerate launch --config_file gone.yaml train_pretrain_accelerate.py --cpu", False),
        ("python accelerate launch --multi_gpu --num_processes 8 train_pretrain_accelerate.py", False),
        ("python accelerate launch --config_file /dev/fd/9 train_pretrain_accelerate.py", False),
    ],
)
def test_gpus_are_hidden_where_accelerate_was_told_to_use_the_cpu(
    words: str, hidden: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It leaves them to several processes, whatever its file says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    launch_checks.default_accelerate_file().parent.mkdir()
    launch_checks.default_accelerate_file().write_text("use_cpu: true\n")
    Path("gpus.yaml").write_text("use_cpu: false\n")
    monkeypatch.setattr(psutil, "Process", lambda: Launcher(*words.split()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    launch_checks.obey_use_cpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0,1")


@pytest.mark.parametrize(
    ("gpus", "variables", "processes"),
    [
        (0, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        (2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        (1, {}, None),
        (1, {"LOCAL_WORLD_SIZE": "8"}, None),
        (1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "2"),
        (4, {"LOCAL_RANK": "6"}, "LOCAL_RANK=6"),
    ],
)
def test_no_gpu_gets_two_processes(
    gpus: int, variables: dict[str, str], processes: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if "LOCAL_RANK" in variables else "")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, variables.get(name, ""))
    monkeypatch.setattr(launch_checks, "gpu_count", lambda: gpus)
    if processes is None:
        launch_checks.check_environment()
    else:
        with pytest.raises(ConfigError, match=f"so at most {gpus} here, found {processes};") as caught:
            launch_checks.check_environment()
        assert caught.value.shared == (variables["LOCAL_RANK"] != "0"), "one rank of a machine tells"


def test_numbers_of_local_ranks_are_numbers(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("LOCAL_WORLD_SIZE", "2.5"), ("LOCAL_RANK", "-1")):
        for other in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(other, "1")
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"expected numbers of this machine's ranks, found .*'{value}'"):
            launch_checks.check_environment()


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


@pytest.mark.slow  # a process of its own, whose standard output is closed before Python starts
def test_a_run_needs_no_standard_output(plain_store: Path, tmp_path: Path):
    script = " ".join(
        [sys.executable, str(ROOT / "train_pretrain.py"), "--config", str(ROOT / "configs/tiny-dense.yaml")]
    )
    options = f"--data.sources '[{{store: {plain_store}}}]' --training.max_steps 1 --schedule.warmup_steps 0"
    options += " --training.precision fp32 --distributed.cpu_threads 1 --evaluation.eval_steps 0"
    for name, redirection in {"closed": ">&-", "all": ">&- 2>&- <&-", "full": ">/dev/full"}.items():
        command = f"{script} {options} --run.output_dir {tmp_path / name} {redirection}"
        done = subprocess.run(
            command, shell=True, env=environment(), capture_output=True, text=True, check=False, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / name / "weights" / "step-00000001" / "config.json").exists()


@pytest.mark.parametrize("has_peers", [False, True])
def test_a_rank_that_fails_says_why_before_the_launchers_sigterm(
    has_peers: bool, monkeypatch: pytest.MonkeyPatch
):
    """The launcher ends the other ranks of one that has died while they unwind."""
    monkeypatch.setattr(process, "_has_peers", lambda: has_peers)
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    try:
        with pytest.raises(ResourceError), process.SignalHandler(verbose=False):
            raise ResourceError("lost the connection to another rank")
        for number, handler in before.items():
            assert signal.getsignal(number) == (signal.SIG_IGN if has_peers else handler)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
