"""The commands `report` and `top`, and the report that a run writes at its end."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from support.launching import run_options, train
from support.run_folders import make_run, training_row

from llm_pretrain.__main__ import main
from llm_pretrain.training.saving import CheckpointManager


def options(store: Path, folder: Path) -> list[str]:
    settings = "training.max_steps=2 schedule.warmup_steps=1 checkpoint.save_steps=0 model.hidden_size=32 "
    return run_options(
        "tiny-moe", store, settings + "evaluation.max_batches=1 logging.report=true", folder=folder
    )


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run", [training_row(1), training_row(2)])


def test_report_writes_the_page_of_a_run_or_of_several(run, tmp_path, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "<title>run – training report</title>" in (run / "report.html").read_text()
    page = tmp_path / "new" / "both.html"
    assert main(["report", str(run), str(run), "--output", str(page)]) == 0
    assert "<title>2 runs – training report</title>" in page.read_text()


def test_only_a_page_is_replaced(run, capsys):
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


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("status.json", fifo),
        ("config.yaml", endless),
        ("attempts.jsonl", enormous),
        ("metrics.jsonl", enormous),
    ],
)
def test_a_file_that_has_no_end_is_not_read(run, name, spoil, capsys):
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


def test_a_run_writes_its_report_when_it_ends(plain_store, tmp_path):
    folder = tmp_path / "run"
    assert train(*options(plain_store, folder)) == 0
    page = (folder / "report.html").read_text()
    assert 'class="state finished"' in page
    assert "eval/bits_per_byte" in page
    assert main(["top", str(folder), "--once"]) == 0


def test_a_report_that_fails_is_a_warning(plain_store, tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)
    assert train(*options(plain_store, folder)) == 0
    assert "warning: no report was written: " in capsys.readouterr().err


def test_a_run_that_fails_is_reported_as_failed(plain_store, tmp_path, monkeypatch, capsys):
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
