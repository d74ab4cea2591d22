"""The commands `report` and `top`, and the report that a run writes at its end."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launching import run_options, train
from support.run_folders import make_run, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.training.saving import CheckpointManager


def options(store: Path, folder: Path, *more: str) -> list[str]:
    return run_options(
        "tiny-moe",
        store,
        "training.max_steps=2 schedule.warmup_steps=1 checkpoint.save_steps=0 "
        "evaluation.max_batches=1 logging.report=true",
        *more,
        folder=folder,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", [training_row(1), training_row(2)])


def test_report_writes_the_page_into_the_run(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "<title>run – training report</title>" in (run / "report.html").read_text()


def test_report_of_several_runs_needs_an_output(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(run), str(run)]) == 2
    assert capsys.readouterr().err.startswith("llm-pretrain report: error: --output: expected a file")
    page = tmp_path / "new" / "both.html"
    assert main(["report", str(run), str(run), "--output", str(page)]) == 0
    assert "<title>2 runs – training report</title>" in page.read_text()


@pytest.mark.parametrize("command", ["report", "top"])
def test_a_wrong_folder_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([command, str(tmp_path / "missing")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing: expected a run's folder, such as runs/NAME" in line


def test_damaged_metrics_are_named_by_line(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    assert main(["report", str(run)]) == 74
    assert "metrics.jsonl:2: expected a JSON object" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_an_unwritable_output_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run), "--output", "/proc/report.html"]) == 73
    assert capsys.readouterr().err.startswith("llm-pretrain report: error: /proc/report.html: cannot be")


def test_only_a_page_is_replaced(run: Path, capsys: pytest.CaptureFixture[str]):
    """Twice into the same file, an empty file; not a run's own files."""
    page = run / "page.html"
    for before in (None, None, ""):
        if before is not None:
            page.write_text(before)
        assert main(["report", str(run), "--output", str(page)]) == 0
        assert '<meta name="generator" content="llm_pretrain' in page.read_text()
    (run / "link.html").symlink_to(page)
    for name in ("config.yaml", "metrics.jsonl", "link.html"):
        before = (run / name).read_bytes()
        assert main(["report", str(run), "--output", str(run / name)]) == 73
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{run / name}: expected a new file, or one that this program wrote" in line
        assert (run / name).read_bytes() == before
    assert (run / "link.html").is_symlink()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def enormous(file: Path) -> None:
    os.truncate(file, 1 << 40)  # without a block on the disk


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "config.yaml", "attempts.jsonl"])
@pytest.mark.parametrize("spoil", [fifo, endless, enormous])
def test_a_file_that_has_no_end_is_not_read(
    run: Path, name: str, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    """Neither waited for nor read into memory: one line, or a remark in the frame."""
    spoil(run / name)
    tracemalloc.start()
    assert main(["report", str(run), "--output", str(run / "page.html")]) == (
        74 if name == "metrics.jsonl" else 0
    )
    if not (name == "metrics.jsonl" and spoil is enormous):  # of which only the end is read
        assert main(["top", str(run), "--once"]) == 0
        assert f"{name} cannot be read" in capsys.readouterr().out
    assert main(["verify", str(run)]) != 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_top_shows_a_frame_into_a_pipe(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["top", str(run), "--once"]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["top", str(run), "--seconds", "nan"]) == 2
    assert "--seconds: expected a finite number, found nan" in capsys.readouterr().err


def test_a_run_writes_its_report_when_it_ends(plain_store: Path, tmp_path: Path):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder)) == 0
    page = (folder / "report.html").read_text()
    assert 'class="state finished"' in page
    assert "eval/bits_per_byte" in page
    assert main(["top", str(folder), "--once"]) == 0
    (folder / "report.html").unlink()
    assert train(*options(plain_store, folder, "--logging.report", "false")) == 0
    assert not (folder / "report.html").exists()


def test_a_report_that_fails_is_a_warning(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)
    assert train(*options(plain_store, folder)) == 0
    assert "warning: no report was written: " in capsys.readouterr().err


def test_a_run_that_fails_is_reported_as_failed(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    save = CheckpointManager.save

    def full_disk(self, progress, *, last=False):
        save(self, progress, last=last)
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(CheckpointManager, "save", full_disk)
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder)) == 74
    page = (folder / "report.html").read_text()
    assert 'class="state failed"' in page
    assert "No space left on device" in page
    assert "somewhere" in capsys.readouterr().err
