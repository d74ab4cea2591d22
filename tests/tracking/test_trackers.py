"""Trackers: what wandb gets, and that no failure of it reaches training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.tracking import trackers
from llm_pretrain.tracking.trackers import Trackers


def config(mode: str) -> Config:
    return from_dict({"logging": {"wandb_mode": mode, "wandb_project": "project"}})


class FakeRun:
    def __init__(self, wandb: FakeWandb):
        self.wandb = wandb

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.wandb.metrics.append((name, step_metric))

    def log(self, row: dict) -> None:
        self.wandb.attempts += 1
        if self.wandb.broken:
            raise RuntimeError("no more\nrows")
        self.wandb.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.wandb.released.wait(20)
        self.wandb.exit_codes.append(exit_code)


class FakeWandb(SimpleNamespace):
    def __init__(self):
        super().__init__(metrics=[], rows=[], exit_codes=[], inits=[], broken=False, attempts=0)
        self.fails_in: tuple[str, ...] = ()
        self.released = threading.Event()
        self.released.set()
        self.Settings = type("Settings", (SimpleNamespace,), {"model_fields": {"silent", "console"}})

    def init(self, **wishes) -> FakeRun:
        self.inits.append(wishes)
        if wishes["mode"] in self.fails_in:
            raise ConnectionError("no server")
        return FakeRun(self)

    def teardown(self) -> None:
        pass


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_SILENT", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, os.environ.get(name, "true"))
    yield fake
    fake.released.set()


def test_rows_arrive_in_order_with_their_own_step(wandb, tmp_path):
    warnings: list[str] = []
    tracked = Trackers(config("offline"), tmp_path, None, True, warn=warnings.append)
    for step in (3, 4, 2):  # back, as after a resume
        tracked.log({"step": step, "train/loss": 0.5, "train/skipped": None, "moe/load": [[1.0]]})
    tracked.log({"step": 5, "train/loss": float("nan"), "data/batch_sha256": "00"})
    tracked.close(75)
    assert wandb.rows == [*({"step": step, "train/loss": 0.5} for step in (3, 4, 2)), {"step": 5}]
    assert wandb.metrics == [("step", None), ("*", "step")]
    assert wandb.exit_codes == [75]
    assert warnings == []
    (wishes,) = wandb.inits
    assert (wishes["mode"], wishes["project"], wishes["resume"]) == ("offline", "project", "allow")
    assert (wishes["id"], wishes["dir"]) == (tracked.wandb_id, str(tmp_path))
    assert vars(wishes["settings"]) == {"silent": True, "console": "off"}  # those that this version has
    assert wishes["config"]["logging"]["wandb_project"] == "project"


def test_the_wandb_id_is_kept_or_generated(wandb, tmp_path):
    first = Trackers(config("offline"), tmp_path, None, True)
    other = Trackers(config("offline"), tmp_path, None, True)
    again = Trackers(config("online"), tmp_path, first.wandb_id, True)
    for tracked in (first, other, again):
        tracked.close(0)
    assert first.wandb_id
    assert first.wandb_id != other.wandb_id
    assert {wishes["id"] for wishes in wandb.inits} == {first.wandb_id, other.wandb_id}
    assert again.wandb_id == first.wandb_id
    assert Trackers(config("disabled"), tmp_path, "kept", True).wandb_id == "kept"
    assert Trackers(config("offline"), tmp_path, None, False).wandb_id is None


def test_what_the_configuration_leaves_open_is_taken_from_the_environment(wandb, tmp_path, monkeypatch):
    exported = {"MODE": "online", "PROJECT": "theirs", "RUN_ID": "id", "NAME": "named"}
    for name, value in exported.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for settings in (Config(), config("offline")):
        Trackers(settings, tmp_path, None, True).close(0)
    Trackers(Config(), tmp_path, "kept", True).close(0)
    for name in exported:
        monkeypatch.delenv(f"WANDB_{name}")
    Trackers(Config(), tmp_path, "own", True).close(0)
    found = [tuple(each[key] for key in ("mode", "project", "id", "name")) for each in wandb.inits]
    assert found == [
        ("online", "theirs", "id", "named"),
        ("offline", "project", "id", "named"),
        ("online", "theirs", "kept", "named"),
        ("offline", "llm_pretrain", "own", "pretrain"),
    ]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Trackers(Config(), tmp_path, None, True).close(0)
    assert len(wandb.inits) == len(found)


def test_only_the_enabled_process_tracks(wandb, tmp_path):
    for mode, enabled in (("disabled", True), ("offline", False), ("online", False)):
        tracked = Trackers(config(mode), tmp_path, None, enabled)
        tracked.log({"step": 1})
        tracked.close(0)
    assert wandb.inits == []


def test_a_failing_tracker_warns_once_and_is_dropped(wandb, tmp_path):
    wandb.broken = True
    warnings: list[str] = []
    tracked = Trackers(config("offline"), tmp_path, None, True, warn=warnings.append)
    for step in range(50):
        tracked.log({"step": step})
        time.sleep(0.002)
    tracked.close(0)
    tracked.log({"step": 51})
    tracked.close(0)
    assert wandb.attempts == 1
    assert len(warnings) == 1
    assert "RuntimeError: no more rows;" in warnings[0]


@pytest.mark.parametrize(
    ("mode", "fails_in", "tried", "said"),
    [
        ("online", ("online",), ["online", "offline"], ["no server"]),
        ("online", ("online", "offline"), ["online", "offline"], ["no server", "left out"]),
        ("offline", ("online", "offline"), ["offline"], ["left out"]),
    ],
)
def test_without_a_server_the_run_is_recorded_offline_or_not(wandb, tmp_path, mode, fails_in, tried, said):
    wandb.fails_in = fails_in
    warnings: list[str] = []
    tracked = Trackers(config(mode), tmp_path, None, True, warn=warnings.append)
    tracked.log({"step": 1})
    tracked.close(0)
    assert [wishes["mode"] for wishes in wandb.inits] == tried
    assert wandb.rows == ([] if said[-1] == "left out" else [{"step": 1}])
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


def test_a_tracker_that_hangs_is_dropped(wandb, tmp_path, monkeypatch):
    wandb.released.clear()
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    warnings: list[str] = []
    tracked = Trackers(config("offline"), tmp_path, None, True, warn=warnings.append)
    tracked.log({"step": 1})
    start = time.monotonic()
    tracked.close(0)
    assert time.monotonic() - start < 15, "the fake waits 20 s"
    assert len(warnings) == 1
    assert "to finish" in warnings[0]


def test_without_wandb_installed_a_run_goes_on(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracked = Trackers(config("offline"), tmp_path, None, True)
    tracked.log({"step": 1})
    tracked.close(0)
    assert len(caplog.records) == 1
    assert "wandb is left out" in caplog.text


@pytest.mark.slow
def test_offline_records_into_the_run_folder_and_prints_nothing(tmp_path):
    """With the real wandb; tests/faults has what may fail."""
    code = (
        "import sys; from pathlib import Path\n"
        "from llm_pretrain.config.loading import from_dict\n"
        "from llm_pretrain.tracking.trackers import Trackers\n"
        "config = from_dict({'logging': {'wandb_mode': 'offline'}})\n"
        "tracked = Trackers(config, Path(sys.argv[1]), None, True)\n"
        "for step in range(5):\n    tracked.log({'step': step, 'train/loss': 1.0})\n"
        "tracked.close(0); print(tracked.wandb_id)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clean | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{result.stdout.strip()}.wandb")
    assert file.read_bytes().count(b"train/loss") >= 5
