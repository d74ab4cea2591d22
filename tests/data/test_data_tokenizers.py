"""The trained tokenizer is SentencePiece's, loses nothing, and opens in transformers."""

from __future__ import annotations

import ast
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import make_tokenizer
from support.fuzzing import fuzzed
from support.launching import ROOT

from llm_pretrain.data.tokenizer_training import _cuts, train_tokenizer
from llm_pretrain.data.tokenizers import Tokenizer, convert_tokenizer, open_tokenizer
from llm_pretrain.errors import DataError

# U+2581 is how SentencePiece writes a space; it alone cannot tell the two apart (see the test of it below).
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
WORDS = ["self", "return", "arg", "a", "aa", "ab", "ba", "_", "1", ".", "</s>", "<s>", "<unk>", "<0x41>"]
OTHERS = ["你好", "世界", "😀", "é", "Ω", "\u2585", "\ufeff", "e\u0301", "\x7f", "\t", "\x00", "\r\n"]
FRAGMENTS = st.sampled_from([*WORDS, *OTHERS, " ", "  ", "     ", "\n", "\n\n\n"])
TEXTS = st.one_of(st.text(CHARACTERS), st.lists(st.one_of(FRAGMENTS, CHARACTERS)).map("".join))


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def auto_tokenizer(tokenizer: Tokenizer):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer.folder))


@fuzzed(250)
@given(text=TEXTS)
def test_ids_are_sentencepieces_and_decode_to_the_text(
    tokenizer: Tokenizer, processor, auto_tokenizer, text: str
):
    expected = processor.encode(text)
    assert tokenizer.encode([text]) == [expected]
    encoded = auto_tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    assert encoded["input_ids"] == expected
    assert tokenizer.decode(expected) == text
    assert auto_tokenizer.decode(expected) == text


@fuzzed(200)
@given(text=TEXTS)
def test_the_bytes_of_the_ids_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str):
    pieces = tokenizer.token_pieces()
    (ids,) = tokenizer.encode([text])
    assert b"".join(pieces[token] for token in ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("run", ["a", " ", "\n", "ab", "=", "- "])
def test_runs_of_one_thing_are_merged_like_sentencepiece(tokenizer: Tokenizer, processor, run: str):
    texts = ["x" + run * count for count in range(1, 70)]
    assert tokenizer.encode(texts) == [processor.encode(text) for text in texts]


def test_documents_of_the_training_text_round_trip(tokenizer: Tokenizer, training_files: list[str]):
    from llm_pretrain.data.readers import read_records

    for record in read_records(training_files):
        text = record.data.decode()
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_special_tokens_have_their_ids_and_text_never_becomes_one(tokenizer: Tokenizer, auto_tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, 5}
    assert auto_tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<pad>"]) == [0, 1, 2, 3]
    assert (auto_tokenizer.bos_token_id, auto_tokenizer.eos_token_id, auto_tokenizer.pad_token_id) == (
        1,
        2,
        3,
    )
    assert not tokenizer.special_ids & set(tokenizer.encode(["<s>a</s><pad><unk>"])[0])


def test_a_prompt_begins_as_documents_do(auto_tokenizer):
    assert auto_tokenizer("def")["input_ids"][0] == 1


def test_the_one_character_that_sentencepiece_loses_is_not_lossless(tokenizer: Tokenizer, processor):
    assert tokenizer.encode(["a▁b"]) == [processor.encode("a▁b")]
    assert tokenizer.decode(tokenizer.encode(["a▁b"])[0]) == "a b"


def test_training_again_gives_the_same_files(tokenizer: Tokenizer, training_files: list[str], tmp_path: Path):
    train_tokenizer(training_files, tmp_path / "again", 1000)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tokenizer.folder / name).read_bytes()


def test_the_vocabulary_has_exactly_the_size_asked_for(training_files: list[str], tmp_path: Path):
    report = train_tokenizer(training_files, tmp_path / "t", 777)
    assert open_tokenizer(tmp_path / "t").vocab_size == 777
    assert report.altered_documents == 0
    assert report.bytes_per_token > 1.5


def test_a_vocabulary_that_does_not_fit_the_text_says_what_would(tmp_path: Path):
    (tmp_path / "a.txt").write_text("only a few words of text, and only a few words more")
    for size, bound in ((100, "at least"), (100_000, "at most")):
        with pytest.raises(DataError, match=rf"--vocab_size: expected {bound} (\d+)") as caught:
            train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", size)
        assert "\n" not in str(caught.value)
        fitting = int(str(caught.value).split(bound)[1].split()[0])
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / f"t{size}", fitting)


def test_an_empty_corpus_and_a_used_folder_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="expected text, found none"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", 300)
    with pytest.raises(DataError, match="choose another"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path, 300)


def test_byte_level_tokenizers_have_exact_bytes_too(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path / "t"))
    text = "é 你好 😀\n\x00"
    assert tokenizer.token_bytes()[tokenizer.encode([text])[0]].sum() == len(text.encode())
    assert tokenizer.token_bytes()[sorted(tokenizer.special_ids)].sum() == 0


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "expected tokenizer.json"),
        ("tokenizer.json", "{}", "expected a tokenizer"),
        ("tokenizer_config.json", "{", "expected JSON"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "expected an eos_token"),
        ("tokenizer_config.json", "[" * 100_000, "expected JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("special_tokens_map.json", "[]", "expected a JSON object"),
    ],
)
def test_a_broken_tokenizer_folder_is_named(tmp_path: Path, file: str, content: str | None, message: str):
    folder = make_tokenizer(tmp_path / "t")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(DataError, match=message):
        open_tokenizer(folder)


def alter_tokenizer(folder: Path, change: dict[str, Any]) -> Path:
    """A tokenizer folder with other entries of its tokenizer.json."""
    make_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change = {key: content[key] | value if key == "model" else value for key, value in change.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content | change))
    return folder


def test_a_tokenizer_of_random_ids_is_refused(tmp_path: Path):
    folder = alter_tokenizer(tmp_path / "t", {"model": {"dropout": 0.1}})
    with pytest.raises(DataError, match=r"tokenizer\.json: expected model\.dropout null, .* found 0\.1;"):
        open_tokenizer(folder)
    open_tokenizer(alter_tokenizer(tmp_path / "t", {"model": {"dropout": 0.0}}))


@pytest.mark.parametrize(
    "added", [[(100_000, "<x>")], [(259, "a"), (260, "<x>")], [(260, "<x>"), (259, "<y>")]]
)
def test_added_tokens_have_the_ids_that_are_read(tmp_path: Path, added: list[tuple[int, str]]):
    """The library numbers them anew, without gaps."""
    folder = make_tokenizer(tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    first = content["added_tokens"][0]
    content["added_tokens"] += [first | {"id": index, "content": token} for index, token in added]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    index, token = added[0]
    with pytest.raises(DataError, match=rf"expected ids 0 to \d+ without a gap, found {index} .* '{token}'"):
        open_tokenizer(folder)


ADDED = {"content": "<|x\n|>", "special": True}


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": ADDED}}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<s>", "<|x\n|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"x_token": "<|x\n|>"}}),
        ("tokenizer_config.json", {"additional_special_tokens": [ADDED | {"__type": "AddedToken"}]}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<|x\n|>"]}),
    ],
)
def test_a_token_that_only_the_configuration_names_is_refused(tmp_path: Path, file: str, named: dict):
    """transformers adds it; here it would be text."""
    from transformers import AutoTokenizer

    folder = make_tokenizer(tmp_path / "t")
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(content | named))
    (key,) = named
    with pytest.raises(DataError, match=rf"{file}: {key}: expected .* found '<\|x\\n\|>'; save") as caught:
        open_tokenizer(folder).check_named_tokens()
    assert "\n" not in str(caught.value)
    AutoTokenizer.from_pretrained(str(folder), local_files_only=True).save_pretrained(str(tmp_path / "saved"))
    saved = open_tokenizer(tmp_path / "saved")
    saved.check_named_tokens()
    assert saved.token(259) == "<|x\n|>"


def test_tokens_that_both_files_name_are_accepted(tmp_path: Path):
    folder = make_tokenizer(tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    held = {
        "added_tokens_decoder": {"256": {"content": "<s>"}},
        "extra_special_tokens": {"a": "</s>", "b": None},
    }
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<unread>"]}')
    for more in (
        held,
        held | {"extra_special_tokens": None, "additional_special_tokens": ["<pad>", "a", ""]},
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
        open_tokenizer(folder).check_named_tokens()


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
NESTED_BETWEEN = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [BETWEEN] * 45}]}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARSMAP = base64.b64encode(bytes(4) + b"x" * 999).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 45}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Sequence", "normalizers": [BETWEEN] * 45}],
            }
        },
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 9999}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 45}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 45}},
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path: Path, change: dict[str, Any]):
    """The library would end the process for want of memory."""
    folder = alter_tokenizer(tmp_path / "t", change)
    with pytest.raises(DataError, match=r"tokenizer\.json: expected .* that lengthen text up to 256 times"):
        open_tokenizer(folder)


@pytest.mark.parametrize("template", [[1], [{"name": "default"}], 5, None])
def test_a_chat_template_of_another_form_is_none(tmp_path: Path, template):
    folder = make_tokenizer(tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert open_tokenizer(folder).chat_template is None


def test_an_id_beyond_every_vocabulary_is_named_before_memory_is_asked_for(tmp_path: Path):
    folder = make_tokenizer(tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json: expected token ids below .* found 4000000000$"):
        open_tokenizer(folder)


def test_a_converted_tokenizer_keeps_its_template_for_tools(tmp_path: Path):
    folder = make_tokenizer(tmp_path / "t")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] | {"</s>": 256}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    config |= {"tokenizer_class": "GPT2Tokenizer", "chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    convert_tokenizer(folder, tmp_path / "converted")
    converted = open_tokenizer(tmp_path / "converted")
    assert (converted.chat_template, converted.tool_template) == ("a", "b")


def test_a_folder_of_something_else_is_no_tokenizer(tmp_path: Path):
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(DataError, match="expected a Hugging Face tokenizer folder, found: "):
        convert_tokenizer(tmp_path, tmp_path / "converted")


def test_a_tokenizer_folder_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers would ask on standard input whether to run it."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizer as Evil\n"
    )
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text("{}")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(DataError, match="expected a Hugging Face tokenizer folder"):
        convert_tokenizer(folder, tmp_path / "converted")
    assert not (tmp_path / "ran").exists()


CAN_RUN_CODE = {"from_pretrained", "from_config"}
"""Functions of transformers' Auto classes that run Python files of a folder if they may."""


def test_every_place_that_opens_with_transformers_refuses_to_run_code():
    found = 0
    for path in sorted(
        set(ROOT.glob("llm_pretrain/**/*.py")) | set(ROOT.glob("*.py")) | set(ROOT.glob("examples/**/*.py"))
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if node.func.attr in CAN_RUN_CODE and isinstance(owner, ast.Name) and owner.id.startswith("Auto"):
                found += 1
                keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert keywords.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
    assert found


def test_every_cut_of_a_piece_is_listed_once():
    for piece in ("ab", "aaa", "aba", "abab", "ababa", "▁▁▁▁", "return"):
        assert sorted(_cuts(piece)) == list(range(1, len(piece)))
    assert _cuts("aba") == [2, 1]  # in ab|a|ba the left merge cuts after two
