"""Hub data sets are streamed by `datasets`; missing parts and a missing network are one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from support.corpora import make_texts, make_tokenizer

from llm_pretrain.data import preparation as prepare_module
from llm_pretrain.data.documents import parse_record
from llm_pretrain.data.inputs import TIMEOUT_SECONDS, HubSet, hub_revision, parse_hub_name
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.readers import read_records
from llm_pretrain.errors import DataError

TEXTS = make_texts(700)


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's `owner/set`, with the config `more`, as a folder that `datasets` opens as it does a hub's."""
    import datasets  # a second and a half, which no other test's process needs

    folder = tmp_path / "set"
    for config, texts in (("plain", TEXTS), ("more", TEXTS[:9])):
        rows = {"text": texts, "score": [0.5] * len(texts)}
        for split, part in (("train", rows), ("test", {name: values[:5] for name, values in rows.items()})):
            file = folder / config / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_dict(part).to_parquet(str(file))
    configs = [
        {
            "config_name": name,
            "data_files": [{"split": s, "path": f"{name}/{s}-*"} for s in ("train", "test")],
        }
        for name in ("plain", "more")
    ]
    configs[0]["default"] = True
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")

    def load(name: str, *arguments: Any, revision: str, **options: Any) -> Any:
        assert (name, revision, options["streaming"]) == ("owner/set", "c0ffee", True)
        return load_dataset(str(folder), *arguments, **options)

    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, **options: SimpleNamespace(sha="c0ffee")
    )
    hub_revision.cache_clear()
    yield folder
    hub_revision.cache_clear()


def texts_of(name: str) -> list[str]:
    return [parse_record(record).text() for record in read_records([name])]


def test_hub_names_are_parsed():
    assert parse_hub_name("hf://a/b") == HubSet("a/b", None, None, "train")
    assert parse_hub_name("hf://a/b:test") == HubSet("a/b", None, None, "test")
    full = "hf://a-1/b.c@refs%2Fpr%2F1/20231101.en:train"
    assert parse_hub_name(full) == HubSet("a-1/b.c", "refs/pr/1", "20231101.en", "train")
    for wrong in ("hf://a", "hf://a/b/c/d", "hf://", "hf://a/b:", "hf://a/b:train:x"):
        with pytest.raises(DataError, match="hf://OWNER/NAME"):
            parse_hub_name(wrong)


def test_rows_are_streamed_in_order(local_hub: Path):
    assert texts_of("hf://owner/set") == TEXTS
    assert texts_of("hf://owner/set:test") == TEXTS[:5]
    assert texts_of("hf://owner/set@main/more") == TEXTS[:9]
    (record,) = (r for r in read_records(["hf://owner/set"]) if r.line == 300)
    assert record.location == "hf://owner/set:300"
    assert record.data.decode() == TEXTS[299]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf://owner/set:validation", "split validation"),
        ("hf://owner/set/none", "split train of config none"),
    ],
)
def test_a_part_that_does_not_exist_is_one_line(local_hub: Path, name: str, expected: str):
    with pytest.raises(DataError, match=f"{name}: expected {expected}") as caught:
        texts_of(name)
    assert "\n" not in str(caught.value)


def test_a_preparation_resumes_after_a_broken_connection(
    local_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 5000)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    whole = prepare_store(Preparation(["hf://owner/set"], tokenizer, tmp_path / "whole", workers=1))
    preparation = Preparation(
        ["hf://owner/set"], tokenizer, tmp_path / "store", workers=1, commit_seconds=0.0
    )
    import datasets

    original = datasets.IterableDataset.iter

    def breaking(self: Any, batch_size: int) -> Iterator[Any]:
        yield next(original(self, batch_size))
        raise ConnectionError("the other side\nhung up")

    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "iter", breaking)
        with pytest.raises(DataError, match="the other side hung up; start again to continue"):
            prepare_store(preparation)
    notices: list[str] = []
    store = prepare_store(replace(preparation, notice=notices.append))
    assert len(notices) == 1
    assert (store.facts["inputs"], sum(store.facts["input_documents"])) == (["hf://owner/set"], len(TEXTS))
    assert (store.path / "store.json").read_bytes() == (whole.path / "store.json").read_bytes()


def test_a_missing_network_is_reported_in_one_line_within_the_timeout(tmp_path: Path):
    """In a process of its own: the libraries read the address of the hub when they are imported."""
    endpoint = "http://127.0.0.1:9"
    command = [
        *(sys.executable, "-m", "llm_pretrain", "prepare", "--input", "hf://owner/set:train"),
        *("--tokenizer", str(make_tokenizer(tmp_path / "tokenizer")), "--output", str(tmp_path / "store")),
    ]
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 65
    (line,) = done.stderr.splitlines()
    for part in ("hf://owner/set:train", endpoint, f"within {TIMEOUT_SECONDS:.0f} s", "their folder"):
        assert part in line
    assert not (tmp_path / "store").exists()
