"""Every input format gives the same documents; damage is named by file and place, or counted."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from support.corpora import make_texts, write_jsonl
from support.table_files import arrow, delimited, parquet

from llm_pretrain.data import readers, tables
from llm_pretrain.data.documents import Document, RecordError, parse_record
from llm_pretrain.data.inputs import STDLIB_CHAT, find_sources
from llm_pretrain.data.readers import batch_records, conversations, read_records, read_sources
from llm_pretrain.errors import DataError, ResourceError

TEXTS = [*make_texts(40), 'quotes "", commas, and\nlines\r\n', "tab\there", " spaces "]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def as_table(texts: list[str], column: str = "text") -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(texts))), column: texts})


def as_rows(texts: list[str], column: str = "text") -> list[list]:
    return [["id", column], *([index, text] for index, text in enumerate(texts))]


def feather(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.feather.write_feather(table, sink)
    return sink.getvalue().to_pybytes()


LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = as_table(TEXTS)
BYTES = [text.encode() for text in TEXTS]
DICTIONARY = pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
FORMATS = {
    "lines.jsonl": LINES,
    "lines.ndjson": b"\xef\xbb\xbf" + LINES,
    "lines.json": LINES,
    "array.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "comma.csv": delimited(as_rows(TEXTS)),
    "tab.tsv": delimited(as_rows(TEXTS), "\t"),
    "groups.parquet": parquet(TABLE, row_group_size=7),
    "plain.parquet": parquet(as_table(TEXTS), compression="none", use_dictionary=False),
    "large.parquet": parquet(pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.large_string())})),
    "dictionary.parquet": parquet(DICTIONARY),
    "bytes.parquet": parquet(pyarrow.table({"text": pyarrow.array(BYTES, pyarrow.binary())})),
    "large bytes.parquet": parquet(pyarrow.table({"text": pyarrow.array(BYTES, pyarrow.large_binary())})),
    "stream.arrow": arrow(TABLE, stream=True),
    "file.arrow": arrow(TABLE, stream=False),
    "dictionary.arrow": arrow(DICTIONARY, stream=True),
    "view.arrow": arrow(pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.string_view())}), stream=True),
}


def documents(*inputs: Path, text_column: str = "text") -> list[Document]:
    names = [str(path) for path in inputs]
    return [parse_record(record, text_column) for record in read_records(names, text_column=text_column)]


def texts_of(*inputs: Path, **options) -> list[str]:
    return [document.text() for document in documents(*inputs, **options)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_texts_at_rising_places(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FORMATS[name])
    assert texts_of(tmp_path / name) == TEXTS
    places = [(record.source, record.line) for record in read_records([str(tmp_path / name)])]
    assert all(before < after for before, after in pairwise(places))


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("name", ["lines.jsonl", "array.json", "tab.tsv"])
def test_compressed_files_are_read_as_what_is_in_them(tmp_path: Path, name: str, suffix: str):
    whole = COMPRESS[suffix](FORMATS[name])
    halves = [COMPRESS[suffix](part) for part in (FORMATS[name][:100], FORMATS[name][100:])]
    for compressed in (whole, b"".join(halves)):  # `cat a.gz b.gz > c.gz` is a file like any other
        (tmp_path / (name + suffix)).write_bytes(compressed)
        assert texts_of(tmp_path / (name + suffix)) == TEXTS
    (tmp_path / f"a.md{suffix}").write_bytes(COMPRESS[suffix](b"# one\ndocument\n"))
    assert texts_of(tmp_path / f"a.md{suffix}") == ["# one\ndocument\n"]


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
def test_what_follows_a_compressed_stream_is_read_or_damage(tmp_path: Path, suffix: str):
    """Programs that compress in parallel, and `cat`, write several streams; Python's readers stop at one
    that does not begin as such."""
    file, (one, two) = tmp_path / f"a.txt{suffix}", (COMPRESS[suffix](text) for text in (b"one", b"two"))
    file.write_bytes(one + b"X" + two[1:])
    *_, last = read_records([str(file)])
    with pytest.raises(RecordError, match=rf"a\.txt{suffix}.*truncated or damaged file: "):
        parse_record(last)
    if suffix in (".gz", ".xz"):  # whose formats allow padding
        file.write_bytes(one + b"\0" * 8 + two + b"\0" * 4)
        assert texts_of(file) == ["onetwo"]


@pytest.mark.parametrize("name", ["groups.parquet", "stream.arrow", "file.arrow"])
def test_a_truncated_table_is_named(tmp_path: Path, name: str):
    for length in (0, 3, 10, len(FORMATS[name]) // 2, len(FORMATS[name]) - 5):
        (tmp_path / name).write_bytes(FORMATS[name][:length])
        *sound, last = read_records([str(tmp_path / name)])
        assert [parse_record(record).text() for record in sound] == TEXTS[: len(sound)]
        with pytest.raises(RecordError, match=rf"{name}[:\d]*: truncated or damaged file: "):
            parse_record(last)


CONTENT = as_table(TEXTS, "content")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", delimited(as_rows(TEXTS, "content"))),
        ("a.parquet", parquet(CONTENT)),
        ("a.arrow", arrow(CONTENT, stream=True)),
    ],
)
def test_another_column_is_asked_for_by_name(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: expected .*found id, content; .*--text_column"):
        documents(tmp_path / name)
    assert texts_of(tmp_path / name, text_column="content") == TEXTS


def test_a_separator_cuts_text_files_also_between_two_reads(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(readers, "RECORD_BYTES", 40)
    texts = ["one\n two", "three", "x" * 90, "a\0b", "four"]
    (tmp_path / "a.txt").write_text("\n<|end|>\n".join(["", *texts, ""]))
    (source,) = find_sources([str(tmp_path / "a.txt")])
    for size in (1, 5, 1000):
        monkeypatch.setattr(readers, "_CHUNK", size)
        records = list(read_sources([replace(source, separator="<|end|>")]))
        assert [record.line for record in records] == [1, 2, 3, 4, 5]
        assert [r.data.decode() for r in records if r.kind == "text"] == ["one\n two", "three", "four"]
        causes = [r.data.decode().split("\n")[0] for r in records if r.kind == "bad"]
        assert causes == ["record too large", "NUL byte"]
        after = list(read_sources([replace(source, separator="<|end|>")], after=(0, 2)))
        assert after == records[2:]


def test_columns_that_are_no_text_make_the_same_records_as_lines(tmp_path: Path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    records = {
        "messages": [{"messages": chat, "id": 1}],
        "segments": [{"segments": [{"text": "a", "loss": False}, {"text": "b"}]}],
        "ids": [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}],
        "pair": [{"prompt": "p", "completion": "c"}],
        "padded": [{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}],
        "calls": [{"messages": chat, "tools": [{"name": "a", "arguments": {name: 1}}]} for name in "xy"],
    }
    for name, rows in records.items():
        lines = documents(write_jsonl(tmp_path / f"{name}.jsonl", rows))
        (tmp_path / f"{name}.parquet").write_bytes(parquet(pyarrow.Table.from_pylist(rows)))
        for line, row in zip(lines, documents(tmp_path / f"{name}.parquet"), strict=True):
            for field in ("segments", "input_ids", "loss_mask", "messages", "tools"):
                assert getattr(line, field) == getattr(row, field)


def test_an_open_quote_reads_no_more_than_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "RECORD_BYTES", 200)
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2,"open' + b"x,y\r\n" * 50 + b"3,three\n")
    records = list(read_records([str(tmp_path / "a.csv")]))
    assert (records[0].data, records[-1].data) == (b"one", b"three")
    assert any(b"field larger than field limit (200)" in record.data for record in records)


def test_an_array_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "_ARRAY_CHARACTERS", 30)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}]))
    assert texts_of(tmp_path / "a.json") == ["one"]
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}] * 3))
    with pytest.raises(RecordError, match=r"a\.json:1: record too large: expected an array of at most 30"):
        documents(tmp_path / "a.json")


@pytest.mark.parametrize("blank", ["\r\n", "\n\n\n"])
def test_blank_lines_before_the_first_row_lose_nothing(tmp_path: Path, blank: str):
    lines = '{"text": "one"}\n\n{"text": "two"}\n'
    for name, content in {"a.csv": "text\none\n\ntwo\n", "a.json": lines, "a.jsonl": lines}.items():
        (tmp_path / name).write_bytes((blank + content).encode())
        assert texts_of(tmp_path / name) == ["one", "two"]
        (record, *_) = read_records([str(tmp_path / name)])
        assert record.line == (blank + content[: content.index("one")]).count("\n") + 1
    (tmp_path / "a.csv").write_bytes(blank.encode())
    assert texts_of(tmp_path / "a.csv") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'"text"x,b\n1,2\n', "a.csv: expected the names of the columns first"),
        ("a.csv", b"text,text\n1,2\n", "a.csv: expected one column text, found 2"),
        ("a.csv", b'0,"a text\nwithout a header"\n', "found 0, a text without a header; name"),
        (
            "a.parquet",
            parquet(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])),
            "a.parquet: expected one column text, found 2",
        ),
    ],
)
def test_a_table_without_clear_names_is_refused(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / name)


def test_one_record_over_several_lines_is_a_json_file_too(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=2))
    assert texts_of(tmp_path / "a.json") == ["one"]
    (tmp_path / "b.json").write_text(" [ ] ")
    assert texts_of(tmp_path / "b.json") == []


def test_patterns_folders_and_files_come_in_the_order_given(tmp_path: Path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a/z.txt", "c.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    inputs = [str(tmp_path / "b" / "*.jsonl"), str(tmp_path / "c.jsonl"), str(tmp_path / "a")]
    sources = find_sources(inputs)
    found = [
        (source.path.relative_to(tmp_path).as_posix(), source.entry) for source in sources if source.path
    ]
    assert found == [("b/1.jsonl", 0), ("b/2.jsonl", 0), ("c.jsonl", 1), ("a/z.txt", 2)]
    with pytest.raises(DataError, match="pattern"):
        find_sources([str(tmp_path / "*.parquet")])
    with pytest.raises(DataError, match="written hf://owner/name"):
        find_sources(["owner/name"])
    for address in ("s3://bucket/*.jsonl", "https://huggingface.co/datasets/owner/name?x=1"):
        with pytest.raises(DataError, match=r"expected a path, found an address \((s3|https)://\); copy"):
            find_sources([address])


def test_of_saved_splits_only_train_or_the_chosen_one_is_read(tmp_path: Path):
    import datasets

    def save(folder: Path, **splits: list[str]) -> None:
        parts = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
        datasets.DatasetDict(parts).save_to_disk(str(folder))

    save(tmp_path / "saved", train=TEXTS, test=["held out"])
    assert texts_of(tmp_path / "saved") == TEXTS
    assert texts_of(tmp_path / "saved" / "test") == ["held out"]
    assert texts_of(tmp_path) == texts_of(tmp_path / "save*") == TEXTS  # also in a folder, and by a pattern
    save(tmp_path / "other", dev=TEXTS, test=["held out"])
    with pytest.raises(DataError, match="expected a split train, found dev, test; name the file or folder"):
        texts_of(tmp_path / "other")
    [chosen] = find_sources([str(tmp_path / "saved")], "test")
    assert chosen.path is not None
    assert chosen.path.parent == tmp_path / "saved" / "test"
    assert [source.name for source in find_sources(["hf://a/b", "hf://a/b:dev"], "test")] == [
        "hf://a/b:test",
        "hf://a/b:dev",
    ]
    with pytest.raises(DataError, match="--split: expected an input with a split test"):
        find_sources([str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])), "hf://a/b:dev"], "test")


LAYOUTS = {
    "hub": ["data/train-00000-of-00001-0123456789abcdef.jsonl", "data/validation-00000-of-00001.jsonl"],
    "files": ["train.jsonl.gz", "val.csv"],
    "named": ["wiki-train.jsonl", "wiki-valid.jsonl"],
    "wikitext": ["wiki.train.raw", "wiki.valid.raw"],
    "training": ["training.jsonl", "validation.jsonl"],
    "folders": ["train/a/part-0.jsonl", "dev/b.jsonl"],
    "capitals": ["train.jsonl", "Val.jsonl"],
    "parts": ["train_part1.txt", "dev0.txt"],
    "c4": ["c4-train.00000-of-00512-30K.json", "c4-validation.00001-of-00008.json"],
    "language": ["train.en.jsonl.gz", "holdout-validation.en.jsonl.gz"],
    "chat": ["train_sft-00000-of-00003.jsonl", "valid_sft-00000-of-00001.jsonl"],
    "split folders": ["train_split/a/part-0.jsonl", "validation_split/b.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_folder_with_splits_only_train_is_trained_on(tmp_path: Path, layout: str):
    train, validation = LAYOUTS[layout]
    test, other = train.replace("train", "test"), "notes/test.txt"
    for name in (train, validation, test, other, "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(split: str | None, *, validation: bool = False) -> list[str]:
        found = [each for each in find_sources([str(tmp_path)], split, (), lines.append) if each.path]
        return [Path(s.name).relative_to(tmp_path).as_posix() for s in found if s.validation == validation]

    lines: list[str] = []
    assert names(None) == sorted([other, train])
    assert f"read train and validation, left out README.md, {test.split('/a/')[0]}; see --split" in lines[0]
    assert names(None, validation=True) == [validation]
    assert names("test") == sorted([other, test])
    assert names("validation") == sorted([other, validation])
    assert set(names("all")) == {train, validation, test, other, "README.md"}
    (tmp_path / validation).unlink()
    with pytest.raises(DataError, match="expected a split validation, found "):
        find_sources([str(tmp_path / other)], None, [str(tmp_path)])


def test_validation_inputs_that_leave_nothing_to_train_on_are_refused(tmp_path: Path):
    file = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))
    with pytest.raises(DataError, match="expected other files than those for validation, found none"):
        find_sources([file], None, [file])


@pytest.mark.parametrize(
    "names",
    [
        ["a.md", "test.txt"],
        ["a.txt", "train.txt"],
        ["test.py", "train.py"],
        ["b.py", "test/a.py", "train/a.py"],
        ["b.c", "test/Makefile", "train/Makefile"],
        ["a1.txt", "a2.txt", "a3.txt", "blood-test.txt", "night-train.txt"],
        ["how-to-train-dogs.txt", "test-kitchen.txt", "trained.txt"],
        ["test.js", "train.md", "train.rs"],
    ],
)
def test_documents_that_are_named_like_a_split_are_read(tmp_path: Path, names: list[str]):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [Path(source.name).relative_to(tmp_path).as_posix() for source in find_sources([str(tmp_path)])]
    assert found == names


@pytest.mark.parametrize("name", ["a.jl", "a.jsonlines", "part-00000", "a.jsonl.1", "part-00000.gz", "a.txt"])
def test_json_is_never_text(tmp_path: Path, name: str):
    compress = COMPRESS.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(LINES))
    assert texts_of(tmp_path / name) == TEXTS
    with_separator = [replace(source, separator="<|end|>") for source in find_sources([str(tmp_path / name)])]
    assert {record.kind for record in read_sources(with_separator)} == {"json"}
    (tmp_path / name).write_bytes(compress(b'\n{"text": "cut\n{"text": "too\n{"text": "whole"}\n'))
    with pytest.raises(RecordError, match=":2: invalid JSON"):
        documents(tmp_path / name)


@pytest.mark.parametrize("name", ["part-00000", "a.jsonl.1", "a.ldjson", "a.txt"])
def test_json_lines_with_the_text_in_another_field_are_read_by_its_name(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(LINES.replace(b'"text"', b'"content"'))
    with pytest.raises(RecordError, match=":1: no text"):
        documents(tmp_path / name)
    read = documents(tmp_path / name, text_column="content")
    assert ["".join(text for text, _ in each.segments) for each in read] == TEXTS


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["train-00000-of-00001.jsonl", "validation_matched-00000-of-00001.jsonl", "test_mismatched-0.jsonl"],
         {"train-00000-of-00001.jsonl": False, "validation_matched-00000-of-00001.jsonl": True}),
        (["train.jsonl", "test_easy.jsonl", "test_hard.jsonl"], {"train.jsonl": False}),
        (["train-clean-100/a.txt", "train-other-500/a.txt", "dev-clean/a.txt", "test-other/a.txt"],
         {"train-clean-100/a.txt": False, "train-other-500/a.txt": False, "dev-clean/a.txt": True}),
    ],
)  # fmt: skip
def test_splits_may_have_names_of_their_own(tmp_path: Path, names: list[str], read: dict[str, bool]):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    found = find_sources([str(tmp_path)])
    assert {Path(each.name).relative_to(tmp_path).as_posix(): each.validation for each in found} == read


def test_a_folder_of_the_hubs_cache_is_its_newest_snapshot(tmp_path: Path):
    cache = tmp_path / "datasets--owner--name"
    for folder in ("blobs", "refs", "snapshots/1a2b", "snapshots/old"):
        (cache / folder).mkdir(parents=True)
    (cache / "refs/main").write_text("1a2b")
    for blob, name in (("aa", "train.jsonl"), ("bb", "test.jsonl")):
        (cache / "blobs" / blob).write_text("{}\n")
        (cache / "snapshots/1a2b" / name).symlink_to(f"../../blobs/{blob}")
    (source,) = find_sources([str(cache)])
    assert source.name == str(cache / "snapshots/1a2b/train.jsonl")
    assert source.fault is None


def test_prose_that_begins_like_json_is_text(tmp_path: Path):
    for text in ("{ a brace }\nand\n", "[1] a note\n", '{\n "cells": []\n}\n', '{"type": "Feature"}\n'):
        (tmp_path / "a.txt").write_text(text)
        assert texts_of(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_utf16_is_named(tmp_path: Path, encoding: str, name: str):
    (tmp_path / name).write_text('{"text": "a"}\n', encoding=encoding)
    with pytest.raises(RecordError, match="found UTF-16; convert it: iconv"):
        documents(tmp_path / name)


def test_a_linked_folder_is_followed_once(tmp_path: Path):
    for name in ("corpus/a/1.txt", "elsewhere/2.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    links = {"a/up": "..", "above": "../..", "more": "../elsewhere", "twice": "../elsewhere"}
    for link, target in links.items():
        (tmp_path / "corpus" / link).symlink_to(target)
    found = [Path(source.name).name for source in find_sources([str(tmp_path / "corpus")])]
    assert found == ["1.txt", "2.txt"]


def test_of_a_saved_data_set_only_its_own_files_are_read(tmp_path: Path):
    """`datasets` keeps results of `map` and `shuffle` in the same folder, and files of an earlier save."""
    import datasets

    folder = str(tmp_path / "saved")
    datasets.Dataset.from_dict({"text": ["old"] * 6}).save_to_disk(folder, num_shards=3)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder, num_shards=1)
    saved = datasets.load_from_disk(folder)
    saved.map(lambda row: {"text": row["text"].upper()}).shuffle(seed=1)
    assert len(list((tmp_path / "saved").glob("*.arrow"))) > 4
    assert texts_of(tmp_path / "saved") == texts_of(tmp_path) == TEXTS


def test_reading_begins_after_any_record(tmp_path: Path):
    for name in ("lines.jsonl", "comma.csv", "groups.parquet", "array.json"):
        (tmp_path / name).write_bytes(FORMATS[name])
    (tmp_path / "text.txt").write_text("text")
    records = list(read_records([str(tmp_path)]))
    for index in range(0, len(records), 9):
        after = (records[index].source, records[index].line)
        assert list(read_sources(find_sources([str(tmp_path)]), after=after)) == records[index + 1 :]


PREFIXES = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "compression": "zstd"}


def categories(table: pyarrow.Table) -> pyarrow.Table:
    return pyarrow.table({"text": table["text"].dictionary_encode()})


def test_a_large_row_group_is_not_held_whole(tmp_path: Path):
    """Reading takes pages; what pyarrow holds at once stays far below the file's one group of rows."""
    texts = [f"{index:07} " + "x" * 8000 for index in range(8000)]
    data = parquet(as_table(texts), compression="none", use_dictionary=False)
    (tmp_path / "a.parquet").write_bytes(data)
    del texts
    before, peak = pyarrow.total_allocated_bytes(), 0
    for _ in read_records([str(tmp_path / "a.parquet")]):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert len(data) > 60_000_000
    assert peak < 40_000_000


WRITERS: dict[str, Callable[[pyarrow.Table], bytes]] = {
    "prefixes.parquet": lambda table: parquet(table, **PREFIXES),
    "categories.feather": lambda table: feather(categories(table)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_repeated_documents_are_not_held_at_once(tmp_path: Path, name: str):
    """Encodings store them once, so that a small file has any number of bytes."""
    content = WRITERS[name](pyarrow.table({"text": ["x" * 100_000] * 600}))
    assert len(content) < 1_000_000
    (tmp_path / name).write_bytes(content)
    before, peak = pyarrow.total_allocated_bytes(), 0
    tracemalloc.start()
    for _ in islice(read_records([str(tmp_path / name)]), 20):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    held = peak + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 20_000_000


def test_a_table_for_which_memory_is_too_small_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a damaged one it would be left out with `--on_error skip`."""

    def exhausted(*_: object) -> None:
        raise pyarrow.lib.ArrowMemoryError("realloc of size 4096000000 failed")

    (tmp_path / "a.parquet").write_bytes(parquet(TABLE))
    monkeypatch.setattr(tables, "_rows", exhausted)
    with pytest.raises(ResourceError, match=r"a\.parquet: expected memory .* row 0, .* of size 4096000000"):
        documents(tmp_path / "a.parquet")


def parse_line(folder: Path, line: bytes):
    (folder / "corpus.jsonl").write_bytes(line)
    (document,) = documents(folder / "corpus.jsonl")
    return document


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


SOURCE = '''
"""A module."""

def shout(text: str, *, times: int = 1) -> str:
    """Say it loudly.

    More of this is not asked for.
    """

def silent(): ...

def _private():
    """Nobody asks."""

class Horn(Base):
    """Makes noise."""

    async def blow(self, *notes):
        """Blow
        once."""
'''


def talk(path: Path, name: str = "sound/__init__.py") -> list[list[str]]:
    records = [json.loads(data) for _, data in conversations(name, path)]
    assert all([m["role"] for m in r["messages"]] == ["user", "assistant"] * 2 for r in records)
    return [[message["content"] for message in record["messages"]] for record in records]


def test_every_documented_public_definition_becomes_a_conversation(tmp_path: Path):
    file = tmp_path / "sound.py"
    file.write_text(SOURCE)
    assert talk(file) == [
        [
            "What does the function `sound.shout` do?",
            "Say it loudly.",
            "How is it written?",
            "`def shout(text: str, *, times: int=1)`",
        ],
        ["What does the class `sound.Horn` do?", "Makes noise.", "How is it written?", "`class Horn(Base)`"],
        [
            "What does the function `sound.Horn.blow` do?",
            "Blow once.",
            "How is it written?",
            "`async def blow(self, *notes)`",
        ],
    ]


def test_a_link_inside_the_standard_library_is_not_read_again(tmp_path: Path, monkeypatch):
    """As Debian's `_sysconfigdata__linux_x86_64-linux-gnu.py` is one."""
    (tmp_path / "b.py").write_text("first = 1\n")
    (tmp_path / "a.py").symlink_to("b.py")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    (record,) = read_records(["stdlib"])
    assert (record.name, parse_record(record).text()) == ("a.py", "first = 1\n")


def test_the_input_yields_conversations_with_ascending_lines():
    lines: dict[str, int] = {}
    for record in islice(read_records([STDLIB_CHAT]), 300):
        assert parse_record(record).messages is not None
        assert record.line > lines.get(record.name, 0)
        lines[record.name] = record.line
    assert len(lines) > 1
