"""Tokenizer folders: what is opened, what is refused by name, and that none runs code."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from support.corpora import make_texts, make_tokenizer
from support.launching import ROOT
from tokenizers import models, pre_tokenizers

from llm_pretrain.data.chat import chat_prompt_ids
from llm_pretrain.data.tokenizers import convert_tokenizer, open_tokenizer
from llm_pretrain.errors import DataError


def test_byte_level_tokenizers_have_exact_bytes_too(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path / "t"))
    text = "é 你好 😀\n\x00"
    assert tokenizer.token_bytes()[tokenizer.encode([text])[0]].sum() == len(text.encode())
    assert tokenizer.token_bytes()[sorted(tokenizer.special_ids)].sum() == 0


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def altered(**change: Any) -> Callable[[Path], object]:
    """Other entries of tokenizer.json; those of `model` beside its own."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content |= {key: content[key] | value if key == "model" else value for key, value in change.items()}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return apply


def added(*tokens: tuple[int, str]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        present = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        more = [present[0] | {"id": index, "content": token} for index, token in tokens]
        altered(added_tokens=present + more)(folder)

    return apply


def sequence(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: [*parts]}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FAR = {chr(33 + byte): byte for byte in range(94)} | {"far": 4_000_000_000}
CONFIG = "tokenizer_config.json"
TOO_LONG = r"tokenizer\.json: expected .* that lengthen text up to 256 times"
GAP = r"expected ids 0 to \d+ without a gap, found "
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer.json": (without("tokenizer.json"), "expected tokenizer.json"),
    "tokenizer.json of nothing": (replaced("tokenizer.json", "{}"), "expected a tokenizer"),
    "a configuration cut": (replaced(CONFIG, "{"), "expected JSON"),
    "a configuration that is a list": (replaced(CONFIG, "[]"), "expected a JSON object"),
    "a map that is a list": (replaced("special_tokens_map.json", "[]"), "expected a JSON object"),
    "an unknown end": (replaced(CONFIG, '{"eos_token": "<none>"}'), "expected an eos_token"),
    "random ids": (
        altered(model={"dropout": 0.1}),
        r"tokenizer\.json: expected model\.dropout null, .* found 0\.1;",
    ),
    "an id beyond every vocabulary": (
        altered(model={"vocab": FAR}),
        r"tokenizer\.json: expected token ids below .* found 4000000000$",
    ),
    # the library numbers added tokens anew, without gaps
    "an added token far away": (added((100_000, "<x>")), f"{GAP}100000 .* '<x>'"),
    "an added token of two ids": (added((259, "a"), (260, "<x>")), f"{GAP}259 .* 'a'"),
    # the library would end the process for want of memory
    "a text doubled 45 times": (altered(normalizer=sequence("normalizers", *[DOUBLING] * 45)), TOO_LONG),
    "bytes of bytes": (altered(pre_tokenizer=sequence("pretokenizers", *[BYTES] * 45)), TOO_LONG),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_folder_is_named(tmp_path: Path, name: str):
    folder = make_tokenizer(tmp_path / "t")
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(folder)
    assert "\n" not in str(caught.value)


ADDED = {"content": "<|x\n|>", "special": True}


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": ADDED}}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<s>", "<|x\n|>"]}),
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


SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = ["▁", *"ab<>/s"]
PIECES = [(token, 0.0) for token in SPECIAL] + [(letter, -2.0) for letter in LETTERS]
IDS = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
WORD_IDS = IDS | {f"##{letter}": len(IDS) + index for index, letter in enumerate(LETTERS)}
MERGED = IDS | {"</": len(IDS), "</s": len(IDS) + 1}
LOOK_UP: dict[str, tuple[Any, Any]] = {
    "unigram": (models.Unigram(PIECES, 0, False), pre_tokenizers.Metaspace()),
    "wordlevel": (models.WordLevel(IDS, "<unk>"), pre_tokenizers.WhitespaceSplit()),
    "wordpiece": (models.WordPiece(WORD_IDS, unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()),
    "bpe, ignore_merges": (
        models.BPE(IDS, [], unk_token="<unk>", ignore_merges=True),
        pre_tokenizers.WhitespaceSplit(),
    ),
    "bpe, a merge": (models.BPE(MERGED, [("<", "/"), ("</", "s"), ("</s", ">")]), pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("name", LOOK_UP)
def test_text_stays_text_for_every_kind(tmp_path: Path, name: str, added: bool):
    folder = make_tokenizer(tmp_path / "t")
    library = tokenizers.Tokenizer(LOOK_UP[name][0])
    library.pre_tokenizer = LOOK_UP[name][1]
    library.add_special_tokens(SPECIAL if added else [])
    library.save(str(folder / "tokenizer.json"))
    (folder / CONFIG).write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = open_tokenizer(folder)
    texts = ["a </s> b", "</s>", "ab"]
    unknown = {IDS["<unk>"]} if name == "wordlevel" else set()
    for ids in tokenizer.encode(texts):
        assert set(ids) & tokenizer.special_ids <= unknown
    library.encode_special_tokens = True
    assert tokenizer.encode(["ab"]) == [library.encode("ab", add_special_tokens=False).ids]
    if added:
        assert open_tokenizer(folder, parse_special=True).encode(["</s>"]) == [[IDS["</s>"]]]
        ids = chat_prompt_ids(tokenizer, [{"role": "user", "content": "a </s>"}])
        assert [index for index in ids if index in tokenizer.special_ids - unknown] == [1, 2]


TEXTS = [
    "plain text",
    "  two  spaces ",
    "full \uff21\u00bd",
    "tab\t\r\nend",
    "\U0001f600 \u5317",
    "<s> </s>",
    "",
    " ",
]
TEXTS += ["\u1112\u1161\u11ab", "a\u0306\u0301"]


@pytest.mark.parametrize("type", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_a_lone_sentencepiece_model_keeps_its_ids(tmp_path: Path, type: str, prefix: bool, rule: str):
    options = {"normalization_rule_name": rule, "remove_extra_whitespaces": rule != "identity"}
    train_model(tmp_path / "m", model_type=type, add_dummy_prefix=prefix, byte_fallback=True, **options)
    tokenizer = open_tokenizer(convert_tokenizer(tmp_path / "m", tmp_path / "t"))
    model: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m" / "tokenizer.model"))
    assert tokenizer.encode(TEXTS) == model.encode(TEXTS)


def test_a_sentencepiece_model_that_cannot_be_equalled_is_refused(tmp_path: Path):
    train_model(tmp_path / "m", model_type="unigram", user_defined_symbols=["<sep>"])
    with pytest.raises(DataError, match="found: ids other than SentencePiece's; save it with"):
        convert_tokenizer(tmp_path / "m", tmp_path / "t")


def train_model(folder: Path, **options: Any) -> None:
    folder.mkdir()
    with (folder / "tokenizer.model").open("wb") as file:
        train: Any = sentencepiece.SentencePieceTrainer
        texts = iter([*make_texts(60), *TEXTS] * 2)
        options = {"vocab_size": 320, "hard_vocab_limit": False, "minloglevel": 3, **options}
        train.train(sentence_iterator=texts, model_writer=file, **options)


def test_gpt2s_folder_has_the_tokens_of_transformers(tmp_path: Path):
    folder = make_tokenizer(tmp_path / "t")
    content = (folder / "tokenizer.json").read_text().replace("</s>", "<|endoftext|>")
    (folder / "tokenizer.json").write_text(content)
    (folder / CONFIG).write_text('{"model_max_length": 1024}')
    with pytest.raises(DataError, match="name it there"):
        open_tokenizer(convert_tokenizer(folder, tmp_path / "none"))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = open_tokenizer(convert_tokenizer(folder, tmp_path / "converted"))
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 257
    assert tokenizer.encode(["a b"]) == open_tokenizer(make_tokenizer(tmp_path / "u")).encode(["a b"])


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


def test_every_place_that_opens_with_transformers_refuses_to_run_code():
    files = [
        path
        for pattern in ("llm_pretrain/**/*.py", "*.py", "examples/**/*.py")
        for path in ROOT.glob(pattern)
    ]
    texts = {path: path.read_text() for path in files}
    calls = [
        (path, node)
        for path, text in texts.items()
        if any(f".{name}(" in text for name in CAN_RUN_CODE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and re.fullmatch(rf"Auto\w*\.({'|'.join(CAN_RUN_CODE)})", ast.unparse(node.func))
    ]
    assert calls
    for path, call in calls:
        keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert keywords.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
