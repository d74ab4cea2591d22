"""Every kind of record is read as documented; every bad one is named by file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llm_pretrain.data import inputs
from llm_pretrain.data.documents import RecordError, parse_record
from llm_pretrain.data.inputs import find_sources
from llm_pretrain.data.readers import batch_records, read_records
from llm_pretrain.errors import DataError


def parse_line(folder: Path, line: bytes):
    file = folder / "corpus.jsonl"
    file.write_bytes(b'{"text": "sound"}\n' + line)
    *_, record = read_records([str(file)])
    return parse_record(record)


def test_records_become_segments_and_token_documents(tmp_path: Path):
    assert parse_line(tmp_path, b'{"text": "a"}').segments == (("a", True),)
    pair = parse_line(tmp_path, b'{"prompt": "p", "completion": "c"}')
    assert pair.segments == (("p", False), ("c", True))
    null = parse_line(tmp_path, b'{"segments": [{"text": "a", "loss": false}, {"text": "b", "loss": null}]}')
    assert null.segments == (("a", False), ("b", True))
    tokens = parse_line(tmp_path, b'{"input_ids": [5, 6], "loss_mask": [0, 1]}')
    assert (tokens.input_ids, tokens.loss_mask) == ([5, 6], [0, 1])
    assert parse_line(tmp_path, b'{"input_ids": [5, 6]}').loss_mask == [1, 1]
    padded = parse_line(tmp_path, b'{"input_ids": [0, 5, 6, 0, 0], "attention_mask": [0, 1, 1, 0, 0]}')
    assert (padded.input_ids, padded.loss_mask) == ([5, 6], [1, 1])


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"text": "cut in ha', "invalid JSON"),
        (b'{"text": "\xff\xfe"}', "invalid UTF-8"),
        (b'{"text": "\\ud800"}', "invalid UTF-8"),
        (b'{"title": "no text"}', "no text"),
        (b'{"prompt": "no completion"}', "no text"),
        (b'{"text": null}', "wrong type"),
        (b'{"text": ["a"]}', "wrong type"),
        (b'"a string"', "wrong type"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"prompt": "p", "completion": 3}', "wrong type"),
        (b'{"input_ids": [1.5]}', "wrong type"),
        (b'{"input_ids": [true]}', "wrong type"),
        (b'{"input_ids": [1], "loss_mask": [2]}', "wrong type"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "wrong length"),
        (b'{"input_ids": [1], "attention_mask": [2]}', "wrong type"),
        (b'{"input_ids": [1, 2], "attention_mask": [1]}', "wrong length"),
        (b'{"text": ""}', "empty document"),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "' + b"[" * 100_000 + b'"}',
            "wrong type",
        ),
    ],
)
def test_a_bad_record_is_named_by_cause_file_and_line(tmp_path: Path, line: bytes, cause: str):
    with pytest.raises(RecordError, match=r"corpus\.jsonl:2: ") as caught:
        parse_line(tmp_path, line)
    assert caught.value.cause == cause
    assert "\n" not in str(caught.value)


def test_a_text_file_is_one_document_to_the_last_byte(tmp_path: Path):
    text = "\ufeff a\r\n\n\tb \x01 \n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (record,) = read_records([str(tmp_path / "a.txt")])
    assert parse_record(record).segments == ((text, True),)


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a/b.jsonl", ".hidden/c.txt", "a/.d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    found = [Path(source.name).relative_to(tmp_path).as_posix() for source in find_sources([str(tmp_path)])]
    assert found == ["a/b.jsonl", "a/z.txt", "b.txt"]


def test_blank_lines_count_as_lines_but_not_as_records(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}\n\n')
    assert [record.line for record in read_records([str(tmp_path / "a.jsonl")])] == [2, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.jsonl", "found no such path"), ("a.zip", "unpack"), ("empty", "none in it")],
)
def test_inputs_that_cannot_be_read_are_refused(tmp_path: Path, name: str, message: str):
    (tmp_path / "a.zip").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_sources([str(tmp_path / name)])


def test_the_standard_library_is_found_without_walking_excluded_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Beside it lie the installed packages, which may be many times as many files."""
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(inputs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    scandir, seen = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(Path(path).name) or scandir(path))
    assert [source.name for source in find_sources(["stdlib"])] == ["a.py", "b/c.py"]
    assert seen == [tmp_path.name, "b"]


def test_the_standard_library_is_sorted_and_without_tests():
    names = [source.name for source in find_sources(["stdlib"])]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not [
        name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))
    ]


def test_batches_hold_all_records_in_order(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(50)))
    records = list(read_records([str(tmp_path / "a.jsonl")]))
    batches = list(batch_records(iter(records), 100))
    assert len(batches) > 5
    assert [record for batch in batches for record in batch] == records
