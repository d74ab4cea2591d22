"""Token files of nanoGPT and llm.c become stores with the same tokens."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support.corpora import make_store, make_tokenizer

from llm_pretrain.__main__ import main
from llm_pretrain.data.conversion import TokenType, convert
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.errors import ConfigError, DataError

EOS = 257  # of the tokenizer below: 256 bytes, <s> 256, </s> 257, <pad> 258


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "bytes")


def to_store(inputs: list[Path], output: Path, tokenizer: Path | None, **options) -> TokenStore:
    convert([str(p) for p in inputs], output, tokenizer=tokenizer, **options)
    return TokenStore(output)


def documents(store: TokenStore, split: str = "train") -> list[list[int]]:
    return [ids.tolist() for ids, _ in store.split(split).iterate()]


def same_splits(ours: TokenStore, theirs: TokenStore) -> bool:
    """Whether ids, boundaries and masks of both splits are the same, and every count of store.json."""
    for name in ("train", "validation"):
        pairs = zip(ours.split(name).iterate(), theirs.split(name).iterate(), strict=True)
        if not all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in pairs):
            return False
    return ours.facts["splits"] == theirs.facts["splits"] and ours.facts["dtype"] == theirs.facts["dtype"]


def test_the_ids_of_a_store_become_the_same_store(tmp_path: Path):
    store = make_store(tmp_path / "store")
    (tmp_path / "n").mkdir()
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        ids = [token for each in documents(store, split) for token in each]
        np.array(ids, dtype="<u2").tofile(tmp_path / "n" / name)
    shutil.copytree(store.path / "tokenizer", tmp_path / "n" / "tokenizer")
    again = to_store([tmp_path / "n"], tmp_path / "again", None)
    assert same_splits(again, store)
    token_files = ("train/tokens-00000.bin", "train/offsets.bin", "validation/tokens-00000.bin")
    assert all((again.path / f).read_bytes() == (store.path / f).read_bytes() for f in token_files)
    assert again.zlib_bits_per_byte == store.zlib_bits_per_byte


def header(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    return struct.pack("<256i", magic, version, count, *[0] * 253)


@pytest.mark.parametrize(
    ("start", "dtype"),
    [(b"", "<u2"), (header(9), "<u2"), (header(9, 20240801, 7), "<u4")],
    ids=["nanogpt", "llm.c", "llm.c with uint32"],
)
def test_documents_end_with_eos_and_begin_as_ours_do(
    tmp_path: Path, tokenizer: Path, start: bytes, dtype: str
):
    """As GPT-2's tokens lie in train.bin; modded-nanogpt begins with an end, and cuts the last."""
    stream = np.array([EOS, 65, 66, EOS, EOS, 67, EOS, 68, 69], dtype=dtype)
    (tmp_path / "train.bin").write_bytes(start + stream.tobytes())
    store = to_store([tmp_path / "train.bin"], tmp_path / "s", tokenizer, validation_fraction=0)
    assert documents(store) == [[256, 65, 66, EOS], [256, 67, EOS], [256, 68, 69]]
    facts = store.facts["splits"]["train"]
    assert (facts["text_bytes"], facts["targets"]) == (5, 7)
    assert store.facts["skipped"] == {"empty document": 2}


@pytest.mark.parametrize("validation", ["fineweb_val_000000", "dev", "Validation-data"])
def test_files_named_val_are_the_validation_split(tmp_path: Path, tokenizer: Path, validation: str):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for name, token in (
        ("fineweb_train_000002", 66),
        ("fineweb_train_000001", 65),
        (validation, 67),
        ("fineweb.test", 68),
    ):
        np.array([token, EOS], dtype="<u2").tofile(folder / f"{name}.bin")
    report = convert([str(folder)], tmp_path / "s", tokenizer=tokenizer)
    assert report.left_out == [str(folder / "fineweb.test.bin")]
    store = TokenStore(tmp_path / "s")
    assert documents(store) == [[256, 65, EOS], [256, 66, EOS]]
    assert documents(store, "validation") == [[256, 67, EOS]]


def nanogpt_characters(folder: Path, text: str, protocol: int | None = None) -> dict[int, str]:
    """train.bin, val.bin and meta.pkl, as nanoGPT's `data/shakespeare_char/prepare.py` writes them."""
    folder.mkdir()
    itos = dict(enumerate(sorted(set(text))))
    stoi = {character: index for index, character in itos.items()}
    ids = np.array([stoi[character] for character in text], dtype="<u2")
    ids[: len(ids) // 2].tofile(folder / "train.bin")
    ids[len(ids) // 2 :].tofile(folder / "val.bin")
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    return itos


PLAY = "First Citizen:\nBefore we proceed any further, hear me speak! 你好▁😀\n" * 3


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_nanogpts_meta_gives_the_tokenizer(tmp_path: Path, protocol: int, capsys):
    itos = nanogpt_characters(tmp_path / "play", PLAY, protocol)
    command = ["convert", "--from", "nanogpt", "--input", str(tmp_path / "play")]
    assert main([*command, "--output", str(tmp_path / "s")]) == 0
    assert "warning" not in capsys.readouterr().out
    store = TokenStore(tmp_path / "s")
    tokenizer = open_tokenizer(tmp_path / "s" / "tokenizer")
    [train], [validation] = documents(store), documents(store, "validation")
    assert tokenizer.decode([*train, *validation]) == PLAY
    assert [tokenizer.token(index) for index in itos] == list(itos.values())
    assert tokenizer.encode([PLAY]) == [[*train[1:], *validation[1:]]]
    assert tokenizer.decode(tokenizer.encode(["Größe </s>"])[0]) == "Größe </s>"


def test_ids_of_other_characters_than_the_tokenizers_are_refused(tmp_path: Path):
    """Of a character tokenizer of ours, nanoGPT's ids are special tokens and bytes."""
    nanogpt_characters(tmp_path / "play", PLAY)
    (tmp_path / "text.txt").write_text(PLAY, encoding="utf-8")
    train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "ours", None, type="char")
    with pytest.raises(DataError, match=r"meta\.pkl: .* found id 0 as '\\n' instead of ''") as caught:
        to_store([tmp_path / "play"], tmp_path / "s", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    (tmp_path / "play" / "meta.pkl").unlink()
    with pytest.raises(DataError, match="found special and byte tokens alone"):
        to_store([tmp_path / "play"], tmp_path / "s", tmp_path / "ours")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch opened'\ntR.",
        b"\x80\x04\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of a terabyte
        b"\x80\x02r\xff\xff\xff\x7f.",  # an index of the memo
        b"",
        pickle.dumps({"itos": {1: "a"}}),
        pickle.dumps({"itos": {0: "\ud800"}}),
        pickle.dumps({"itos": {0: "word"}}),
    ],
)
def test_no_code_of_a_meta_runs(tmp_path: Path, content: bytes, tokenizer: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nanogpt_characters(tmp_path / "play", "abc")
    (tmp_path / "play" / "meta.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"meta\.pkl: expected nanoGPT's characters") as caught:
        to_store([tmp_path / "play" / "train.bin"], tmp_path / "s", tokenizer)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "opened").exists()


def test_equal_documents_fall_into_one_split_and_neither_split_is_empty(tmp_path: Path, tokenizer: Path):
    stream = [token for index in range(100) for token in (index % 50, 7, EOS)]
    np.array(stream, dtype="<u2").tofile(tmp_path / "a.bin")
    for fraction in (0.0001, 0.9999):
        output = tmp_path / f"s{fraction}"
        store = to_store([tmp_path / "a.bin"], output, tokenizer, validation_fraction=fraction)
        train, validation = (documents(store, name) for name in ("train", "validation"))
        assert len(train) + len(validation) == 100
        assert train
        assert validation
        assert not {tuple(ids) for ids in train} & {tuple(ids) for ids in validation}


def token_file(*ids: int, times: int = 1, dtype: str = "<u2") -> bytes:
    return np.tile(np.array(ids, dtype=dtype), times).tobytes()


def npy_file(ids: list) -> bytes:
    np.save(file := io.BytesIO(), np.array(ids))
    return file.getvalue()


WRONG: dict[str, tuple[bytes | Callable[[Path], object], str]] = {
    "no file": (lambda path: None, "n.bin: expected a readable file"),
    "a pipe": (os.mkfifo, "n.bin: .* no plain file"),
    "an odd number of bytes": (token_file(65, EOS)[:-1], "n.bin: expected 2 bytes for each uint16, found 3"),
    "an id too large": (token_file(65, 259, EOS), "expected token ids below vocab_size 259, found 259 at 1"),
    "too few for its header": (header(3) + b"\0\0", "expected 3 tokens as its header says, 1030 bytes"),
    "another version": (header(1, version=9) + b"\0\0", "found version 9"),
    "int64": (token_file(65, 66, EOS, dtype="<i8"), "n.bin: expected uint16 .*; use --dtype int64"),
    "uint32": (token_file(65, 66, EOS, dtype="<u4"), "n.bin: expected uint16 .*; use --dtype uint32"),
    "uint32 cut short": (token_file(65, 66, EOS, dtype="<u4") + b"A\0", "n.bin: .*; use --dtype uint32"),
    "a .npy of floats": (npy_file([65.0, EOS]), "n.bin: expected integers .* found: float64 of shape"),
    "a .npy cut short": (npy_file([65, EOS])[:-1], "n.bin: expected integers in one dimension, found"),
    "no document": (b"\x01\x01" * 3, "expected documents, found none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_one_line_and_leave_nothing(tmp_path: Path, tokenizer: Path, name: str):
    content, message = WRONG[name]
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "n.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    with pytest.raises(DataError, match=message) as caught:
        convert([str(file)], tmp_path / "out", tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "files"]


@pytest.mark.parametrize("dtype", get_args(TokenType))
def test_a_type_that_is_named_is_read_and_another_is_refused(
    tmp_path: Path, tokenizer: Path, dtype: TokenType
):
    ids = [65, 66, EOS, 67, EOS]
    (tmp_path / "a.bin").write_bytes(token_file(*ids, dtype=dtype))
    (tmp_path / "b.npy").write_bytes(npy_file(ids))
    for name, options in (("b.npy", {}), ("a.bin", {"dtype": dtype})):
        store = to_store([tmp_path / name], tmp_path / f"{name}-store", tokenizer, **options)
        assert sorted(documents(store) + documents(store, "validation")) == [
            [256, 65, 66, EOS],
            [256, 67, EOS],
        ]
    for other in get_args(TokenType):
        if np.dtype(other).itemsize > np.dtype(dtype).itemsize:
            with pytest.raises(DataError, match=f"use --dtype {'u' * (dtype != 'int64')}int"):
                to_store([tmp_path / "a.bin"], tmp_path / "out", tokenizer, dtype=other)
    if dtype != "uint16":  # whose halves are ids too: every second one is 0
        (tmp_path / "a.bin").write_bytes(token_file(*ids * 100, dtype=dtype))
        with pytest.raises(DataError, match="expected uint16 ids of the tokenizer"):
            to_store([tmp_path / "a.bin"], tmp_path / "out", tokenizer, dtype="uint16")


def test_a_vocabulary_beyond_uint16_asks_for_the_type(tmp_path: Path, tokenizer: Path):
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"<s>": 256, "</s>": EOS, "<pad>": 258}
    content["model"]["vocab"] |= {f"word {index}": index for index in range(259, 70_000)}
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.bin").write_bytes(token_file(65, EOS))
    with pytest.raises(DataError, match=r"ids of the tokenizer, which has 70000, .*; use --dtype uint16"):
        to_store([tmp_path / "a.bin"], tmp_path / "s", tokenizer)
    assert to_store([tmp_path / "a.bin"], tmp_path / "s", tokenizer, dtype="uint16").facts["dtype"] == "<u4"


def test_wrong_options_are_one_line(tmp_path: Path, tokenizer: Path):
    np.array([65, EOS], dtype="<u2").tofile(tmp_path / "a.bin")
    path = str(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="--tokenizer: expected the folder"):
        convert([path], tmp_path / "out")
    with pytest.raises(ConfigError, match="--validation_fraction: expected"):
        convert([path], tmp_path / "out", tokenizer=tokenizer, validation_fraction=1.0)


def test_a_file_without_an_end_of_a_document_gives_a_warning(tmp_path: Path, tokenizer: Path, capsys):
    np.array([65, 66, 67], dtype="<u2").tofile(tmp_path / "a.bin")
    command = ["convert", "--from", "nanogpt", "--input", str(tmp_path / "a.bin")]
    assert main([*command, "--tokenizer", str(tokenizer), "--output", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr().out
    assert "not one end of a document in it" in printed
    assert "train      1 documents, 4 tokens" in printed


def test_a_full_disk_leaves_nothing_behind_and_names_the_output(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
):
    """`/dev/full` stands for every file of tokens: writing to it fails when the buffer is emptied."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    np.arange(60000, dtype="<u2").__mod__(256).tofile(tmp_path / "train.bin")
    before = sorted(tmp_path.iterdir())

    def full(path: Path, mode: str = "r", *rest: object, **options: object):
        file = "/dev/full" if mode in ("wb", "xb") else path
        return open(file, mode, *rest, **options)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        arguments = ["--from", "nanogpt", "--input", str(tmp_path / "train.bin")]
        options = ["--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
        code = main(["convert", *arguments, *options])
    assert code == 74
    assert capsys.readouterr().err.endswith(f"{tmp_path / 'out'}: No space left on device\n")
    assert sorted(tmp_path.iterdir()) == before
