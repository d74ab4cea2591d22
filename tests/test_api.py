"""The API does what docs/api.md says, in one process and launched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT

import llm_pretrain as lp
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.errors import ConfigError, PretrainError


def test_the_document_can_be_followed(plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data" / "stores").mkdir(parents=True)
    (tmp_path / "data" / "stores" / "mine").symlink_to(plain_store)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "api.md").read_text(), re.M | re.S)
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert len(blocks) == 4
    run, losses = names["run"], names["losses"]
    assert run.state == "finished"
    assert list(run.checkpoints) == [20]
    trained = [loss for loss in losses if loss is not None]
    assert [row["train/loss"] for row in run.rows if row.get("train/loss")] == trained
    assert run.columns["train/loss"][-1] == trained[-1]
    assert names["text"].startswith("The ")
    assert names["micro_batches"][0].step == 7
    assert open_tokenizer(run.path / "weights" / "best").decode(names["ids"]) == "some text"


def test_settings_may_be_any_text_and_paths():
    prompts = ["def ", "a \N{SNAKE} 'quoted': {it}"]
    config = lp.load_config(
        "tiny-moe", data={"sources": [{"store": Path("a/b")}]}, evaluation={"sample_prompts": prompts}
    )
    assert config.data.sources[0].store == "a/b"
    assert config.evaluation.sample_prompts == prompts
    with pytest.raises(ConfigError, match="training: expected a section with its fields, found 3"):
        lp.load_config("tiny-moe", training=3)  # pyright: ignore[reportArgumentType]  # the mistake


def test_mistakes_are_one_error(plain_store: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"training\.max_step: no such setting; did you mean training"):
        lp.load_config("tiny-moe", training={"max_step": 3})
    config = lp.load_config("tiny-moe", run={"output_dir": str(tmp_path / "run")}, data={"sources": []})
    with pytest.raises(ConfigError, match=r"data\.sources"):
        lp.train(config)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lp.trian  # noqa: B018
    with pytest.raises(ConfigError, match="expected a run's folder"):
        lp.open_run(tmp_path)


def test_the_package_is_imported_without_its_libraries():
    code = "import sys, llm_pretrain; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_launched_run_gives_its_rows_and_its_error(plain_store: Path, tmp_path: Path, launcher: str):
    def config(folder: Path, store: Path = plain_store):
        return lp.load_config(
            "tiny-dense",
            data={"sources": [{"store": str(store)}]},
            run={"output_dir": str(folder)},
            training={"max_steps": 6},
            schedule={"warmup_steps": 2},
            logging={"logging_steps": 1, "wandb_mode": "disabled"},
        )

    rows: list = []
    run = lp.train(config(tmp_path / "run"), on_row=rows.append, nproc=2, launcher=launcher)
    assert rows == run.rows
    assert [row["step"] for row in rows][-1] == 6
    with pytest.raises(PretrainError, match="other: the run ended with exit code 65: ") as caught:
        lp.train(config(tmp_path / "other", tmp_path / "none"), nproc=2, launcher=launcher)
    assert caught.value.exit_code == 65


@pytest.mark.slow
def test_an_error_of_on_row_ends_the_launched_run_with_a_save(plain_store: Path, tmp_path: Path):
    config = lp.load_config(
        "tiny-dense",
        data={"sources": [{"store": str(plain_store)}]},
        run={"output_dir": tmp_path / "run"},
        training={"max_steps": 100000},
        logging={"logging_steps": 1, "wandb_mode": "disabled"},
    )

    def fail(row: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lp.train(config, on_row=fail, nproc=2)
    run = lp.open_run(tmp_path / "run")
    assert run.state == "preempted"
    assert run.checkpoints
