"""Every input format gives the same documents; damage is named by file and place, or counted."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from support.corpora import make_texts, make_tokenizer, write_jsonl

from llm_pretrain.data import readers, tables
from llm_pretrain.data.documents import Document, RawRecord, RecordError, parse_record
from llm_pretrain.data.inputs import COMPRESSIONS, find_sources
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.readers import read_records, read_sources
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError, ResourceError

TEXTS = [*make_texts(40), 'quotes "", commas, and\nlines\r\n', "tab\there", " spaces "]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def delimited(texts: list[str], delimiter: str, column: str = "text") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([["id", column], *([str(index), text] for index, text in enumerate(texts))])
    return file.getvalue().encode()


def as_table(texts: list[str], column: str = "text") -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(texts))), column: texts})


def parquet(table: pyarrow.Table, **options) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def arrow(table: pyarrow.Table, *, stream: bool) -> bytes:
    sink = pyarrow.BufferOutputStream()
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def feather(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.feather.write_feather(table, sink)
    return sink.getvalue().to_pybytes()


LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = as_table(TEXTS)
DICTIONARY = pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
FORMATS = {
    "lines.jsonl": LINES,
    "lines.ndjson": b"\xef\xbb\xbf" + LINES,
    "lines.json": LINES,
    "array.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "comma.csv": delimited(TEXTS, ","),
    "tab.tsv": delimited(TEXTS, "\t"),
    "groups.parquet": parquet(TABLE, row_group_size=7),
    "plain.parquet": parquet(as_table(TEXTS), compression="none", use_dictionary=False),
    "large.parquet": parquet(pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.large_string())})),
    "dictionary.parquet": parquet(DICTIONARY),
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
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FORMATS[name])
    assert texts_of(tmp_path / name) == TEXTS


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


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_format_takes_a_reader_and_its_suffix(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    def paragraphs(index: int, name: str, file: BinaryIO, text_column: str) -> Iterator[RawRecord]:
        for number, text in enumerate(file.read().split(b"\n\n"), start=1):
            yield RawRecord(name, number, text, "text", index)

    monkeypatch.setitem(readers.FORMATS, ".rst", paragraphs)
    path = tmp_path / f"pages.rst{suffix}"
    path.write_bytes(COMPRESS[suffix]("\n\n".join(TEXTS[:9]).encode()))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    store = prepare_store(Preparation([str(path)], tokenizer, tmp_path / "store"))
    assert sum(split["documents"] for split in store.facts["splits"].values()) == 9
    assert texts_of(path) == TEXTS[:9]


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
def test_a_truncated_file_is_named_and_its_sound_part_read(tmp_path: Path, suffix: str):
    import random

    generator = random.Random(0)
    noise = [generator.randbytes(15).hex() for _ in range(20_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in noise).encode()
    compressed = COMPRESS[suffix](lines)
    file = tmp_path / f"a.jsonl{suffix}"
    for length in (len(compressed) // 2, len(compressed) - 1):
        file.write_bytes(compressed[:length])
        *sound, last = read_records([str(file)])
        found = [parse_record(record).text() for record in sound]
        assert found == noise[: len(found)]
        assert suffix == ".bz2" or length < len(compressed) - 1 or len(found) > 10_000
        message = rf"a\.jsonl{suffix}:{len(found) + 1}: truncated or damaged file: "
        with pytest.raises(RecordError, match=message) as caught:
            parse_record(last)
        assert "\n" not in str(caught.value)
    file.write_bytes(b"this is no compressed file")
    (record,) = read_records([str(file)])
    with pytest.raises(RecordError, match="truncated or damaged"):
        parse_record(record)


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


def test_a_damaged_file_stops_the_command_or_is_counted(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(LINES)[:-9])
    sound = write_jsonl(tmp_path / "sound.jsonl", [{"text": "sound"}])
    inputs = [str(cut), str(sound)]
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz:\d+: truncated or damaged file.*--on_error skip"):
        prepare_store(Preparation(inputs, tokenizer, tmp_path / "store"))
    preparation = Preparation(inputs, tokenizer, tmp_path / "store", 0.0, on_error="skip")
    store = prepare_store(preparation)
    assert store.facts["skipped"] == {"truncated or damaged file": 1}
    texts = [store.tokenizer().decode(ids.tolist()) for ids, _ in store.split("train").iterate()]
    assert texts[-1] == "sound"
    assert texts[:-1] == TEXTS[: len(texts) - 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", delimited(TEXTS, ",", "content")),
        ("a.parquet", parquet(as_table(TEXTS, "content"))),
        ("a.arrow", arrow(as_table(TEXTS, "content"), stream=True)),
    ],
)
def test_another_column_is_asked_for_by_name(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: expected .*found id, content; .*--text_column"):
        documents(tmp_path / name)
    assert texts_of(tmp_path / name, text_column="content") == TEXTS


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


@pytest.mark.parametrize(
    ("name", "content", "place", "cause"),
    [
        ("a.csv", b"id,text\n1,one\n2\n3,three\n", 3, "wrong number of columns"),
        ("a.csv", b'id,text\n1,"a\nb"\n2,"open\n', 4, "invalid CSV"),
        ("a.csv", b"id,text\n1,one\n2,\xff\n", 3, "invalid UTF-8"),
        ("a.json", b'[{"text": "one"}, {"text": "two}]', 2, "invalid JSON"),
        ("a.json", b'[{"text": "one"} {"text": "two"}]', 2, "invalid JSON"),
        ("a.json", b'[{"text": "one"},', 2, "invalid JSON"),
        ("a.json", b'[{"text": "one"}, 5]', 2, "wrong type"),
        ("a.json", b'[{"text": "one"}]\n[{"text": "two"}]', 2, "invalid JSON"),
        ("a.json", b'[{"text": "one"}] {', 2, "invalid JSON"),
        ("a.json", b'{"a":' * 100_000, 1, "invalid JSON"),
        ("a.parquet", parquet(pyarrow.table({"text": ["one", None]})), 2, "wrong type"),
        ("a.parquet", parquet(pyarrow.table({"text": [1, 2]})), 1, "wrong type"),
        ("a.parquet", parquet(pyarrow.table({"text": [b"one", b"\xff"]})), 2, "invalid UTF-8"),
        ("a.parquet", parquet(pyarrow.table({"text": [datetime.datetime(2020, 1, 1)]})), 1, "wrong type"),
        ("a.parquet", parquet(pyarrow.table({"segments": [[{"text": b"one"}]]})), 1, "wrong type"),
    ],
)
def test_a_bad_row_is_named_by_its_place(tmp_path: Path, name: str, content: bytes, place: int, cause: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=rf"{name}:{place}: {cause}: ") as caught:
        documents(tmp_path / name)
    assert caught.value.cause == cause


@pytest.mark.parametrize("rest", [b"x,y\r\n" * 50, b"x" * 300 + b"\n"])
def test_an_open_quote_reads_no_more_than_a_record(
    tmp_path: Path, rest: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(readers, "RECORD_BYTES", 200)
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2,"open' + rest + b"3,three\n")
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


@pytest.mark.parametrize("blank", ["\n", "\r\n", "\n\n\n"])
def test_blank_lines_before_the_first_row_lose_nothing(tmp_path: Path, blank: str):
    contents = {"a.csv": "text\none\n\ntwo\n", "a.json": '{"text": "one"}\n\n{"text": "two"}\n'}
    for name, content in contents.items():
        (tmp_path / name).write_bytes((blank + content).encode())
        assert texts_of(tmp_path / name) == ["one", "two"]
        (record, *_) = read_records([str(tmp_path / name)])
        assert record.line == (blank + content[: content.index("one")]).count("\n") + 1
    (tmp_path / "a.csv").write_bytes(blank.encode())
    assert texts_of(tmp_path / "a.csv") == []


def test_a_column_of_bytes_is_text(tmp_path: Path):
    for kind in (pyarrow.binary(), pyarrow.large_binary()):
        column = pyarrow.array([b"eins, zwei", "é".encode()], kind)
        (tmp_path / "a.parquet").write_bytes(parquet(pyarrow.table({"text": column})))
        assert texts_of(tmp_path / "a.parquet") == ["eins, zwei", "é"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'"text"x,b\n1,2\n', "a.csv: expected the names of the columns first"),
        ("a.csv", b'"text\n1,2\n', "a.csv: expected the names of the columns first"),
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


def test_invalid_utf8_in_a_table_costs_only_its_row(tmp_path: Path):
    raw = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary())
    names = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    (tmp_path / "a.parquet").write_bytes(parquet(pyarrow.table({"text": names})))
    one, bad, three = read_records([str(tmp_path / "a.parquet")])
    assert [parse_record(record).text() for record in (one, three)] == ["one", "three"]
    with pytest.raises(RecordError, match=r"a\.parquet:2: invalid UTF-8"):
        parse_record(bad)


def test_a_long_document_and_many_small_ones_are_elements_of_an_array(tmp_path: Path):
    texts = ["x" * 3_000_000, *("y" * index for index in range(1, 3000))]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    assert texts_of(tmp_path / "a.json") == texts


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


def test_a_folder_that_datasets_saved_is_read_without_its_notes(tmp_path: Path):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert texts_of(tmp_path / "saved") == TEXTS


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
    with pytest.raises(
        DataError, match="expected a split train, found dev, test; name the folder of one, or"
    ):
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


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_an_empty_compressed_file_is_damaged(tmp_path: Path, suffix: str):
    (tmp_path / f"empty.jsonl{suffix}").touch()
    with pytest.raises(RecordError, match="truncated or damaged file: found no bytes"):
        texts_of(tmp_path / f"empty.jsonl{suffix}")


def test_reading_begins_after_any_record(tmp_path: Path):
    for name in ("lines.jsonl", "comma.csv", "groups.parquet", "array.json"):
        (tmp_path / name).write_bytes(FORMATS[name])
    (tmp_path / "text.txt").write_text("text")
    records = list(read_records([str(tmp_path)]))
    for index in range(0, len(records), 9):
        after = (records[index].source, records[index].line)
        assert list(read_sources(find_sources([str(tmp_path)]), after=after)) == records[index + 1 :]


def test_a_store_is_the_same_from_lines_and_from_parquet(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")

    def files(name: str) -> dict[str, bytes]:
        (tmp_path / name).write_bytes(FORMATS[name])
        store = prepare_store(Preparation([str(tmp_path / name)], tokenizer, tmp_path / f"{name}-store"))
        assert isinstance(store, TokenStore)
        return {p.name: p.read_bytes() for p in store.path.rglob("*.bin")}

    assert files("lines.jsonl") == files("groups.parquet")


def test_a_tokenizer_is_trained_on_any_format_and_column(tmp_path: Path):
    from llm_pretrain.data.tokenizer_training import train_tokenizer

    (tmp_path / "a.parquet").write_bytes(parquet(as_table(TEXTS, "content")))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(delimited(TEXTS, ",", "content")))
    made = []
    for name in ("a.parquet", "a.csv.gz"):
        output = tmp_path / f"{name}-tokenizer"
        with pytest.raises(DataError, match="--text_column"):
            train_tokenizer([str(tmp_path / name)], output, None, type="char")
        report = train_tokenizer([str(tmp_path / name)], output, None, type="char", text_column="content")
        assert report.documents == len(TEXTS)
        made.append((output / "tokenizer.json").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("name", FORMATS)
def test_places_rise_so_that_reading_can_begin_after_any(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FORMATS[name])
    places = [(record.source, record.line) for record in read_records([str(tmp_path / name)])]
    assert all(before < after for before, after in pairwise(places))


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


REPEATED = pyarrow.table({"text": ["x" * 100_000] * 3000})
REPEATED_DICTIONARY = pyarrow.table({"text": REPEATED["text"].dictionary_encode()})
COMPACT = {
    "dictionary.parquet": parquet(REPEATED),
    "prefixes.parquet": parquet(
        REPEATED, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}, compression="zstd"
    ),
    "categories.parquet": parquet(REPEATED_DICTIONARY),
    "ids.parquet": parquet(pyarrow.table({"input_ids": [[0] * 3000] * 3000})),
    "categories.feather": feather(REPEATED_DICTIONARY),
}


@pytest.mark.parametrize("name", COMPACT)
def test_repeated_documents_are_not_held_at_once(tmp_path: Path, name: str):
    """Encodings store them once, so that a small file has any number of bytes."""
    assert len(COMPACT[name]) < 1_000_000
    (tmp_path / name).write_bytes(COMPACT[name])
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
