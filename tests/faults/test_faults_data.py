"""Bad data is counted and left out, or an error with file and line; nothing bad is ever trained on."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from support.corpora import edit_facts, forge_digests, make_texts, make_tokenizer, write_jsonl
from support.launching import run_options, train
from support.table_files import parquet

from llm_pretrain.__main__ import main
from llm_pretrain.data import readers
from llm_pretrain.data import store as token_store
from llm_pretrain.data.preparation import Preparation, prepare_store

TEXTS = make_texts(9, longest=12)
GOOD = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in TEXTS]
SOUND = b"".join(GOOD)
Content = bytes | Callable[[Path], object]
"""Of a file, or what makes it."""


@dataclass(frozen=True)
class Case:
    """Files with bad records, the same without them, and what is said of both.

    `skipped` counts by cause; `place`, the file and its line, stands before the first cause. `names` are the
    inputs, where they are not all of `bad`, sorted.
    """

    bad: dict[str, Content]
    good: dict[str, bytes]
    skipped: dict[str, int]
    place: str
    names: list[str] = field(default_factory=list)


def file(name: str, bad: bytes, good: bytes, line: int, cause: str, count: int = 1) -> Case:
    """A file whose first bad record is on this line."""
    return Case({name: bad}, {name: good}, {cause: count}, f"{name}:{line}")


def line(bad: bytes, cause: str) -> Case:
    """A jsonl file whose fourth line is `bad`."""
    return file("a.jsonl", b"".join([*GOOD[:3], bad + b"\n", *GOOD[3:]]), SOUND, 4, cause)


def record(bad: dict | list | str | float | None, cause: str) -> Case:
    """As `line`, of a record that is JSON."""
    return line(json.dumps(bad).encode(), cause)


def cut(suffix: str, compress: Callable[[bytes], bytes]) -> Case:
    """Two streams one behind the other, of which the second ends early: nothing of it can be decoded."""
    sound = compress(SOUND)
    return file(f"a.jsonl{suffix}", sound + sound[:12], sound, 10, "truncated or damaged file")


def array(bad: bytes) -> Case:
    """A JSON array whose second element is bad."""
    return file("a.json", bad, b'[{"text": "one"}]', 2, "invalid JSON")


def not_utf8() -> Case:
    """A table with a column of text that holds other bytes in one place."""
    raw = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    tables = (pyarrow.table({"text": texts}) for texts in (column, ["one", "three"]))
    return file("a.parquet", *map(parquet, tables), 2, "invalid UTF-8")


def beside(name: str, bad: Content, cause: str, *, place: str = "") -> Case:
    """A file in which all is bad, in a folder with a sound one."""
    sound = {"in/a.jsonl": SOUND}
    return Case({**sound, f"in/{name}": bad}, sound, {cause: 1}, f"in/{name}{place}", ["in"])


def again(make: Callable[[Path, Path], object] | None, names: list[str], first: str, second: str) -> Case:
    """The file `first`, and `second`, which `make` links to it."""
    linked: dict[str, Content] = {first: SOUND}
    if make is not None:
        linked[second] = lambda path: make(path.parent / first, path)
    return Case(linked, {first: SOUND}, {"file named twice": 1}, second, names)


CUT = "truncated or damaged file"
TOKENS = "token id outside the vocabulary"
CHAT = {"role": "assistant", "content": "ho"}
CASES: dict[str, Case] = {
    "invalid UTF-8 in a line": line(b'{"text": "\xff\xfe"}', "invalid UTF-8"),
    "a lone surrogate, escaped": line(b'{"text": "\\ud800"}', "invalid UTF-8"),
    "a surrogate cut between fields": record({"prompt": "\ud83d", "completion": "\ude00"}, "invalid UTF-8"),
    "a line that is cut in the middle": line(b'{"text": "cut in ha', "invalid JSON"),
    "the last line cut": file("a.jsonl", SOUND + b'{"text": "cut in ha', SOUND, 10, "invalid JSON"),
    "a raw line break in a string": file(
        "a.jsonl", SOUND + b'{"text": "a\nb"}\n', SOUND, 10, "invalid JSON", 2
    ),
    "a NUL byte in a string": line(b'{"text": "a\x00b"}', "NUL byte"),
    "NUL bytes before a record": line(bytes(512) + b'{"text": "a"}', "NUL byte"),
    "NUL bytes in a text file": beside("b.txt", b"one\ntwo\n\x00\x00", "NUL byte"),
    "invalid UTF-8 in a text file": beside("b.txt", b"one\ntw\xffo", "invalid UTF-8"),
    "a missing key": record({"title": "a"}, "no text"),
    "a list": record(["a"], "wrong type"),
    "NaN among token ids": line(b'{"input_ids": [1, NaN]}', "wrong type"),
    "a number for a text": record({"text": 5}, "wrong type"),
    "segments of text": record({"segments": ["a"]}, "wrong type"),
    "messages in a string": record({"messages": "hi"}, "wrong type"),
    "a message without a role": record({"messages": [{"content": "a"}, CHAT]}, "wrong type"),
    "an image": record({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT]}, "wrong type"),
    "no assistant's turn": record({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
    "tools of very deep JSON": record({"messages": [CHAT], "tools": "[" * 100_000}, "wrong type"),
    "a boolean among token ids": record({"input_ids": [1, True]}, "wrong type"),
    "a token id beyond the vocabulary": record({"input_ids": [1, 259]}, TOKENS),
    "a negative token id": record({"input_ids": [1, -1]}, TOKENS),
    "a token id beyond int64": record({"input_ids": [1, 1 << 64]}, TOKENS),
    "shifted labels": record({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "wrong labels"),
    "a mask of 2": record({"input_ids": [1, 2], "loss_mask": [0, 2]}, "wrong type"),
    "a short mask": record({"input_ids": [1, 2], "loss_mask": [1]}, "wrong length"),
    "a hole in an attention mask": record(
        {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "wrong type"
    ),
    "a mask without a target": record({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no loss token"),
    "a target in the first place alone": record({"input_ids": [1, 2], "loss_mask": [1, 0]}, "no loss token"),
    "segments without a target": record({"segments": [{"text": "a", "loss": False}]}, "no loss token"),
    "very deep JSON": line(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid JSON"),
    "an integer of 5000 digits": line(b'{"text": "a", "id": ' + b"9" * 5000 + b"}", "invalid JSON"),
    "a gz that ends early": cut(".gz", gzip.compress),
    "a zst that ends early": cut(".zst", zstandard.compress),
    "no gz at all": beside("b.jsonl.gz", b"no gz", CUT, place=":1"),
    "an empty parquet file": beside("b.parquet", b"", CUT),
    "text that is no UTF-8 in a parquet file": not_utf8(),
    "a column of numbers": beside(
        "b.parquet", parquet(pyarrow.table({"text": [1]})), "wrong type", place=":1"
    ),
    "a csv row with too few fields": file(
        "a.csv", b"id,text\n1,one\n2\n3,three\n", b"id,text\n1,one\n3,three\n", 3, "wrong number of columns"
    ),
    "a csv file that ends in a quote": file(
        "a.csv", b'text\n"o\nne"\n"cut in ha', b'text\n"o\nne"\n', 4, "invalid CSV"
    ),
    "a JSON array that is cut": array(b'[{"text": "one"}, {"text": "tw'),
    "a second JSON array": array(b'[{"text": "one"}]\n[{"text": "two"}]'),
    "a .json of lines whose first is bad": file(
        "a.json", b'{"text": "cut\n' + SOUND, SOUND, 1, "invalid JSON"
    ),
    "a link to nothing": beside("b.txt", lambda path: path.symlink_to("nowhere"), "unreadable file"),
    "a file that gives errors": beside(
        "b.txt", lambda path: path.symlink_to("/proc/self/mem"), "unreadable file"
    ),
    "a pipe in a folder": beside("b.txt", os.mkfifo, "unreadable file"),
    "a file named twice": again(None, ["a.jsonl", "a.jsonl"], "a.jsonl", "a.jsonl"),
    "a file in its folder and by name": again(None, ["in", "in/a.jsonl"], "in/a.jsonl", "in/a.jsonl"),
    "a file and a link to it": again(
        lambda file, link: link.symlink_to(file), ["a.jsonl", "b.jsonl"], "a.jsonl", "b.jsonl"
    ),
}
"""What is bad; each alone in a corpus."""


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


def left_out(printed: str) -> dict[str, int]:
    return {
        cause: int(count) for count, cause in re.findall(r"^left out   (\d+) × (.+)$", printed, re.MULTILINE)
    }


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
    assert left_out(capsys.readouterr().out) == case.skipped
    assert prepare(here / "good", top(case.good), tokenizer, "--on_error", "skip") == 0
    found, expected = here / "bad" / "store", here / "good" / "store"
    assert facts(found)["skipped"] == case.skipped
    assert facts(expected)["skipped"] == {}
    assert store_files(found) == store_files(expected)
    assert facts(found, *COUNTS) == facts(expected, *COUNTS)
    assert sum(facts(found)["input_documents"]) == sum(facts(expected)["input_documents"])


def test_empty_documents_are_counted_and_never_an_error(here: Path, tokenizer: str, capsys):
    write(here, {"in/a.jsonl": b"".join([*GOOD, b'{"text": ""}\n{"messages": []}\n']), "in/b.txt": b""})
    write(here, {"in/c.jsonl": b"", "in/d.jsonl": b"\n\n", "good.jsonl": b"".join(GOOD)})
    assert prepare(here, ["in"], tokenizer) == 0
    assert "left out   3 × empty document\n" in capsys.readouterr().out
    assert prepare(here, ["good.jsonl"], tokenizer, output="expected") == 0
    assert store_files(here / "store") == store_files(here / "expected")


def test_all_causes_together_are_counted_one_by_one(here: Path, tokenizer: str, capsys):
    """Also in several processes."""
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
    assert prepare(here, ["bad"], tokenizer, "--on_error", "skip", "--workers", "2") == 0
    assert left_out(capsys.readouterr().out) == expected
    assert facts(here / "store")["skipped"] == expected
    assert store_files(here / "store") == store_files(here / "expected")
    assert main(["inspect", "store", "--verify"]) == 0
    assert "left out" in capsys.readouterr().out


def test_a_file_that_changes_while_it_is_read_is_found(
    here: Path, tokenizer: str, capsys, monkeypatch: pytest.MonkeyPatch
):
    """What was read of it may be half of one state and half of another."""
    original = readers.json_lines

    def write_meanwhile(index, name, lines_):
        for number, each in enumerate(original(index, name, lines_)):
            if number == 5:
                Path(name).write_bytes(SOUND + GOOD[0])
            yield each

    monkeypatch.setattr(readers, "json_lines", write_meanwhile)
    for options, code in (([], 65), (["--on_error", "skip"], 0)):
        Path("a.jsonl").write_bytes(SOUND)
        assert prepare(here, ["a.jsonl"], tokenizer, *options) == code
        captured = capsys.readouterr()
        assert ("file changed while it was read" in captured.err) == (code == 65)
    assert "left out   1 × file changed while it was read\n" in captured.out
    assert sum(facts(here / "store")["input_documents"]) in (len(GOOD), len(GOOD) + 1)


def test_a_line_too_long_is_counted_without_being_held(
    here: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(readers, "RECORD_BYTES", 3000)
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


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
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
    assert "expected documents to train on, found none (left out: 1 invalid JSON, 3 no loss token)" in error
    assert not Path("store").exists()


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


Damage = Callable[[Path], object]


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda store: (store / name).write_bytes(change((store / name).read_bytes()))


def unlink(name: str) -> Damage:
    return lambda store: (store / name).unlink()


def number(name: str, dtype: str, place: int, value: int) -> Damage:
    """One number of a file, with the digests that fit."""

    def apply(store: Path) -> None:
        values = np.fromfile(store / name, dtype=dtype)
        values[place] = value
        values.tofile(store / name)
        forge_digests(store)

    return apply


def forged(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """As `rewrite`, with the digests that fit."""
    return lambda store: (rewrite(name, change)(store), forge_digests(store))


def edit(**changes: object) -> Damage:
    return rewrite("store.json", lambda data: json.dumps(json.loads(data) | changes).encode())


def swap(store: Path) -> None:
    first, second = (store / "train" / f"tokens-0000{k}.bin" for k in (0, 1))
    assert first.stat().st_size == second.stat().st_size
    first.rename(store / "other")
    second.rename(first)
    (store / "other").rename(second)


def swap_tokenizer(store: Path) -> None:
    other = make_tokenizer(store.parent / "other", bos=False)
    shutil.copy(other / "tokenizer.json", store / "tokenizer" / "tokenizer.json")


def swap_letters(store: Path) -> None:
    """As when a tokenizer is trained again: its size is the same, its hash is not."""
    file = store / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'))


def mask_all(store: Path) -> None:
    edit_facts(store, lambda facts: facts["splits"]["train"].update(targets=0))
    forged(MASK, zeros)(store)


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def longer(data: bytes) -> bytes:
    return data + b"x"


def shorter(data: bytes) -> bytes:
    return data[:-1]


SHARD, OFFSETS, MASK = "train/tokens-00000.bin", "train/offsets.bin", "train/loss_mask.bin"
FACTS, TOKENIZER = "store.json", "tokenizer/tokenizer.json"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "a shard of odd length": (rewrite(SHARD, longer), f"{SHARD}: expected 600 bytes, found 601"),
    "a shard of zeros": (rewrite(SHARD, zeros), f"{SHARD}: expected unaltered"),
    "a shard missing": (unlink(SHARD), f"{SHARD}: expected a file of the token"),
    "shards exchanged": (swap, f"{SHARD}: expected unaltered contents"),
    "store.json edited": (
        rewrite(FACTS, lambda data: data.replace(b'"<u2"', b'"<u4"')),
        f"{FACTS}: expected unaltered contents",
    ),
    "a newer format": (edit(format_version=99), "expected format_version 2, found 99"),
    "another tokenizer": (swap_tokenizer, f"{TOKENIZER}: expected"),
    "a tokenizer of the same size": (swap_letters, "expected the tokenizer that wrote the store"),
    "offsets that fall": (number(OFFSETS, "<i8", 5, 0), f"{OFFSETS}: expected rising offsets"),
    "offsets that rise too far": (number(OFFSETS, "<i8", 5, 1 << 62), f"{OFFSETS}: expected rising"),
    "a document over two shards": (number(OFFSETS, "<i8", 10, 301), f"{OFFSETS}: expected every shard to"),
    "ids beyond the vocabulary": (
        number(SHARD, "<u2", 77, 60000),
        f"{SHARD}: expected token ids below vocab_size 259, found 60000 at 77",
    ),
    "a mask too short": (forged(MASK, shorter), f"{MASK}: expected .* numbers of uint8"),
    "a mask of other bits": (rewrite(MASK, zeros), f"{MASK}: expected unaltered"),
    "no token to train on": (mask_all, "expected tokens to train on, found all [0-9]+ masked"),
    "no store": (unlink(FACTS), "expected a folder with store.json"),
}
"""What is done to a store, and what is said of it."""
SAMPLED = ("shards exchanged", "a mask of other bits")
"""What a store too large to be read when it is opened is searched for by samples."""


def short_options(store: Path, folder: Path) -> list[str]:
    return run_options("tiny-moe", store, "training.max_steps=8 training.sequence_length=64", folder=folder)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_store_ends_a_run_before_its_first_step(
    here: Path, sharded: Path, capsys: pytest.CaptureFixture[str], name: str
):
    store = Path(shutil.copytree(sharded, here / "store"))
    token_store.TokenStore(store)  # sound, and already verified once in this process
    damage, message = DAMAGE[name]
    damage(store)
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
    damage, message = DAMAGE[name]
    damage(store)
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
        number(f"train/{file.name}", "<u2", 29, 60000)(store)
    assert train(*short_options(store, here / "run")) == 65
    assert "expected token ids below vocab_size 259, found 60000 in sequence" in capsys.readouterr().err
    rows = (here / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} <= {0}
