"""Bad data is counted and left out, or an error with file and line; nothing bad is ever trained on."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from support.corpora import edit_facts, make_texts, make_tokenizer, write_jsonl
from support.fork_server import python_path
from support.launching import launch, run_options, train
from support.measured import run_measured
from support.stopping import no_traceback_of_ours

from llm_pretrain.__main__ import main
from llm_pretrain.data import inputs as inputs_module
from llm_pretrain.data import readers
from llm_pretrain.data import store as token_store
from llm_pretrain.data.preparation import Preparation, prepare_store

TEXTS = make_texts(9, longest=12)
GOOD = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in TEXTS]


@dataclass(frozen=True)
class Case:
    """Files with bad records, the same without them, and what is said of both.

    `bad` and `good` map a file's name to its bytes, or to what makes it. `skipped` counts by cause; `place`,
    the file and its line, stands before the first cause. `names` are the inputs, where they are not all of
    `bad`, sorted.
    """

    bad: dict[str, bytes | Callable[[Path], object]]
    good: dict[str, bytes]
    skipped: dict[str, int]
    place: str
    names: list[str] = field(default_factory=list)


def line(bad: bytes, cause: str, *, name: str = "a.jsonl") -> Case:
    """A jsonl file whose fourth line is `bad`."""
    return Case(
        {name: b"".join([*GOOD[:3], bad + b"\n", *GOOD[3:]])}, {name: b"".join(GOOD)}, {cause: 1}, f"{name}:4"
    )


def record(bad: dict | list | str | float | None, cause: str) -> Case:
    """As `line`, of a record that is JSON."""
    return line(json.dumps(bad).encode(), cause)


def cut(suffix: str, compress: Callable[[bytes], bytes]) -> Case:
    """Two streams one behind the other, of which the second ends early: nothing of it can be decoded."""
    data = compress(b"".join(GOOD)) + compress(b"".join(GOOD))[:12]
    name = f"a.jsonl{suffix}"
    return Case(
        {name: data}, {name: compress(b"".join(GOOD))}, {"truncated or damaged file": 1}, f"{name}:10"
    )


def parquet(texts: list[str | None], **options) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink, **options)
    return sink.getvalue().to_pybytes()


def beside(name: str, bad: bytes | Callable[[Path], object], cause: str, *, place: str = "") -> Case:
    """A file in which all is bad, in a folder with a sound one."""
    return Case(
        {"in/a.jsonl": b"".join(GOOD), f"in/{name}": bad},
        {"in/a.jsonl": b"".join(GOOD)},
        {cause: 1},
        place or f"in/{name}",
        ["in"],
    )


def again(make: Callable[[Path, Path], object] | None, names: list[str], first: str, second: str) -> Case:
    """The file `first`, and `second`, which `make` links to it."""
    whole = b"".join(GOOD)
    linked: dict[str, bytes | Callable[[Path], object]] = {first: whole}
    if make is not None:
        linked[second] = lambda path: make(path.parent / first, path)
    return Case(linked, {first: whole}, {"file named twice": 1}, second, names)


DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HUGE = b'{"text": "a", "id": ' + b"9" * 5000 + b"}"
CHAT = {"role": "assistant", "content": "ho"}
CASES: dict[str, Case] = {
    "invalid UTF-8 in a line": line(b'{"text": "\xff\xfe"}', "invalid UTF-8"),
    "an overlong form of UTF-8": line(b'{"text": "\xc0\xaf"}', "invalid UTF-8"),
    "a lone surrogate, escaped": line(b'{"text": "\\ud800"}', "invalid UTF-8"),
    "a lone surrogate, encoded": line(b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    "a surrogate cut between fields": record({"prompt": "\ud83d", "completion": "\ude00"}, "invalid UTF-8"),
    "a line that is cut in the middle": line(b'{"text": "cut in ha', "invalid JSON"),
    "a line that is cut behind a key": line(b'{"text"', "invalid JSON"),
    "two records that a lost line end joined": line(b'{"text": "a"}{"text": "b"}', "invalid JSON"),
    "the last line cut": Case(
        {"a.jsonl": b"".join(GOOD) + b'{"text": "cut in ha'},
        {"a.jsonl": b"".join(GOOD)},
        {"invalid JSON": 1},
        "a.jsonl:10",
    ),
    "a raw line break in a string": Case(
        {"a.jsonl": b"".join(GOOD) + b'{"text": "a\nb"}\n'},
        {"a.jsonl": b"".join(GOOD)},
        {"invalid JSON": 2},
        "a.jsonl:10",
    ),
    "a NUL byte in a string": line(b'{"text": "a\x00b"}', "NUL byte"),
    "NUL bytes before a record": line(bytes(512) + b'{"text": "a"}', "NUL byte"),
    "a file padded with NUL bytes": Case(
        {"a.jsonl": b"".join(GOOD) + bytes(4096)}, {"a.jsonl": b"".join(GOOD)}, {"NUL byte": 1}, "a.jsonl:10"
    ),
    "NUL bytes in a text file": beside("b.txt", b"one\ntwo\n\x00\x00", "NUL byte"),
    "UTF-16 in a text file": beside("b.txt", "ab".encode("utf-16-le"), "NUL byte"),
    "invalid UTF-8 in a text file": beside("b.txt", b"one\ntw\xffo", "invalid UTF-8"),
    "a missing key": record({"title": "a"}, "no text"),
    "a prompt without completion": record({"prompt": "a"}, "no text"),
    "an empty object": record({}, "no text"),
    "a list": record(["a"], "wrong type"),
    "a string": record("a", "wrong type"),
    "null": record(None, "wrong type"),
    "NaN alone": line(b"NaN", "wrong type"),
    "NaN for a text": line(b'{"text": NaN}', "wrong type"),
    "NaN among token ids": line(b'{"input_ids": [1, NaN]}', "wrong type"),
    "NaN among labels": line(b'{"input_ids": [1, 2], "labels": [-100, NaN]}', "wrong labels"),
    "a number for a text": record({"text": 5}, "wrong type"),
    "a list for a text": record({"text": ["a"]}, "wrong type"),
    "a completion of null": record({"prompt": "a", "completion": None}, "wrong type"),
    "segments of text": record({"segments": ["a"]}, "wrong type"),
    "a loss of 2": record({"segments": [{"text": "a", "loss": 2}]}, "wrong type"),
    "a message without a role": record({"messages": [{"content": "a"}, CHAT]}, "wrong type"),
    "a message part that is no text": record(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}, CHAT]}, "wrong type"
    ),
    "no assistant's turn": record({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
    "token ids in a string": record({"input_ids": "1 2"}, "wrong type"),
    "a fraction among token ids": record({"input_ids": [1, 2.0]}, "wrong type"),
    "a boolean among token ids": record({"input_ids": [1, True]}, "wrong type"),
    "a boolean among labels": record({"input_ids": [1, 2], "labels": [True, 2]}, "wrong labels"),
    "a token id beyond the vocabulary": record({"input_ids": [1, 259]}, "token id outside the vocabulary"),
    "a negative token id": record({"input_ids": [1, -1]}, "token id outside the vocabulary"),
    "a token id beyond int64": record({"input_ids": [1, 1 << 64]}, "token id outside the vocabulary"),
    "a token id beyond int64, negative": record(
        {"input_ids": [-1 << 200]}, "token id outside the vocabulary"
    ),
    "shifted labels": record({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "wrong labels"),
    "a short mask": record({"input_ids": [1, 2], "loss_mask": [1]}, "wrong length"),
    "a hole in an attention mask": record(
        {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "wrong type"
    ),
    "a short attention mask": record({"input_ids": [1, 2], "attention_mask": [1]}, "wrong length"),
    "a mask without a target": record({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no loss token"),
    "a target in the first place alone": record({"input_ids": [1, 2], "loss_mask": [1, 0]}, "no loss token"),
    "a single token": record({"input_ids": [1]}, "no loss token"),
    "segments without a target": record({"segments": [{"text": "a", "loss": False}]}, "no loss token"),
    "very deep JSON": line(DEEP, "invalid JSON"),
    "an integer of 5000 digits": line(HUGE, "invalid JSON"),
    "a gz that ends early": cut(".gz", gzip.compress),
    "a zst that ends early": cut(".zst", zstandard.compress),
    "a bz2 that ends early": cut(".bz2", bz2.compress),
    "an xz that ends early": cut(".xz", lzma.compress),
    "no gz at all": beside("b.jsonl.gz", b"no gz", "truncated or damaged file", place="in/b.jsonl.gz:1"),
    "an empty gz": beside(
        "b.txt.zst", b"\x28\xb5\x2f\xfd", "truncated or damaged file", place="in/b.txt.zst:1"
    ),
    "a parquet file that is cut": beside("b.parquet", parquet(["a"])[:-9], "truncated or damaged file"),
    "an empty parquet file": beside("b.parquet", b"", "truncated or damaged file"),
    "a row of null": Case(
        {"a.parquet": parquet([*TEXTS[:3], None, *TEXTS[3:]])},
        {"a.parquet": parquet([*TEXTS])},
        {"wrong type": 1},
        "a.parquet:4",
    ),
    "a csv row with too few fields": Case(
        {"a.csv": b"id,text\n1,one\n2\n3,three\n"},
        {"a.csv": b"id,text\n1,one\n3,three\n"},
        {"wrong number of columns": 1},
        "a.csv:3",
    ),
    "a csv row with a NUL byte": Case(
        {"a.csv": b"text\none\nt\x00wo\nthree\n"},
        {"a.csv": b"text\none\nthree\n"},
        {"NUL byte": 1},
        "a.csv:3",
    ),
    "a csv file that ends in a quote": Case(
        {"a.csv": b'text\none\n"cut in ha'}, {"a.csv": b"text\none\n"}, {"invalid CSV": 1}, "a.csv:3"
    ),
    "a JSON array that is cut": Case(
        {"a.json": b'[{"text": "one"}, {"text": "tw'},
        {"a.json": b'[{"text": "one"}]'},
        {"invalid JSON": 1},
        "a.json:2",
    ),
    "a .json of lines whose first is bad": Case(
        {"a.json": b'{"text": "cut\n' + b"".join(GOOD)},
        {"a.json": b"".join(GOOD)},
        {"invalid JSON": 1},
        "a.json:1",
    ),
    "a link to nothing": beside("b.txt", lambda path: path.symlink_to("nowhere"), "unreadable file"),
    "a file that gives errors": beside(
        "b.txt", lambda path: path.symlink_to("/proc/self/mem"), "unreadable file"
    ),
    "a pipe in a folder": beside("b.txt", os.mkfifo, "unreadable file"),
    "a device in a folder": beside("b.txt", lambda path: path.symlink_to("/dev/zero"), "unreadable file"),
    "a file named twice": again(None, ["a.jsonl", "a.jsonl"], "a.jsonl", "a.jsonl"),
    "a file by pattern and by name": again(None, ["*.jsonl", "./a.jsonl"], "a.jsonl", "./a.jsonl"),
    "a file in its folder and by name": again(None, ["in", "in/a.jsonl"], "in/a.jsonl", "in/a.jsonl"),
    "a file and a link to it": again(
        lambda file, link: link.symlink_to(file), ["a.jsonl", "b.jsonl"], "a.jsonl", "b.jsonl"
    ),
    "a file of two names": again(os.link, ["a.jsonl", "b.jsonl"], "a.jsonl", "b.jsonl"),
}
"""What is bad; each alone in a corpus."""

LEGAL: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {
    "a byte order mark and CRLF": (
        {"a.jsonl": b"\xef\xbb\xbf" + b"".join(GOOD).replace(b"\n", b"\r\n")},
        {"a.jsonl": b"".join(GOOD)},
    ),
    "a byte order mark amid joined files": (
        {"a.jsonl": b"".join(GOOD[:3]) + b"\xef\xbb\xbf" + b"".join(GOOD[3:])},
        {"a.jsonl": b"".join(GOOD)},
    ),
    "blank lines": ({"a.jsonl": b"\n\r\n \n".join(GOOD)}, {"a.jsonl": b"".join(GOOD)}),
    "no line end at the end": ({"a.jsonl": b"".join(GOOD)[:-1]}, {"a.jsonl": b"".join(GOOD)}),
    "NaN in a field that is not read": (
        {"a.jsonl": b'{"text": "a", "score": NaN}\n'},
        {"a.jsonl": b'{"text": "a"}\n'},
    ),
    "an escaped NUL": ({"a.jsonl": b'{"text": "a\\u0000b"}\n'}, {"a.parquet": parquet(["a\0b"])}),
    "a surrogate pair, escaped": (
        {"a.jsonl": b'{"text": "\\ud83d\\ude00"}'},
        {"a.jsonl": '{"text": "😀"}'.encode()},
    ),
    "a key twice, of which the last counts": (
        {"a.jsonl": b'{"text": "a", "text": "b"}\n'},
        {"a.jsonl": b'{"text": "b"}\n'},
    ),
    "a folder named as a file": ({"x.jsonl/a.jsonl": b"".join(GOOD)}, {"a.jsonl": b"".join(GOOD)}),
    "equal contents under two names": ({"a.jsonl": GOOD[0], "b.jsonl": GOOD[0]}, {"a.jsonl": GOOD[0] * 2}),
}
"""What is not bad, and what it is the same as."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every corpus has a folder of its own, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, files: dict[str, bytes | Callable[[Path], object]] | dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)


def top(names: Iterable[str]) -> list[str]:
    return sorted({name.split("/")[0] for name in names})


def prepare(folder: Path, names: list[str], tokenizer: str, *options: str, output: str = "store") -> int:
    os.chdir(folder)
    return main(
        [
            *("prepare", "--input", *names, "--tokenizer", tokenizer, "--output", output),
            *("--validation_fraction", "0.3", "--workers", "1", *options),
        ]
    )


def store_files(store: Path) -> dict[str, bytes]:
    """Every file but store.json."""
    found = {p.relative_to(store).as_posix(): p.read_bytes() for p in store.rglob("*") if p.is_file()}
    del found["store.json"]
    return found


def facts(store: Path, *but: str) -> dict:
    content = json.loads((store / "store.json").read_text())
    return {key: value for key, value in content.items() if key not in but}


COUNTS = ("skipped", "inputs", "input_documents", "on_error", "sha256")
"""Of store.json, what tells a corpus with bad records from the same without them."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_bad_stops_with_its_place_or_is_counted_and_left_out(
    here: Path, tokenizer: str, capsys: pytest.CaptureFixture[str], name: str
):
    case = CASES[name]
    write(here / "bad", case.bad)
    write(here / "good", case.good)
    names = case.names or top(case.bad)
    assert prepare(here / "bad", names, tokenizer) == 65
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    cause = next(iter(case.skipped))
    assert captured.err.startswith(f"llm-pretrain prepare: error: {case.place}: {cause}: ")
    assert len(captured.err) < 700
    assert not list((here / "bad").glob("*store*"))
    assert not list((here / "bad").glob(".*"))

    assert prepare(here / "bad", names, tokenizer, "--on_error", "skip") == 0
    printed = capsys.readouterr().out
    assert [row for row in printed.splitlines() if row.startswith("left out")] == [
        f"left out   {count} × {cause}" for cause, count in sorted(case.skipped.items())
    ]
    assert prepare(here / "good", top(case.good), tokenizer, "--on_error", "skip") == 0
    found, expected = here / "bad" / "store", here / "good" / "store"
    assert facts(found)["skipped"] == case.skipped
    assert facts(expected)["skipped"] == {}
    assert store_files(found) == store_files(expected)
    assert facts(found, *COUNTS) == facts(expected, *COUNTS)
    assert sum(facts(found)["input_documents"]) == sum(facts(expected)["input_documents"])


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_is_read_as_what_it_is(here: Path, tokenizer: str, name: str):
    for folder, files in zip(("left", "right"), LEGAL[name], strict=True):
        write(here / folder, files)
        assert prepare(here / folder, top(files), tokenizer) == 0
        assert facts(here / folder / "store")["skipped"] == {}
    assert store_files(here / "left" / "store") == store_files(here / "right" / "store")


def test_empty_documents_are_counted_and_never_an_error(here: Path, tokenizer: str, capsys):
    write(here, {"in/a.jsonl": b"".join([*GOOD, b'{"text": ""}\n{"messages": []}\n']), "in/b.txt": b""})
    write(here, {"in/c.jsonl": b"", "in/d.jsonl": b"\n\n", "good.jsonl": b"".join(GOOD)})
    assert prepare(here, ["in"], tokenizer) == 0
    assert "left out   3 × empty document\n" in capsys.readouterr().out
    assert prepare(here, ["good.jsonl"], tokenizer, output="expected") == 0
    assert store_files(here / "store") == store_files(here / "expected")


def test_all_causes_together_are_counted_one_by_one(here: Path, tokenizer: str, capsys):
    """Also in several processes, also by a process of its own."""
    expected: dict[str, int] = {}
    for number, case in enumerate(CASES.values()):
        if case.names or len(case.bad) > 1:
            continue
        write(here / "bad", {f"{number:03}/{name}": content for name, content in case.bad.items()})
        write(here / "good", {f"{number:03}/{name}": content for name, content in case.good.items()})
        for cause, count in case.skipped.items():
            expected[cause] = expected.get(cause, 0) + count
    assert len(expected) > 9
    assert prepare(here, ["good"], tokenizer, output="expected") == 0
    capsys.readouterr()
    command = [
        *(sys.executable, "-m", "llm_pretrain", "prepare", "--input", "bad", "--tokenizer", tokenizer),
        *("--output", "store", "--validation_fraction", "0.3", "--on_error", "skip"),
    ]
    finished = subprocess.run(
        command, cwd=here, capture_output=True, text=True, check=True, env=environment()
    )
    assert [row for row in finished.stdout.splitlines() if row.startswith("left out")] == [
        f"left out   {count} × {cause}" for cause, count in sorted(expected.items())
    ]
    assert facts(here / "store")["skipped"] == expected
    assert store_files(here / "store") == store_files(here / "expected")
    assert main(["inspect", "store", "--verify"]) == 0
    assert "left out" in capsys.readouterr().out
    failed = subprocess.run(
        [word for word in command if word not in ("--on_error", "skip")] + ["--overwrite"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert failed.returncode == 65
    assert failed.stderr.count("\n") == 1
    assert facts(here / "store")["skipped"] == expected


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path(Path(inputs_module.__file__).parents[3])}


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_while_it_is_read_is_found(
    here: Path, tokenizer: str, capsys, monkeypatch: pytest.MonkeyPatch, grows: bool
):
    """What was read of it may be half of one state and half of another."""
    lines, changed = b"".join(GOOD), b"".join(GOOD) + GOOD[0] if grows else b"".join(GOOD[:5])
    original = readers.json_lines

    def write_meanwhile(index, name, lines_):
        for number, each in enumerate(original(index, name, lines_)):
            if number == 5:
                Path(name).write_bytes(changed)
            yield each

    monkeypatch.setattr(readers, "json_lines", write_meanwhile)
    for options, code in (([], 65), (["--on_error", "skip"], 0)):
        Path("a.jsonl").write_bytes(lines)
        assert prepare(here, ["a.jsonl"], tokenizer, *options) == code
        captured = capsys.readouterr()
        assert ("file changed while it was read" in captured.err) == (code == 65)
    assert "left out   1 × file changed while it was read\n" in captured.out
    assert sum(facts(here / "store")["input_documents"]) in (len(GOOD), len(GOOD) + 1)


def test_a_line_too_long_is_counted_without_being_held(
    here: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    for module in (readers,):
        monkeypatch.setattr(module, "RECORD_BYTES", 3000)
    long = b'{"text": "' + b"x" * 5_000_000 + b'"}\n'
    files = {"a.jsonl": GOOD[0] + long + GOOD[1], "b.txt": b"x" * 4000, "c.json": b"[" + long + b"]"}
    sizes: list[int] = []
    original = readers.lines_of
    monkeypatch.setattr(
        readers, "lines_of", lambda file: (sizes.append(len(part)) or part for part in original(file))
    )
    write(here / "in", files)
    assert prepare(here, ["in"], tokenizer, "--on_error", "skip") == 0
    skipped = facts(here / "store")["skipped"]
    assert skipped == {"record too large": 3} or skipped == {"record too large": 2, "invalid JSON": 1}
    assert sum(facts(here / "store")["input_documents"]) == 2
    assert sizes
    assert max(sizes) == 3001


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null"])
def test_a_pipe_or_device_by_its_name_is_refused(here: Path, tokenizer: str, capsys, name: str):
    os.mkfifo("pipe")
    for options in ([], ["--on_error", "skip"]):
        assert prepare(here, [name], tokenizer, *options) == 65
        error = capsys.readouterr().err
        assert f"{name}: expected a file or a folder, found a pipe or device" in error
        assert error.count("\n") == 1


def test_a_corpus_of_bad_records_alone_makes_no_store(here: Path, tokenizer: str, capsys):
    write(here, {"a.jsonl": b'{"input_ids": [1, 2], "loss_mask": [0, 0]}\n' * 3 + b"{\n"})
    assert prepare(here, ["a.jsonl"], tokenizer, "--on_error", "skip") == 65
    error = capsys.readouterr().err
    assert "expected documents, found none (left out: 1 invalid JSON, 3 no loss token)" in error
    assert not Path("store").exists()


def bad_corpus(folder: Path, documents: int) -> int:
    """Every 50th line is bad in one of three ways; returns how many of each there are."""
    bad = [b'{"text": "cut\n', b'{"text": "\xff"}\n', b'{"input_ids": [1, 999]}\n']
    with (folder / "a.jsonl").open("wb") as file:
        for number, text in enumerate(make_texts(documents)):
            file.write(json.dumps({"text": text * 20}).encode() + b"\n")
            if number % 50 == 0:
                file.write(b"".join(bad))
    return -(-documents // 50)


@pytest.mark.slow
def test_killed_amid_bad_records_it_gives_the_same_bytes_and_counts(here: Path, tokenizer: str):
    """Killed with all its workers, again and again, at whatever moment."""
    count = bad_corpus(here, 6000)
    assert prepare(here, ["a.jsonl"], tokenizer, "--on_error", "skip", output="expected") == 0
    expected = dict.fromkeys(("invalid JSON", "invalid UTF-8", "token id outside the vocabulary"), count)
    assert facts(here / "expected")["skipped"] == expected
    script = (
        "import sys; from functools import wraps; from llm_pretrain.data.preparation import Preparation\n"
        "import llm_pretrain.__main__ as m\n"
        "if __name__ == '__main__':\n"
        "    made = Preparation.__init__\n"
        "    Preparation.__init__ = wraps(made)(lambda *a, **k: made(*a, **k, commit_seconds=0.01))\n"
        "    sys.exit(m.main(sys.argv[1:]))\n"
    )
    Path("script.py").write_text(script)
    command = [
        *(sys.executable, "script.py", "prepare", "--input", "a.jsonl", "--tokenizer", tokenizer),
        *("--output", "store", "--validation_fraction", "0.3", "--on_error", "skip", "--workers", "2"),
    ]
    kills, continued, wait = 0, 0, 0.05
    while not Path("store/store.json").exists():
        before = Path(".store.partial/state.json").exists()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
        )
        while process.poll() is None and not Path(".store.partial/state.json").exists():
            time.sleep(0.01)
        time.sleep(wait)
        wait *= 1.3
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        kills += process.returncode == -signal.SIGKILL
        continued += before
        assert process.returncode in (0, -signal.SIGKILL), output
    assert kills
    assert continued
    if Path(".store.partial").exists():
        subprocess.run(command, check=True, env=environment())
    assert (here / "store" / "store.json").read_bytes() == (here / "expected" / "store.json").read_bytes()
    assert store_files(here / "store") == store_files(here / "expected")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["big.jsonl", "big.txt"])
def test_a_document_of_fifty_megabytes_takes_bounded_memory(here: Path, tokenizer: str, name: str):
    """In bytes as tokens, the most that there can be."""
    text = (" ".join(make_texts(100_000, longest=40)) * 6)[:40_000_000]
    assert len(text.encode()) > 40_000_000
    Path(name).write_text(json.dumps({"text": text}, ensure_ascii=False) if name == "big.jsonl" else text)
    command = [
        *(sys.executable, "-m", "llm_pretrain", "prepare", "--input", name, "--tokenizer", tokenizer),
        *("--output", "store", "--validation_fraction", "0"),
    ]
    measured = run_measured(command, env=environment(), stdout=subprocess.DEVNULL)
    assert measured.exit_code == 0
    assert measured.memory_bytes < 8_000_000_000
    split = facts(here / "store")["splits"]["train"]
    assert (split["documents"], split["text_bytes"]) == (1, len(text.encode()))


# --- stores at training time -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with masks, and with train shards of one size: documents of 30 tokens, ten to a shard."""
    folder = tmp_path_factory.mktemp("sharded")
    generator = np.random.default_rng(0)
    records = [
        {"input_ids": generator.integers(0, 256, 30).tolist(), "loss_mask": [0] * 5 + [1] * 25}
        for _ in range(95)
    ]
    corpus = write_jsonl(folder / "a.jsonl", records)
    tokenizer_folder = make_tokenizer(folder / "tokenizer")
    preparation = Preparation([str(corpus)], tokenizer_folder, folder / "store", 0.1, shard_bytes=600)
    return prepare_store(preparation).path


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / name).write_bytes(change((store / name).read_bytes()))

    return apply


def numbers(name: str, dtype: str, change: Callable[[np.ndarray], object]) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        values = np.fromfile(store / name, dtype=dtype)
        change(values)
        values.tofile(store / name)

    return apply


def swap(store: Path) -> None:
    first, second = (store / "train" / f"tokens-0000{k}.bin" for k in (0, 1))
    assert first.stat().st_size == second.stat().st_size
    first.rename(store / "other")
    second.rename(first)
    (store / "other").rename(second)


def no_targets(content: dict) -> None:
    content["splits"]["train"]["targets"] = 0


def forge(store: Path) -> None:
    """Gives every file the size and the digests that store.json should have of it."""

    def digests(content: dict) -> None:
        for name, entry in content["files"].items():
            data = (store / name).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            entry.update(bytes=len(data), sha256=digest, sample=digest)

    edit_facts(store, digests)


SHARD, OFFSETS, MASK = "train/tokens-00000.bin", "train/offsets.bin", "train/loss_mask.bin"
DAMAGE: dict[str, tuple[tuple[Callable[[Path], object], ...], str]] = {
    "a shard of odd length": (
        (rewrite(SHARD, lambda data: data + b"x"),),
        f"{SHARD}: expected 600 bytes, found 601",
    ),
    "a shard cut": ((rewrite(SHARD, lambda data: data[:-1]),), f"{SHARD}: expected 600 bytes, found 599"),
    "a shard of odd length, with its digest": (
        (rewrite(SHARD, lambda data: data + b"x"), forge),
        f"{SHARD}: expected 300 numbers of uint16, found 601",
    ),
    "a shard of zeros": ((rewrite(SHARD, lambda data: bytes(len(data))),), f"{SHARD}: expected unaltered"),
    "a shard missing": ((lambda store: (store / SHARD).unlink(),), f"{SHARD}: expected a file of the token"),
    "shards exchanged": ((swap,), f"{SHARD}: expected unaltered contents"),
    "store.json edited": (
        (rewrite("store.json", lambda data: data.replace(b'"<u2"', b'"<u4"')),),
        "store.json: expected unaltered contents",
    ),
    "offsets that fall": (
        (numbers(OFFSETS, "<i8", lambda n: n.__setitem__(5, 0)), forge),
        f"{OFFSETS}: expected rising offsets",
    ),
    "offsets that rise too far": (
        (numbers(OFFSETS, "<i8", lambda n: n.__setitem__(5, 1 << 62)), forge),
        f"{OFFSETS}: expected rising",
    ),
    "offsets from 1 on": (
        (numbers(OFFSETS, "<i8", lambda n: n.__setitem__(0, 1)), forge),
        f"{OFFSETS}: expected offsets from 0",
    ),
    "a document over two shards": (
        (numbers(OFFSETS, "<i8", lambda n: n.__setitem__(10, 301)), forge),
        f"{OFFSETS}: expected every shard to",
    ),
    "an offset missing": (
        (rewrite(OFFSETS, lambda data: data[:-8]), forge),
        f"{OFFSETS}: expected .* numbers",
    ),
    "ids beyond the vocabulary": (
        (numbers(SHARD, "<u2", lambda n: n.__setitem__(77, 60000)), forge),
        f"{SHARD}: expected token ids below vocab_size 259, found 60000 at 77",
    ),
    "a mask too short": (
        (rewrite(MASK, lambda data: data[:-1]), forge),
        f"{MASK}: expected .* numbers of uint8",
    ),
    "a mask too long": ((rewrite(MASK, lambda data: data + b"x"), forge), f"{MASK}: expected .* numbers"),
    "a mask of other bits": ((rewrite(MASK, lambda data: bytes(len(data))),), f"{MASK}: expected unaltered"),
    "no token to train on": (
        (rewrite(MASK, lambda data: bytes(len(data))), lambda store: edit_facts(store, no_targets), forge),
        "expected tokens to train on, found all [0-9]+ masked",
    ),
    "no store": ((lambda store: (store / "store.json").unlink(),), "expected a folder with store.json"),
    "store.json cut": ((rewrite("store.json", lambda data: data[:99]),), "store.json: expected JSON"),
}
"""What is done to a store, and what is said of it."""
SAMPLED = ("shards exchanged", "a shard of zeros", "a mask of other bits")
"""What a store too large to be read when it is opened is searched for by samples."""


def short_options(store: Path, folder: Path) -> list[str]:
    return run_options("tiny-moe", store, "training.max_steps=8 training.sequence_length=64", folder=folder)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_store_ends_a_run_before_its_first_step(
    here: Path, sharded: Path, capsys: pytest.CaptureFixture[str], name: str
):
    store = Path(shutil.copytree(sharded, here / "store"))
    changes, message = DAMAGE[name]
    for change in changes:
        change(store)
    assert train(*short_options(store, here / "run")) == 65
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    assert not (here / "run" / "metrics.jsonl").exists() or not (here / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("name", SAMPLED)
def test_of_a_large_store_samples_are_compared(
    here: Path, sharded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(token_store, "VERIFY_LIMIT", 0)
    store = Path(shutil.copytree(sharded, here / "store"))
    changes, message = DAMAGE[name]
    for change in changes:
        change(store)
    assert train(*short_options(store, here / "run")) == 65
    error = capsys.readouterr().err
    assert re.search(message + r".*sample", error), error
    monkeypatch.setattr(token_store, "check_files", lambda *_, whole: None)
    token_store.TokenStore(store)  # without the samples the damage is not found


def test_ids_beyond_the_vocabulary_of_a_large_store_are_never_trained_on(
    here: Path, sharded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(token_store, "VERIFY_LIMIT", 0)
    store = Path(shutil.copytree(sharded, here / "store"))
    for file in sorted((store / "train").glob("tokens-*")):
        numbers(f"train/{file.name}", "<u2", lambda n: n.__setitem__(29, 60000))(store)
    forge(store)
    assert train(*short_options(store, here / "run")) == 65
    assert "expected token ids below vocab_size 259, found 60000 in sequence" in capsys.readouterr().err
    rows = (here / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} <= {0}


@pytest.mark.slow
def test_two_processes_refuse_a_damaged_store_together(here: Path, sharded: Path):
    store = Path(shutil.copytree(sharded, here / "store"))
    swap(store)
    run = launch("torchrun", 2, here / "run", short_options(store, here / "run"), exit_code=1)
    assert run.output.count("expected unaltered contents") == 1
    assert run.output.count("error: ") == 1
    no_traceback_of_ours(run.output)
