"""Tokenizers of every type give back every text, open in transformers, and have the size asked for."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_jsonl
from support.fuzzing import fuzzed

from llm_pretrain.__main__ import main
from llm_pretrain.data.tokenizer_training import SPLIT_PATTERN, TokenizerType, train_tokenizer
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import DataError, PretrainError

SIZES = {"sentencepiece-bpe": 900, "sentencepiece-unigram": 600, "bytelevel-bpe": 900, "char": None}
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
FLAGS = ["🇩🇪", "🇨🇳🇫", "👩‍👩‍👧‍👦", "👍🏽", "❤️", "\u200d", "\ufe0f", "🏴\U000e0067\U000e007f"]
SCRIPTS = ["你好，世界。", "naïve", "é", "Ω≈ç", "עִבְרִית", "ไทย", "हिन्दी", "ｆｕｌｌ", "ﬁ", "µ=1", "Ⅷ", "๑"]
CODE = ["def f(x):\n\treturn x", "self", "->", "don't", "DON'T", "<div/>", "a|b", "(<s", "0x41>", "12345"]
CODE += ["_x_", "a", "aa", "ab", "ba", "arg"]
CONTROLS = [*["\r", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\ufeff", "\t", "▅", "�"], "\r\n", "\n\n\n"]
SPACES = [" ", "  ", " " * 17, "\u3000", "\xa0", "\n  \n "]
LITERALS = [*SPECIAL, "<0x41>", "<0x0A>", "<0x41", "Ġ", "Ċ", "<|im_", "Ã©"]
FRAGMENTS = st.sampled_from([*FLAGS, *SCRIPTS, *CODE, *CONTROLS, *SPACES, *LITERALS])
WITHOUT_SURROGATES = st.characters(exclude_categories=["Cs"])
ANY_TEXT = st.lists(st.one_of(FRAGMENTS, WITHOUT_SURROGATES), max_size=30).map("".join)
TEXTS = [
    "def f(x):\n    return x  +  1\n\n\n\nclass A:\n\tpass\r\n" * 3,
    "   leading and trailing   ",
    "你好，世界。今天天气很好。" * 4,
    "emoji 😀😃👩‍👩‍👧 and e\u0301 combining",
    "control \x01\x07\x1b and \u2028 and \ufeff and </s><s><unk>",
    "aaaaaaa aaaa ababab abababa\n\n\n\n\n        spaces         ",
]


@pytest.fixture(scope="module")
def training_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text files of many kinds, and a module of the standard library for bulk."""
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_bytes(text.encode())
    return [str(folder), argparse.__file__]


@dataclass(frozen=True)
class Trained:
    """One tokenizer of each type, opened by us, by transformers and by SentencePiece where it is one."""

    type: str
    tokenizer: Tokenizer
    auto: Any
    processor: Any

    @property
    def folder(self) -> Path:
        return self.tokenizer.folder


@pytest.fixture(scope="module", params=get_args(TokenizerType))
def trained(request: pytest.FixtureRequest, training_files: list[str], tmp_path_factory) -> Trained:
    import sentencepiece
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("types") / request.param
    train_tokenizer(training_files, folder, SIZES[request.param], type=request.param)
    auto, model = AutoTokenizer.from_pretrained(str(folder)), folder / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model)) if model.exists() else None
    return Trained(request.param, open_tokenizer(folder), auto, processor)


@fuzzed(100)
@given(text=ANY_TEXT)
def test_encoding_is_lossless_and_sentencepieces(trained: Trained, text: str):
    tokenizer, auto = trained.tokenizer, trained.auto
    (ids,) = tokenizer.encode([text])
    assert auto(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
    if trained.processor is not None:
        assert trained.processor.encode(text) == ids
        text = text.replace("▁", " ")  # how SentencePiece writes a space: the one character it loses
    assert tokenizer.decode(ids) == auto.decode(ids) == text
    assert not tokenizer.special_ids & set(ids)
    pieces = tokenizer.token_pieces()
    assert b"".join(pieces[token] for token in ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_ids_of_long_texts_are_sentencepieces(trained: Trained):
    """Sums of scores stay exact in float32, so equally probable paths are told apart in the same way."""
    if trained.processor is None:
        return
    runs, counts = ("a", " ", "=", "ab", "- ", "\n"), (*range(1, 70), 3000)
    texts = [Path(argparse.__file__).read_text(), *("x" + run * count for run in runs for count in counts)]
    assert trained.tokenizer.encode(texts) == [trained.processor.encode(text) for text in texts]


def test_the_split_of_bytelevel_is_qwen2s(trained: Trained):
    if trained.type != "bytelevel-bpe":
        return
    from transformers.models.qwen2 import tokenization_qwen2

    assert SPLIT_PATTERN == tokenization_qwen2.PRETOKENIZE_REGEX
    split, _ = json.loads((trained.folder / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"] == {"Regex": SPLIT_PATTERN}


def test_sizes_ids_and_a_beginning_of_text(trained: Trained):
    tokenizer, chat = trained.tokenizer, trained.type != "char"
    size = SIZES[trained.type]
    assert size is None or tokenizer.vocab_size == size
    special = SPECIAL if chat else SPECIAL[:4]
    assert tokenizer.special_ids == set(range(len(special)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)
    auto = trained.auto
    assert auto.convert_tokens_to_ids(special) == list(range(len(special)))
    assert auto("def")["input_ids"][0] == 1
    assert set(auto.all_special_ids) == tokenizer.special_ids


MESSAGES = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": "1 + 1?\r\n"},
    {"role": "assistant", "content": " 2\n"},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "👩‍👩‍👧"},
]
RENDERED = (
    "<s><|im_start|>system\nBe  brief.<|im_end|>\n<|im_start|>user\n1 + 1?\r\n<|im_end|>\n"
    "<|im_start|>assistant\n 2\n<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
    "<|im_start|>assistant\n👩‍👩‍👧<|im_end|>\n"
)


def test_a_chat_is_rendered_and_what_the_assistant_says_is_marked(trained: Trained):
    auto = trained.auto
    if trained.type == "char":
        assert trained.tokenizer.chat_template is None
        assert auto.chat_template is None
        return
    assert auto.apply_chat_template(MESSAGES, tokenize=False) == RENDERED
    prompt = auto.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert RENDERED.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")
    encoded = auto.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert [ids.count(token) for token in (1, 4, 5)] == [1, 5, 5]
    assert auto.decode(ids) == RENDERED
    learnt = [token for token, marked in zip(ids, mask, strict=True) if marked]
    assert auto.decode(learnt) == " 2\n<|im_end|>👩‍👩‍👧<|im_end|>"


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(trained: Trained, training_files, tmp_path: Path):
    """Python's and Rust's hash tables are seeded anew in every process."""
    type = trained.type
    size = [] if SIZES[type] is None else ["--vocab_size", str(SIZES[type])]
    command = [sys.executable, "-m", "llm_pretrain", "tokenizer", "--input", *training_files, "--type", type]
    subprocess.run([*command, *size, "--output", str(tmp_path / "again")], check=True, capture_output=True)
    ours, theirs = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (trained.folder, tmp_path / "again")
    )
    assert ours == theirs
    assert ("tokenizer.model" in ours) == type.startswith("sentencepiece")


@pytest.mark.parametrize("type", get_args(TokenizerType))
@pytest.mark.parametrize("size", [7, 100_000])
def test_a_size_that_does_not_fit_says_which_would(type: str, size: int, tmp_path: Path):
    (tmp_path / "a.txt").write_text("only a few words of text, and only a few words more\n" * 5)
    inputs = [str(tmp_path / "a.txt")]
    if type == "char" and size > 7:
        assert train_tokenizer(inputs, tmp_path / "t", size, type=type).vocab_size < size  # a maximum
        return
    bound = "at least" if size == 7 else "at most"
    with pytest.raises(PretrainError, match=rf"--vocab_size: expected {bound} (\d+)") as caught:
        train_tokenizer(inputs, tmp_path / "t", size, type=type)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    fitting = int(str(caught.value).split(bound)[1].split()[0])
    assert train_tokenizer(inputs, tmp_path / "t", fitting, type=type).vocab_size == fitting


def test_only_char_needs_no_size(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("aaabbc\n")
    common = ["tokenizer", "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t")]
    assert main(common) == 2
    assert "--vocab_size: expected a size for --type sentencepiece-bpe" in capsys.readouterr().err
    assert main([*common, "--type", "char"]) == 0
    assert "char, 264 tokens" in capsys.readouterr().out


def test_char_keeps_the_most_frequent_characters(tmp_path: Path):
    (tmp_path / "a.txt").write_text("你好你好你世界 a a a a")
    tokenizer_report = train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", 260 + 3, type="char")
    tokenizer = open_tokenizer(tmp_path / "t")
    lengths = [len(ids) for ids in tokenizer.encode(["你", "好", "世", "a", " "])]
    assert lengths == [1, 3, 3, 1, 1]
    assert tokenizer_report.altered_documents == 0
    assert tokenizer.decode(tokenizer.encode(["世界"])[0]) == "世界"


def test_bytes_per_token_are_of_all_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello world, " * 200 + "你好世界天气很好" * 50)
    report = train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", None, type="char")
    assert report.bytes_per_token == pytest.approx(3800 / 3000)


def test_conversations_are_text_too_and_token_ids_are_none(tmp_path: Path):
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "xyz"}]
    corpus = write_jsonl(
        tmp_path / "c.jsonl", [{"messages": turns}, {"input_ids": [1, 2], "loss_mask": [1, 1]}]
    )
    report = train_tokenizer([str(corpus)], tmp_path / "t", None, type="char")
    assert report.vocab_size == 260 + len(set("abc\nxyz"))
    assert report.skipped == {"record without text": 1}


@pytest.mark.parametrize("type", get_args(TokenizerType))
def test_only_sentencepiece_alters_texts_and_counts_them(type: str, tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("a block ▁ of text\n" * 20)
    (tmp_path / "b.txt").write_text("another block of text\n" * 20)
    size = [] if type == "char" else ["--vocab_size", "278"]
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert (
        main(["tokenizer", "--input", *inputs, "--type", type, *size, "--output", str(tmp_path / "t")]) == 0
    )
    warned = "1 documents are altered by decoding" in capsys.readouterr().out
    assert warned == type.startswith("sentencepiece")


def test_an_empty_corpus_and_a_used_folder_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="expected text, found none"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t", 300)
    with pytest.raises(DataError, match="choose another"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path, 300)
