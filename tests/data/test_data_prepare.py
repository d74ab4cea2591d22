"""`prepare` stores the corpus, with the same bytes at any number of workers, completely or not at all."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import make_texts, make_tokenizer, write_jsonl
from support.fuzzing import fuzzed

from llm_pretrain.__main__ import main
from llm_pretrain.data import preparation as prepare_module
from llm_pretrain.data.conversion import convert
from llm_pretrain.data.documents import EXCLUDED
from llm_pretrain.data.preparation import Preparation, SeenDocuments, prepare_store
from llm_pretrain.data.store import TokenStore, shared_documents
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.errors import DataError, OutputError


def prepare(folder: Path, *corpora: list[dict], bos: bool = True, **options) -> TokenStore:
    files = [str(write_jsonl(folder / f"{k}.jsonl", records)) for k, records in enumerate(corpora)]
    tokenizer = make_tokenizer(folder / "tokenizer", bos=bos)
    options = {"validation_fraction": 0.0, "workers": 1, **options}
    return prepare_store(Preparation(files, tokenizer, folder / "store", **options))


def all_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_documents_are_framed_and_masks_follow_the_record(tmp_path: Path):
    records = [
        {"text": "ab"},
        {"prompt": "ab", "completion": "c"},
        {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 0]},
        {"text": "</s>"},
    ]
    store = prepare(tmp_path, records)
    tokenizer = open_tokenizer(store.tokenizer_folder)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    a, b, c = (tokenizer.encode([letter])[0][0] for letter in "abc")
    documents = [(ids.tolist(), mask.tolist()) for ids, mask in store.split("train").iterate()]
    assert documents[0] == ([first, a, b, last], [True] * 4)
    assert documents[1] == ([first, a, b, c, last], [True, False, False, True, True])
    assert documents[2] == ([9, 8, 7], [False, True, False])
    assert documents[3][0].count(last) == 1  # text that looks like a special token stays text
    assert store.facts["splits"]["train"]["targets"] == 3 + 2 + 1 + 5


@pytest.mark.parametrize(
    ("documents", "fraction", "warns"), [(1, "0.01", True), (1, "0", False), (60, "0.5", False)]
)
def test_an_empty_validation_split_gives_a_warning_unless_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: int, fraction: str, warns: bool
):
    corpus = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{index}"} for index in range(documents)])
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    command = ["prepare", "--input", str(corpus), "--tokenizer", str(tokenizer), "--workers", "1"]
    options = ["--validation_fraction", fraction, "--output", str(tmp_path / "store")]
    assert main([*command, *options]) == 0
    assert ("no document is in the validation split" in capsys.readouterr().out) == warns


@pytest.mark.parametrize("workers", [1, 2])
def test_special_tokens_in_texts_are_counted_and_become_what_is_asked(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 4)
    records = [{"text": "a<s>b</s>"}, {"prompt": "<pad>", "completion": "c"}, {"text": "d"}]
    text = prepare(tmp_path / "text", records, workers=workers)
    assert [len(ids) for ids, _ in text.split("train").iterate()] == [11, 8, 3]
    tokens = prepare(tmp_path / "tokens", records, workers=workers, special_tokens="tokens")
    bos, eos, pad = tokens.bos_token_id, tokens.eos_token_id, tokens.pad_token_id
    found = [ids.tolist() for ids, _ in tokens.split("train").iterate()]
    a, b, c, d = (ids[0] for ids in open_tokenizer(tokens.tokenizer_folder).encode(list("abcd")))
    assert found == [[bos, a, bos, b, eos, eos], [bos, pad, c, eos], [bos, d, eos]]
    for store, form, size in ((text, "text", 16), (tokens, "tokens", 4)):
        assert (store.facts["special_tokens"], store.facts["special_tokens_in_texts"]) == (form, 3)
        assert store.facts["splits"]["train"]["text_bytes"] == size
        assert store.facts["altered_documents"] == 0


def test_prepare_names_the_option_for_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a<s>b"}, {"text": "c"}])
    tokenizer = make_tokenizer(tmp_path / "t")
    command = [
        "prepare",
        "--input",
        str(file),
        "--tokenizer",
        str(tokenizer),
        "--output",
        str(tmp_path / "s"),
    ]
    assert main(command) == 0
    assert "special    1 tokens in texts, read as text (--special_tokens)" in capsys.readouterr().out


def test_without_bos_the_eos_comes_first(tmp_path: Path):
    store = prepare(tmp_path, [{"text": "ab"}], bos=False)
    ids, _ = store.split("train").document(0)
    assert store.bos_token_id is None
    assert ids[0] == ids[-1] == store.eos_token_id


def test_the_store_is_the_same_at_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 4000)
    records = [{"text": text} for text in make_texts(300)] + [{"prompt": "a", "completion": "b"}]
    stores = []
    for workers in (1, 2):
        options = {"validation_fraction": 0.1, "workers": workers, "shard_bytes": 5000}
        stores.append(prepare(tmp_path / str(workers), records, **options))
    assert len(stores[0].split("train").shards) > 3
    assert all_files(stores[0].path) == all_files(stores[1].path)


def test_shards_and_mask_bits_hold_every_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 1000)
    generator = np.random.default_rng(0)
    records: list[dict] = [{"input_ids": [1, 2, 3, 4, 5]}] * 75  # fills a batch before the first mask
    for length in generator.integers(2, 90, 200).tolist():
        ids, mask = generator.integers(0, 250, length).tolist(), generator.integers(0, 2, length).tolist()
        records.append({"input_ids": ids, "loss_mask": [*mask[:-1], 1]})
    store = prepare(tmp_path, records, shard_bytes=100)
    found = [(ids.tolist(), mask.tolist()) for ids, mask in store.split("train").iterate()]
    expected = [(r["input_ids"], [bool(m) for m in r.get("loss_mask", [1] * 5)]) for r in records]
    assert found == expected


def test_the_split_is_by_document_and_equal_documents_stay_together(tmp_path: Path):
    texts = make_texts(400)
    store = prepare(tmp_path, [{"text": text} for text in texts + texts[::-1]], validation_fraction=0.2)
    splits = [{ids.tobytes() for ids, _ in store.split(name).iterate()} for name in ("train", "validation")]
    assert not splits[0] & splits[1]
    assert len(splits[0]) + len(splits[1]) == 400
    assert 50 < len(splits[1]) < 110
    assert store.split("train").documents + store.split("validation").documents == 800


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty_where_two_documents_differ(tmp_path: Path, fraction: float):
    store = prepare(tmp_path, [{"text": "a"}, {"text": "b"}, {"text": "c"}], validation_fraction=fraction)
    documents = {name: store.split(name).documents for name in ("train", "validation")}
    assert sorted(documents.values()) == [1, 2]
    assert (documents["validation"] == 1) == (fraction < 0.5)


def hashes(store: TokenStore, split: str) -> set[int]:
    return set(store.split(split).hashes.tolist())


def test_a_start_warns_of_validation_documents_that_another_store_trains_on(tmp_path: Path):
    records = [{"text": text} for text in make_texts(200)]
    wide = prepare(tmp_path / "wide", records, [{"text": "alone"}], validation_fraction=0.3)
    narrow = prepare(tmp_path / "narrow", records, validation_fraction=0.05)
    shared = hashes(wide, "validation") & hashes(narrow, "train")
    (line,) = shared_documents(["w", "n"], [wide, narrow])
    counts = (
        f"{len(shared)} of {wide.split('validation').documents} validation documents of w are trained on in n"
    )
    assert line == f"{counts}; prepare {narrow.path} again with --exclude {wide.path}"

    options = {"validation_fraction": 0.05, "exclude": [str(wide.path)], "overwrite": True}
    narrow = prepare(tmp_path / "narrow", records, **options)
    assert shared_documents(["w", "n"], [wide, narrow]) == []
    assert narrow.facts["skipped"] == {EXCLUDED: len(shared)}
    equal = prepare(tmp_path / "equal", records[50:], validation_fraction=0.3)
    assert shared_documents(["w", "e"], [wide, equal]) == []  # one threshold

    np.array([65, 257], dtype="<u2").tofile(tmp_path / "a.bin")
    convert([str(tmp_path / "a.bin")], tmp_path / "ids", tokenizer=wide.tokenizer_folder)
    with pytest.raises(DataError, match="ids: expected a store of prepare, found ids that convert took over"):
        prepare(tmp_path / "narrow", records, **options | {"exclude": [str(tmp_path / "ids")]})


@pytest.mark.parametrize("workers", [1, 2])
def test_validation_input_is_validated_on_and_never_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 1000)
    texts = make_texts(80)
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": text} for text in texts[:9]])
    options = {"validation_fraction": 0.5, "validation_input": [str(own)], "workers": workers}
    store = prepare(tmp_path, [{"text": text} for text in texts], deduplicate=True, **options)
    tokenizer = open_tokenizer(store.tokenizer_folder)
    for name, expected in (("validation", texts[:9]), ("train", texts[9:])):
        assert [tokenizer.decode(ids[1:-1].tolist()) for ids, _ in store.split(name).iterate()] == expected
    assert store.facts["input_documents"] == [71, 9]
    assert store.zlib_bits_per_byte


def test_counts_bytes_and_zlib_are_those_of_the_text(tmp_path: Path):
    texts = make_texts(100)
    store = prepare(tmp_path, [{"text": text} for text in texts], validation_fraction=0.3)
    total = sum(store.split(name).text_bytes for name in ("train", "validation"))
    assert total == sum(len(text.encode()) for text in texts)
    tokenizer = open_tokenizer(store.tokenizer_folder)
    joined = "".join(
        tokenizer.decode(ids.tolist()) for ids, _ in store.split("validation").iterate()
    ).encode()
    assert len(joined) == store.split("validation").text_bytes
    expected = 8 * len(zlib.compress(joined, 9)) / len(joined)
    assert store.zlib_bits_per_byte == pytest.approx(expected, rel=1e-3)
    ids = store.split("validation").document(0)[0]
    assert store.token_bytes()[ids].sum() == len(tokenizer.decode(ids.tolist()).encode())


@pytest.mark.parametrize(
    ("normalizer", "text", "altered"),
    [
        (None, "ABC", 0),
        ({"type": "Lowercase"}, "ABC", 1),
        ({"type": "Lowercase"}, "abc", 0),
        ({"type": "NFD"}, "a\u0302\u0323", 1),
    ],
)
def test_a_text_altered_to_one_of_its_length_is_counted(
    tmp_path: Path, normalizer: dict | None, text: str, altered: int
):
    folder = make_tokenizer(tmp_path / "tokenizer")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": normalizer}))
    corpus = write_jsonl(tmp_path / "a.jsonl", [{"text": text}, {"prompt": "ok", "completion": "ok"}])
    store = prepare_store(Preparation([str(corpus)], folder, tmp_path / "store", workers=1))
    assert store.facts["altered_documents"] == altered


def test_a_text_that_the_tokenizer_cannot_encode_is_a_bad_record(tmp_path: Path):
    """A pattern that backtracks too long is a panic of the library, which is no Exception."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    texts = [*make_texts(5), "a" * 60, *make_texts(4, seed=1)]
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    preparation = Preparation([str(corpus)], tokenizer, tmp_path / "store", workers=1)
    with pytest.raises(DataError, match=r"c\.jsonl:6: tokenizer error: .*retry-limit.* --on_error skip$"):
        prepare_store(preparation)
    store = prepare_store(replace(preparation, on_error="skip"))
    assert store.facts["skipped"] == {"tokenizer error": 1}
    assert sum(split["documents"] for split in store.facts["splits"].values()) == 9


def test_a_text_for_which_memory_is_too_small_is_no_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    tokenizer = open_tokenizer(make_tokenizer(tmp_path / "t"))
    monkeypatch.setattr(tokenizer, "_text_backend", SimpleNamespace(encode_batch_fast=exhausted))
    with pytest.raises(MemoryError):
        tokenizer.encode(["one"])


def test_an_existing_store_is_replaced_only_with_overwrite(tmp_path: Path):
    old = prepare(tmp_path, [{"text": "old"}])
    with pytest.raises(DataError, match="--overwrite"):
        prepare(tmp_path, [{"text": "new"}])
    assert TokenStore(old.path).hash == old.hash
    assert prepare(tmp_path, [{"text": "new"}], overwrite=True).hash != old.hash
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    preparation = Preparation(["stdlib"], tmp_path / "tokenizer", tmp_path / "mine", overwrite=True)
    with pytest.raises(DataError, match="choose another"):
        prepare_store(preparation)


def test_overwrite_removes_no_file_but_the_stores(tmp_path: Path):
    """The folder holds the input, or another program's `store.json`; nothing in it changes."""
    store = prepare(tmp_path, [{"text": "old"}])
    (store.path / "index").mkdir()
    (store.path / "index" / "train-wrap-32.bin").touch()  # a run's packing index
    assert prepare(tmp_path, [{"text": "new"}], overwrite=True).path == store.path
    corpus = write_jsonl(store.path / "corpus.jsonl", [{"text": "the only copy"}])
    before = all_files(store.path)
    preparation = Preparation([str(corpus)], tmp_path / "tokenizer", store.path, overwrite=True, workers=1)
    with pytest.raises(DataError, match=r"found corpus\.jsonl in it, which is not the store's"):
        prepare_store(preparation)
    assert all_files(store.path) == before
    corpus.rename(tmp_path / "moved.jsonl")
    (store.path / "store.json").write_text('{"store": "of another program"}')
    before = all_files(store.path)
    with pytest.raises(DataError, match="expected a new folder or a token store, found something else"):
        prepare_store(replace(preparation, input=[str(tmp_path / "moved.jsonl")]))
    assert all_files(store.path) == before


def test_a_file_put_into_the_store_while_another_is_prepared_stays(tmp_path: Path):
    store = prepare(tmp_path, [{"text": "old"}])
    late = store.path / "notes.txt"
    with pytest.raises(OutputError, match=r"found notes\.txt in it"):
        prepare(tmp_path, [{"text": "new"}], overwrite=True, progress=lambda _: late.touch())
    assert late.exists()
    assert TokenStore(store.path).hash == store.hash
    late.unlink()
    assert prepare(tmp_path, [{"text": "new"}], overwrite=True).hash != store.hash


def test_the_folder_for_the_work_is_not_taken_from_somebody(tmp_path: Path):
    work = tmp_path / ".store.partial"
    for name in ("thesis.txt", "store/thesis.txt", "state.json"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text("mine")
        with pytest.raises(OutputError, match=r"\.store\.partial: .* found "):
            prepare(tmp_path, [{"text": "a"}])
        assert (work / name).read_text() == "mine"
        shutil.rmtree(work)


@fuzzed(40)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=30))
def test_a_key_is_new_only_once(batches: list[list[int]]):
    seen, known = SeenDocuments(), set()
    for batch in batches:
        expected = []
        for key in batch:
            expected.append(key not in known)
            known.add(key)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected


def test_only_equal_text_with_equal_targets_is_a_duplicate(tmp_path: Path):
    kinds: list[dict] = [
        {"text": "ab"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "", "completion": "ab"},
        {"segments": [{"text": "a", "loss": True}, {"text": "b", "loss": False}]},
        {"text": "ab "},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    same = [{"text": "ab", "id": 5}]
    same += [{"input_ids": [5, 6, 7], "loss_mask": mask} for mask in ([False, True, True], [0, True, 1])]
    store = prepare(tmp_path, kinds, kinds[::-1], same, deduplicate=True)
    assert store.facts["duplicates"] == len(kinds) + 3
    assert store.facts["input_documents"] == [len(kinds), 0, 0]


def test_a_store_without_duplicates_is_that_of_the_different_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 2000)
    texts = make_texts(200)
    repeated = texts[:120] + texts[40:200] + texts[::-1]
    halves = [[{"text": text} for text in part] for part in (repeated[:150], repeated[150:])]
    options = {"validation_fraction": 0.2, "deduplicate": True}
    store = prepare(tmp_path / "all", *halves, workers=2, **options)
    once = prepare(tmp_path / "once", [{"text": text} for text in texts], **options)
    assert store.facts["duplicates"] == len(repeated) - len(texts)
    assert store.zlib_bits_per_byte == once.zlib_bits_per_byte
    for split in ("train", "validation"):
        found, expected = (list(s.split(split).iterate()) for s in (store, once))
        assert [ids.tolist() for ids, _ in found] == [ids.tolist() for ids, _ in expected]


@pytest.mark.parametrize(
    ("name", "text", "fraction", "validation"),
    [
        ("input.txt", "a line\n" * 100, "0.05", "a line\n" * 5),
        ("input.txt", "a line\n" * 100, "0", ""),
        ("a b.md", "a line that is long\nand the rest of one", "0.5", "and the rest of one"),
        ("title.txt", "a title\n" + "a line of all the rest " * 9, "0.1", ""),
        ("input.txt", "no line ends", "0.5", ""),
        ("input.txt", '{"text": "one"}\n{"text": "two"}\n', "0.01", None),
        ("input.jsonl", '{"text": "one\\nlone\\ndocument"}\n', "0.1", ""),
    ],
)
def test_the_last_lines_of_a_lone_text_are_its_validation_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name, text, fraction, validation
):
    (tmp_path / name).write_text(text)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    command = ["prepare", "--input", str(tmp_path / name), "--tokenizer", str(tokenizer)]
    assert main([*command, "--validation_fraction", fraction, "--output", str(tmp_path / "store")]) == 0
    store = TokenStore(tmp_path / "store")
    decode = open_tokenizer(store.tokenizer_folder).decode
    train, kept = (
        [decode(ids.tolist()) for ids, _ in store.split(split).iterate()] for split in ("train", "validation")
    )
    printed = capsys.readouterr().out
    if validation is None:  # documents of their own, chosen by hash
        assert sorted(train + kept) == ["one", "two"]
        return
    if name != "input.jsonl":
        assert "".join(train + kept) == text
    assert "".join(kept) == validation
    assert ("for validation from byte" in printed) == bool(validation)
    assert ("no document is in the validation split" in printed) == (fraction != "0" and not validation)


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (b"a line\n" * 50 + b"\xff\n", (), "invalid UTF-8: found byte 0xff at offset 350"),
        (b"a line\n" * 50 + b"\xff\n", ("--on_error", "skip"), "expected documents to train on, found none"),
        (
            b"a line\n" * 2,
            ("--validation_fraction", "0.5", "--deduplicate"),
            "expected documents to train on",
        ),
    ],
)
def test_a_lone_text_without_a_document_to_train_on_is_refused(
    tmp_path: Path, capsys, content, options, expected
):
    (tmp_path / "input.txt").write_bytes(content)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    command = ["prepare", "--input", str(tmp_path / "input.txt"), "--tokenizer", str(tokenizer)]
    assert main([*command, *options, "--output", str(tmp_path / "store")]) == 65
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_lone_text_that_another_store_validates_on_is_excluded_as_a_whole(tmp_path: Path, capsys):
    (tmp_path / "input.txt").write_text("a line\n" * 50)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    own, text = str(tmp_path / "input.txt"), write_jsonl(tmp_path / "b.jsonl", [{"text": "another"}])
    command = ["prepare", "--tokenizer", str(tokenizer), "--workers", "1"]
    first = ["--input", str(text), "--validation_input", own, "--output", str(tmp_path / "first")]
    assert main([*command, *first]) == 0
    second = ["--input", own, "--exclude", str(tmp_path / "first"), "--output", str(tmp_path / "second")]
    assert main([*command, *second]) == 65
    assert "expected documents to train on, found none" in capsys.readouterr().err
