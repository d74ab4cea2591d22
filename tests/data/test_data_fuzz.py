"""Fuzz tests: any content of a file is read as valid data or rejected with a one-line error."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from support.corpora import forge_digests, make_store, make_texts, make_tokenizer
from support.fuzzing import VALUES, altered_bytes, altered_json, dumped, fuzzed
from support.table_files import arrow, delimited, parquet

from llm_pretrain.data.chat import encode_chat
from llm_pretrain.data.documents import RawRecord, RecordError, parse_record
from llm_pretrain.data.encoding import Encoder
from llm_pretrain.data.inspection import inspect_store, sample_documents
from llm_pretrain.data.packing import pack
from llm_pretrain.data.readers import read_records
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizer_training import CHAT_TEMPLATE
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import DataError, PretrainError

pytestmark = pytest.mark.fuzz

TEXTS = make_texts(12, longest=12)


def check_message(error: Exception) -> None:
    assert str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 1500


# --- stores ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz-store")
    return make_store(folder / "store", documents=24, masked=True, longest=9, validation_fraction=0.3).path


@pytest.fixture(scope="module")
def facts(sound_store: Path) -> dict[str, Any]:
    return json.loads((sound_store / "store.json").read_text())


def use_store(path: Path) -> None:
    """Everything that is done with a store; of one that is taken, all tokens are sound."""
    try:
        store = TokenStore(path)
        for name in ("train", "validation"):
            split = store.split(name)
            for packing in ("best_fit", "concat", "pad"):
                index = pack(split.offsets, 16, packing)
                assert not len(index.piece_start) or index.piece_start.max() < split.tokens
            for ids, mask in split.iterate():
                assert len(ids) == len(mask) > 0
                assert ids.max() < store.vocab_size
        inspect_store(store, 32)
        list(sample_documents(store, 2, 0))
    except PretrainError as error:
        check_message(error)


@fuzzed(25)
@given(st.data())
def test_any_files_of_a_store_whether_their_digests_fit_or_not(
    sound_store: Path, facts: dict[str, Any], data: st.DataObject
):
    names = [name for name in facts["files"] if not name.startswith("tokenizer")]
    name = data.draw(st.sampled_from(names) | st.just("store.json"))
    before = {name: (sound_store / name).read_bytes() for name in (name, "store.json")}
    numbers = altered_json(facts).map(dumped) if name == "store.json" else integers_of(before[name])
    content = data.draw(st.one_of(altered_bytes(before[name]), st.binary(max_size=64), numbers))
    try:
        (sound_store / name).write_bytes(content)
        if name != "store.json" and data.draw(st.booleans()):
            forge_digests(sound_store)
        use_store(sound_store)
    finally:
        for each, sound in before.items():
            (sound_store / each).write_bytes(sound)


@st.composite
def integers_of(draw: st.DrawFn, original: bytes) -> bytes:
    """One of the numbers replaced, as offsets or as ids."""
    values = np.frombuffer(original[: len(original) // 8 * 8], dtype="<i8").copy()
    if not len(values):
        return original
    place = draw(st.integers(0, len(values) - 1))
    values[place] = draw(st.one_of(st.integers(-2, 400), st.integers(-(2**63), 2**63 - 1)))
    return values.tobytes() + original[len(values) * 8 :]


# --- records -----------------------------------------------------------------------------------------

RECORDS: list[Any] = [
    {"text": "a text"},
    {"prompt": "ask", "completion": "answer"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": None},
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": "</s>",
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "five"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"segments": [{"text": "a", "loss": False}, {"text": "b", "loss": True}, {"text": "c", "loss": 1}]},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("fuzz-chat") / "tokenizer")
    template = CHAT_TEMPLATE.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def chat_tokenizer(chat_folder: Path) -> Tokenizer:
    return open_tokenizer(chat_folder)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line of a jsonl file: JSON of any kind, or a record that was altered, as JSON or as bytes."""
    original = draw(st.sampled_from(RECORDS))
    return draw(
        st.one_of(
            altered_json(original).map(dumped),
            altered_bytes(dumped(original)),
            VALUES.map(dumped),
            st.binary(max_size=40),
        )
    )


@fuzzed(80)
@example([b'{"messages": [{"role": "assistant", "content": [{"type": "text", "text": null}]}]}'])
@example([b'{"input_ids": [1' + b"0" * 4200 + b"]}"])
@given(st.lists(lines(), min_size=1, max_size=4))
def test_any_records(chat_tokenizer: Tokenizer, content: list[bytes]):
    for kind in ("json", "text"):
        records = [RawRecord("f.jsonl", number, data, kind) for number, data in enumerate(content, start=1)]
        strict = Encoder(chat_tokenizer, threshold=1 << 63, fail_on_error=True).encode(records)
        batch = Encoder(chat_tokenizer, threshold=1 << 63, fail_on_error=False).encode(records)
        assert len(batch.lengths) + batch.skipped.total() == len(records)
        assert batch.error is None
        assert (strict.error is None) == (set(batch.skipped) <= {"empty document"})
        if strict.error:
            check_message(ValueError(strict.error))
            assert strict.error.startswith("f.jsonl:")
        assert len(batch.ids) == len(batch.loss_mask) == batch.lengths.sum()
        assert not len(batch.ids) or batch.ids.max() < chat_tokenizer.vocab_size
        start = 0
        for length in batch.lengths.tolist():
            assert batch.loss_mask[start + 1 : start + length].any()
            start += length


# --- files -------------------------------------------------------------------------------------------


_TABLE = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
_CHATS = pyarrow.Table.from_pylist([RECORDS[2]] * 3)
_LINES = b"".join(dumped({"text": text}) + b"\n" for text in TEXTS)
FILES = {
    "a.jsonl": _LINES,
    "a.json": dumped([{"text": text} for text in TEXTS]),
    "b.json": _LINES,
    "a.csv": delimited([["id", "text"], *([k, f'{text}"\n,'] for k, text in enumerate(TEXTS))]),
    "a.txt": "".join(TEXTS).encode(),
    "a.jsonl.gz": gzip.compress(_LINES, mtime=0),
    "a.jsonl.zst": zstandard.compress(_LINES),
    "a.jsonl.xz": lzma.compress(_LINES),
    "a.parquet": parquet(_TABLE, row_group_size=5),
    "b.parquet": parquet(_TABLE, compression="zstd", use_dictionary=False),
    "c.parquet": parquet(_CHATS),
    "a.arrow": arrow(_TABLE, stream=True),
    "b.arrow": arrow(_TABLE, stream=False),
    "c.arrow": arrow(_CHATS, stream=False),
    "d.arrow": arrow(pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()}), stream=True),
    "e.arrow": arrow(pyarrow.table({"text": pyarrow.array(TEXTS, pyarrow.string_view())}), stream=True),
}


def read_all(path: Path) -> None:
    last = -1
    try:
        for record in read_records([str(path)]):
            assert record.line > last
            last = record.line
            try:
                parse_record(record)
            except RecordError as error:
                check_message(error)
    except DataError as error:
        check_message(error)


@fuzzed(80)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_any_bytes_in_files_of_every_form(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data.draw(st.one_of(altered_bytes(FILES[name]), st.binary(max_size=200))))
    before = pyarrow.total_allocated_bytes()
    read_all(path)
    assert pyarrow.total_allocated_bytes() - before < 1 << 24


# --- tokenizers and templates ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow", "e.arrow"])
def test_offsets_of_an_arrow_file_beyond_its_end_are_damage(tmp_path: Path, name: str):
    """pyarrow by itself reads where they point, which ended the process."""
    whole = FILES[name]
    length = np.array([0, len(TEXTS[0])], dtype="<i4").tobytes()
    if length in whole:
        whole = whole.replace(length, np.array([0, 1 << 30], dtype="<i4").tobytes())
    (tmp_path / name).write_bytes(whole)
    read_all(tmp_path / name)


_PARTS = [
    *("{% for m in messages %}", "{% for a in range(9) %}", "{% endfor %}", "{{ loop.index0 }}", "{{ x }}"),
    *("{% if m.role == 'user' %}", "{% else %}", "{% endif %}", "{% generation %}", "{% endgeneration %}"),
    *("{{ m.content }}", "{{ m['role'] }}", "{{ m.content.split(' ')[9] }}", "{% set x = 'ab' * 3 %}"),
    *("{{ messages | tojson }}", "{{ messages[0].content ~ m.content }}", "{{ bos_token }}", "<s>", "</s>"),
    *("{% macro f(a) %}{{ a }}{% endmacro %}", "{{ f(m) }}", "{{ ''.__class__ }}", "{{ undefined.x }}"),
    *("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ strftime_now('%Y') }}", "{#", "#}", "\n", "{%- "),
    *(" -%}", "{% if add_generation_prompt %}<s>assistant\n{% endif %}"),
]


@fuzzed(60)
@given(
    st.one_of(
        st.lists(st.sampled_from(_PARTS), max_size=9).map("".join),
        altered_bytes(CHAT_TEMPLATE.encode()).map(lambda b: b.decode("utf-8", "replace")),
    )
)
def test_any_chat_template(chat_tokenizer: Tokenizer, template: str):
    tokenizer = open_tokenizer(chat_tokenizer.folder)
    tokenizer.chat_template = template
    for fields in (RECORDS[2], RECORDS[3]):
        document = parse_record(RawRecord("f", 1, dumped(fields)))
        assert document.messages is not None
        try:
            ids, mask = encode_chat(tokenizer, document.messages, document.tools)
            assert len(ids) == len(mask)
        except DataError as error:
            check_message(error)


# --- conversion --------------------------------------------------------------------------------------
