"""Token files of nanoGPT, llm.c and Megatron become stores with the same tokens, and stores become them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.corpora import make_store, make_tokenizer, write_jsonl

from llm_pretrain.__main__ import main
from llm_pretrain.data import Conversion, TokenStore, convert, open_tokenizer, train_tokenizer
from llm_pretrain.data.prepare import Preparation, conversion, prepare_store
from llm_pretrain.data.sources import token_files
from llm_pretrain.errors import ConfigError, DataError

EOS = 257  # of the tokenizer below: 256 bytes, <s> 256, </s> 257, <pad> 258
MEGATRON_PYTHON = Path(os.environ.get("MEGATRON_PYTHON", "no-such-file"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "bytes")


def to_store(source: str, inputs: list[Path], output: Path, tokenizer: Path | None, **options) -> TokenStore:
    convert(Conversion(source, "store", [str(p) for p in inputs], output, tokenizer=tokenizer, **options))
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


@pytest.mark.parametrize("target", ["store", "megatron"])
def test_a_full_disk_leaves_nothing_behind_and_names_the_output(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], target: str
):
    """`/dev/full` stands for every file of tokens: writing to it fails when the buffer is emptied."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    np.arange(60000, dtype="<u2").__mod__(256).tofile(tmp_path / "train.bin")
    source = "nanogpt"
    if target == "megatron":
        to_store("nanogpt", [tmp_path / "train.bin"], tmp_path / "source", tokenizer, validation_fraction=0)
        source = "store"
    given = tmp_path / ("source" if source == "store" else "train.bin")
    before = sorted(tmp_path.iterdir())

    def full(path: Path, mode: str = "r", *rest: object, **options: object):
        file = "/dev/full" if mode in ("wb", "xb") else path
        return open(file, mode, *rest, **options)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        arguments = ["--from", source, "--input", str(given), "--tokenizer", str(tokenizer)]
        code = main(["convert", *arguments, "--to", target, "--output", str(tmp_path / "out")])
    assert code == 74
    assert capsys.readouterr().err.endswith(f"{tmp_path / 'out'}: No space left on device\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("masked", [False, True])
def test_a_store_goes_to_megatron_and_back_unchanged(tmp_path: Path, masked: bool):
    store = make_store(tmp_path / "store", masked=masked)
    report = convert(Conversion("store", "megatron", [str(store.path)], tmp_path / "m"))
    assert (report.masked > 0) == masked
    assert (tmp_path / "m" / "train-loss_mask.bin").exists() == masked
    again = to_store("megatron", [tmp_path / "m"], tmp_path / "again", None)
    assert same_splits(again, store)
    token_files = ("train/tokens-00000.bin", "train/offsets.bin", "validation/tokens-00000.bin")
    assert all((again.path / f).read_bytes() == (store.path / f).read_bytes() for f in token_files)
    assert again.zlib_bits_per_byte == store.zlib_bits_per_byte


def test_a_store_of_many_shards_goes_whole(tmp_path: Path, tokenizer: Path):
    corpus = write_jsonl(
        tmp_path / "c.jsonl", [{"prompt": f"{i} ", "completion": "x" * i} for i in range(99)]
    )
    store = prepare_store(Preparation([str(corpus)], tokenizer, tmp_path / "s", workers=1, shard_bytes=500))
    assert len(store.split("train").shards) > 5
    convert(Conversion("store", "megatron", [str(store.path)], tmp_path / "m"))
    again = to_store("megatron", [tmp_path / "m"], tmp_path / "again", None)
    assert documents(again) == documents(store)
    masks = [[mask.tolist() for _, mask in s.split("train").iterate()] for s in (store, again)]
    assert masks[0] == masks[1]


def test_keep_ids_leaves_documents_without_bos_unchanged(tmp_path: Path, tokenizer: Path):
    records = [{"input_ids": [5, 6, i], "loss_mask": [1, 0, 1]} for i in range(40)]
    corpus = write_jsonl(tmp_path / "c.jsonl", records)
    store = prepare_store(Preparation([str(corpus)], tokenizer, tmp_path / "s", workers=1))
    convert(Conversion("store", "megatron", [str(store.path)], tmp_path / "m"))
    kept = to_store("megatron", [tmp_path / "m"], tmp_path / "kept", None, keep_ids=True)
    assert same_splits(kept, store)
    framed = to_store("megatron", [tmp_path / "m"], tmp_path / "framed", None)
    assert documents(framed) == [[256, *ids] for ids in documents(store)]
    assert all(mask.tolist() == [True, True, False, True] for _, mask in framed.split("train").iterate())


def test_a_store_goes_to_nanogpt_and_back(tmp_path: Path, capsys):
    store = make_store(tmp_path / "store")
    files = ["convert", "--from", "store", "--to", "nanogpt", "--input", str(store.path)]
    assert main([*files, "--output", str(tmp_path / "n")]) == 0
    assert "lost" not in capsys.readouterr().out
    tokens = np.fromfile(tmp_path / "n" / "train.bin", dtype="<u2")
    assert tokens.tolist() == [token for ids in documents(store) for token in ids]
    assert same_splits(to_store("nanogpt", [tmp_path / "n"], tmp_path / "again", None), store)


def prepared(folder: Path, tokenizer: Path, ids: list[list[int]]) -> tuple[TokenStore, list[str]]:
    """A store of documents, and the command that converts it to nanoGPT's file."""
    corpus = write_jsonl(folder / "c.jsonl", [{"input_ids": each} for each in ids])
    options = {"validation_fraction": 0.0, "workers": 1}
    store = prepare_store(Preparation([str(corpus)], tokenizer, folder / "s", **options))
    return store, ["convert", "--from", "store", "--to", "nanogpt", "--input", str(store.path)]


def test_documents_without_an_end_stay_apart_in_nanogpts_file(tmp_path: Path, tokenizer: Path, capsys):
    """A conversation ends in a newline behind its own end token, never in eos."""
    ids = [*([256, 70 + i, 10] for i in range(5)), [256, 90, EOS]]
    store, command = prepared(tmp_path, tokenizer, ids)
    assert main([*command, "--output", str(tmp_path / "n")]) == 0
    assert "added      5 eos tokens, one to each document" in capsys.readouterr().out
    again = to_store(
        "nanogpt", [tmp_path / "n" / "train.bin"], tmp_path / "b", tokenizer, validation_fraction=0.0
    )
    expected = [[*ids, EOS] if ids[-1] != EOS else ids for ids in documents(store)]
    assert sorted(documents(again)) == sorted(expected)
    assert main([*command, "--keep_ids", "--output", str(tmp_path / "kept")]) == 0
    assert "5 documents end without the eos token and run into the next one" in capsys.readouterr().out
    tokens = np.fromfile(tmp_path / "kept" / "train.bin", dtype="<u2")
    assert tokens.tolist() == [token for ids in documents(store) for token in ids]


def test_an_end_inside_a_document_is_reported_for_nanogpts_file(tmp_path: Path, tokenizer: Path, capsys):
    """Its file separates documents by eos alone, so the document comes back as two."""
    _, command = prepared(tmp_path, tokenizer, [[EOS, 70, EOS, 71, EOS], [EOS, 90, EOS]])
    assert main([*command, "--output", str(tmp_path / "n")]) == 0
    assert "warning    1 eos tokens inside documents" in capsys.readouterr().out


def test_a_mask_lost_in_nanogpts_format_is_reported(tmp_path: Path, masked_store: TokenStore, capsys):
    command = ["convert", "--from", "store", "--to", "nanogpt", "--input", str(masked_store.path)]
    assert main([*command, "--output", str(tmp_path / "n")]) == 0
    assert "nanogpt has no place for the loss mask: it is lost" in capsys.readouterr().out


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
    store = to_store("nanogpt", [tmp_path / "train.bin"], tmp_path / "s", tokenizer, validation_fraction=0)
    assert documents(store) == [[256, 65, 66, EOS], [256, 67, EOS], [256, 68, 69]]
    facts = store.facts["splits"]["train"]
    assert (facts["text_bytes"], facts["targets"]) == (5, 7)
    assert store.facts["skipped"] == {"empty document": 2}
    kept = to_store(
        "nanogpt", [tmp_path / "train.bin"], tmp_path / "k", tokenizer, keep_ids=True, validation_fraction=0
    )
    assert [token for ids in documents(kept) for token in ids] == stream.tolist()


def test_files_named_val_are_the_validation_split(tmp_path: Path, tokenizer: Path):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for name, token in (
        ("fineweb_train_000002", 66),
        ("fineweb_train_000001", 65),
        ("fineweb_val_000000", 67),
    ):
        np.array([token, EOS], dtype="<u2").tofile(folder / f"{name}.bin")
    store = to_store("nanogpt", [folder], tmp_path / "s", tokenizer)
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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nanogpts_meta_gives_the_tokenizer(tmp_path: Path, protocol: int, capsys):
    itos = nanogpt_characters(tmp_path / "play", PLAY, protocol)
    command = ["convert", "--from", "nanogpt", "--to", "store", "--input", str(tmp_path / "play")]
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
        to_store("nanogpt", [tmp_path / "play"], tmp_path / "s", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    (tmp_path / "play" / "meta.pkl").unlink()
    with pytest.raises(DataError, match="found special and byte tokens alone"):
        to_store("nanogpt", [tmp_path / "play"], tmp_path / "s", tmp_path / "ours")
    assert not (tmp_path / "s").exists()


def test_the_tokenizer_of_meta_may_be_named_too(tmp_path: Path):
    nanogpt_characters(tmp_path / "play", PLAY)
    first = to_store("nanogpt", [tmp_path / "play"], tmp_path / "s", None)
    again = to_store("nanogpt", [tmp_path / "play"], tmp_path / "t", tmp_path / "s" / "tokenizer")
    assert same_splits(first, again)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch opened'\ntR.",
        b"\x80\x04\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of a terabyte
        b"\x80\x02r\xff\xff\xff\x7f.",  # an index of the memo
        b"",
        b"\x80\x04]",
        pickle.dumps([1]),
        pickle.dumps({"itos": {1: "a"}}),
        pickle.dumps({"itos": {0: 3}}),
        pickle.dumps({"itos": {0: "\ud800"}}),
        pickle.dumps({"itos": {0: "word"}}),
    ],
)
def test_no_code_of_a_meta_runs(tmp_path: Path, content: bytes, tokenizer: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nanogpt_characters(tmp_path / "play", "abc")
    (tmp_path / "play" / "meta.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"meta\.pkl: expected nanoGPT's characters") as caught:
        to_store("nanogpt", [tmp_path / "play" / "train.bin"], tmp_path / "s", tokenizer)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "opened").exists()


def test_a_meta_without_characters_says_nothing(tmp_path: Path, tokenizer: Path):
    nanogpt_characters(tmp_path / "play", "abc")
    (tmp_path / "play" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50304}))
    to_store("nanogpt", [tmp_path / "play"], tmp_path / "s", tokenizer)


def test_equal_documents_fall_into_one_split_and_neither_split_is_empty(tmp_path: Path, tokenizer: Path):
    stream = [token for index in range(100) for token in (index % 50, 7, EOS)]
    np.array(stream, dtype="<u2").tofile(tmp_path / "a.bin")
    for fraction in (0.0001, 0.3, 0.9999):
        output = tmp_path / f"s{fraction}"
        store = to_store("nanogpt", [tmp_path / "a.bin"], output, tokenizer, validation_fraction=fraction)
        train, validation = (documents(store, name) for name in ("train", "validation"))
        assert len(train) + len(validation) == 100
        assert train
        assert validation
        assert not {tuple(ids) for ids in train} & {tuple(ids) for ids in validation}


def megatron_files(prefix: Path, sequences: list[list[int]], ends: list[int], dtype: str, code: int) -> None:
    """An indexed dataset by the documented layout, written here independently of the package."""
    itemsize = np.dtype(dtype).itemsize
    pointers, at = [], 0
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * itemsize
    bin_file, index_file = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    bin_file.write_bytes(b"".join(np.array(s, dtype=dtype).tobytes() for s in sequences))
    index_file.write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<QQ", len(sequences), len(ends))
        + np.array([len(s) for s in sequences], dtype="<i4").tobytes()
        + np.array(pointers, dtype="<i8").tobytes()
        + np.array(ends, dtype="<i8").tobytes()
    )


SEQUENCES = [[1, 2, EOS], [3], [], [4, 5, EOS], [6, EOS]]
ENDS = [0, 1, 4, 4, 5]
DOCUMENTS = [[256, 1, 2, EOS], [256, 3, 4, 5, EOS], [256, 6, EOS]]


def test_prefixes_named_val_are_the_validation_split(tmp_path: Path, tokenizer: Path):
    (tmp_path / "in").mkdir()
    for name, token in (("text.train", 1), ("text.val", 2), ("text.valid.part2", 3)):
        megatron_files(tmp_path / "in" / name, [[token, EOS]], [0, 1], "<u2", 8)
    store = to_store("megatron", [tmp_path / "in"], tmp_path / "s", tokenizer)
    assert documents(store) == [[256, 1, EOS]]
    assert documents(store, "validation") == [[256, 2, EOS], [256, 3, EOS]]


@pytest.mark.parametrize(("dtype", "code"), [("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_megatrons_whole_number_types_and_documents_of_many_sequences(
    tmp_path: Path, tokenizer: Path, dtype: str, code: int
):
    megatron_files(tmp_path / "web_text_document", SEQUENCES, ENDS, dtype, code)
    for name in ("web_text_document", "web_text_document.bin", "web_text_document.idx"):
        store = to_store(
            "megatron", [tmp_path / name], tmp_path / name[-4:], tokenizer, validation_fraction=0
        )
        assert documents(store) == DOCUMENTS


@pytest.mark.parametrize(("dtype", "code"), [("u1", 1), ("i1", 2)])
def test_megatrons_bytes(tmp_path: Path, tokenizer: Path, dtype: str, code: int):
    megatron_files(tmp_path / "a", [[1, 2], [3]], [0, 1, 2], dtype, code)
    store = to_store("megatron", [tmp_path / "a"], tmp_path / "s", tokenizer, validation_fraction=0)
    assert documents(store) == [[256, 1, 2], [256, 3]]


def test_sequences_may_lie_in_any_order(tmp_path: Path, tokenizer: Path):
    megatron_files(tmp_path / "a", [[1, 2], [3]], [0, 1, 2], "<u2", 8)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34 : 34 + 8] = np.array([1, 2], dtype="<i4").tobytes()
    index[42 : 42 + 16] = np.array([4, 0], dtype="<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(bytes(index))
    store = to_store("megatron", [tmp_path / "a"], tmp_path / "s", tokenizer, validation_fraction=0)
    assert documents(store) == [[256, 3], [256, 1, 2]]


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def patch(name: str, at: int, content: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at : at + len(content)] = content
        (folder / name).write_bytes(data)

    return apply


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1]) and None


WRONG = [
    ("nanogpt", "no.bin", lambda folder: None, "no.bin: expected a readable file"),
    ("nanogpt", "n.bin", cut("n.bin"), "n.bin: expected uint16 token ids, an even number of bytes"),
    ("nanogpt", "n.bin", write("n.bin", b""), "n.bin: expected uint16 token ids"),
    (
        "nanogpt",
        "n.bin",
        patch("n.bin", 2, b"\x03\x01"),
        "expected token ids below 259, found 259 at position 1",
    ),
    (
        "nanogpt",
        "n.bin",
        write("n.bin", header(3) + b"\0\0"),
        "expected 3 tokens as its header says, 1030 bytes",
    ),
    ("nanogpt", "n.bin", write("n.bin", header(1, version=9) + b"\0\0"), "found version 9"),
    ("nanogpt", "pipe.bin", lambda folder: os.mkfifo(folder / "pipe.bin"), "pipe.bin: .* no plain file"),
    ("nanogpt", "n.bin", write("n.bin", b"\x01\x01" * 3), "expected documents, found none"),
    ("megatron", "m", lambda folder: (folder / "m.idx").unlink(), "m.idx: expected it beside m.bin"),
    ("megatron", "m", lambda folder: (folder / "m.bin").unlink(), "m.bin: expected it beside m.idx"),
    ("megatron", "m", patch("m.idx", 0, b"X"), r"m.idx: expected Megatron's index \(MMIDIDX\)"),
    ("megatron", "m", patch("m.idx", 0, b"TNTIDX\0\0"), "found its older format"),
    ("megatron", "m", write("m.idx", b"MMIDIDX\0\0"), "found another file"),
    ("megatron", "m", patch("m.idx", 9, b"\x02"), "expected version 1, found 2"),
    ("megatron", "m", patch("m.idx", 17, b"\x07"), "whole-number dtype, found float32"),
    ("megatron", "m", patch("m.idx", 17, b"\x63"), "whole-number dtype, found code 99"),
    (
        "megatron",
        "m",
        cut("m.idx"),
        "expected 106 bytes for 4 sequences and 3 document ends, found 105",
    ),
    ("megatron", "m", cut("m.bin"), "m.bin: expected 16 bytes as m.idx says, found 15 bytes"),
    (
        "megatron",
        "m",
        patch("m.idx", 50, b"\x01"),
        "m.idx: expected byte offsets .* multiples of 2, .* found 1$",
    ),
    ("megatron", "m", patch("m.idx", 50, b"\xfc" + b"\xff" * 7), "m.idx: expected byte offsets .* found -4$"),
    ("megatron", "m", patch("m.idx", 57, b"\x40"), "m.bin: expected 4611686018427387908 bytes as m.idx says"),
    ("megatron", "m", patch("m.idx", 58, b"\0"), "m.idx: expected sequences that lie apart in m.bin"),
    ("megatron", "m", patch("m.idx", 86, b"\x01"), "expected document ends rising from 0 to 4"),
    ("megatron", "m", patch("m.idx", 34, b"\xff\xff\xff\xff"), "expected document ends"),
    (
        "megatron",
        "m",
        patch("m.bin", 0, b"\xff\xff"),
        "expected token ids below 259, found 65535 at position 0",
    ),
    ("store", "s", lambda folder: (folder / "s").mkdir(), "expected a folder with store.json"),
]


@pytest.mark.parametrize(("source", "name", "damage", "message"), WRONG)
def test_wrong_files_are_one_line_and_leave_nothing(
    tmp_path: Path, source: str, name: str, damage: Callable[[Path], object], message: str
):
    folder = tmp_path / "files"
    folder.mkdir()
    np.array([65, 66, EOS], dtype="<u2").tofile(folder / "n.bin")
    megatron_files(folder / "m", [[1, 2], [3, 4], [5, 6], [7, EOS]], [0, 2, 4], "<u2", 8)
    damage(folder)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = "megatron" if source == "store" else "store"
    with pytest.raises(DataError, match=message) as caught:
        convert(Conversion(source, target, [str(folder / name)], tmp_path / "out", tokenizer=tokenizer))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "tokenizer"]


def test_wrong_options_are_one_line(tmp_path: Path, tokenizer: Path, store: TokenStore):
    np.array([65, EOS], dtype="<u2").tofile(tmp_path / "a.bin")
    path = str(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="--to: expected another format"):
        convert(Conversion("store", "store", [str(store.path)], tmp_path / "out"))
    with pytest.raises(ConfigError, match="--tokenizer: expected the folder"):
        convert(Conversion("nanogpt", "store", [path], tmp_path / "out"))
    with pytest.raises(ConfigError, match="--validation_fraction: expected"):
        convert(Conversion("nanogpt", "store", [path], tmp_path / "out", tokenizer, validation_fraction=1.0))
    with pytest.raises(DataError, match="choose another"):
        convert(Conversion("nanogpt", "store", [path], tmp_path, tokenizer=tokenizer))
    other = make_tokenizer(tmp_path / "other", bos=False)
    with pytest.raises(DataError, match="expected the tokenizer that wrote the store"):
        convert(Conversion("store", "megatron", [str(store.path)], tmp_path / "out", tokenizer=other))


def test_a_file_without_an_end_of_a_document_gives_a_warning(tmp_path: Path, tokenizer: Path, capsys):
    np.array([65, 66, 67], dtype="<u2").tofile(tmp_path / "a.bin")
    command = ["convert", "--from", "nanogpt", "--to", "store", "--input", str(tmp_path / "a.bin")]
    assert main([*command, "--tokenizer", str(tokenizer), "--output", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr().out
    assert "not one end of a document in it" in printed
    assert "train      1 documents, 4 tokens" in printed


MEGATRON_PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, DType
ours, theirs = sys.argv[1:]
found = {}
for name in ("train", "validation", "train-loss_mask"):
    data = IndexedDataset(f"{ours}/{name}")
    found[name] = [data[i].tolist() for i in range(len(data))]
    assert data.document_indices.tolist() == list(range(len(data) + 1))
import torch
for dtype in (numpy.uint16, numpy.int32, numpy.int64):
    builder = IndexedDatasetBuilder(f"{theirs}/{dtype.__name__}.bin", dtype=dtype)
    for part in ([1, 2, 257], [3], [4, 257]):
        builder.add_item(torch.tensor(part))
        if part[-1] == 257:
            builder.end_document()
    builder.finalize(f"{theirs}/{dtype.__name__}.idx")
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not MEGATRON_PYTHON.is_file(), reason="MEGATRON_PYTHON names no Python with megatron-core"
)
def test_megatron_core_reads_ours_and_we_read_its(tmp_path: Path, tokenizer: Path):
    store = make_store(tmp_path / "store", masked=True)
    convert(Conversion("store", "megatron", [str(store.path)], tmp_path / "m"))
    (tmp_path / "theirs").mkdir()
    command = [str(MEGATRON_PYTHON), "-c", MEGATRON_PROBE, str(tmp_path / "m"), str(tmp_path / "theirs")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = json.loads(result.stdout.strip().splitlines()[-1])
    for name in ("train", "validation"):
        assert found[name] == documents(store, name)
    assert found["train-loss_mask"] == [
        mask.astype(int).tolist() for _, mask in store.split("train").iterate()
    ]
    for name in ("uint16", "int32", "int64"):
        theirs = tmp_path / "theirs" / name
        store = to_store("megatron", [theirs], tmp_path / name, tokenizer, validation_fraction=0)
        assert documents(store) == [[256, 1, 2, EOS], [256, 3, 4, EOS]]
        shutil.rmtree(tmp_path / name)


def unframed(self: object, batch: object) -> object:
    """In place of `_Reader._framed`: adds no first tokens."""
    return batch


def cut_before_the_end(path: Path, end_of_document: int) -> token_files.DocumentFile:
    """In place of `open_nanogpt`: every document but the last loses its EOS to the next."""
    file = open_nanogpt(path, end_of_document)
    inner = file.offsets[1:-1] - 1
    return replace(file, offsets=np.concatenate([file.offsets[:1], inner, file.offsets[-1:]]))


open_nanogpt = token_files.open_nanogpt


@pytest.mark.parametrize(
    "fault",
    [(conversion._Reader, "_framed", unframed), (token_files, "open_nanogpt", cut_before_the_end)],
    ids=["first tokens not added", "cut before the end instead of after it"],
)
def test_documents_framed_wrongly_are_detected(
    tmp_path: Path, tokenizer: Path, fault: tuple, monkeypatch: pytest.MonkeyPatch
):
    """The two mistakes that keep all ids but change the targets."""
    np.array([65, 66, EOS, 67, 68, EOS], dtype="<u2").tofile(tmp_path / "a.bin")
    right = to_store("nanogpt", [tmp_path / "a.bin"], tmp_path / "s", tokenizer, validation_fraction=0)
    assert documents(right) == [[256, 65, 66, EOS], [256, 67, 68, EOS]]
    monkeypatch.setattr(*fault)
    wrong = to_store("nanogpt", [tmp_path / "a.bin"], tmp_path / "w", tokenizer, validation_fraction=0)
    assert documents(wrong) != documents(right)
