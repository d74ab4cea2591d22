"""`TextStream`: whole characters, stable prefixes, nothing lost, byte-level and SentencePiece alike."""

from pathlib import Path

import pytest
from support.corpora import make_tokenizer

from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.model.generation import TextStream

TEXT = "naïve 你好 😀👩‍👩‍👧 e\u0301  two spaces\n\ttab \x00 \ufffd </s> ▁"


@pytest.fixture(scope="module", params=["plain bytes", "sentencepiece-bpe", "bytelevel-bpe", "char"])
def tokenizer(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "folder"
    if request.param == "plain bytes":
        make_tokenizer(folder)
    else:
        corpus = folder.with_name("corpus.txt")
        corpus.write_text("the quick brown fox and so on and on\n" * 40)
        size = {"char": None, "bytelevel-bpe": 270}.get(request.param, 320)
        train_tokenizer([str(corpus)], folder, size, type=request.param)
    return open_tokenizer(folder)


def test_text_comes_whole_and_only_in_whole_characters(tokenizer):
    expected = TEXT if tokenizer.decode(tokenizer.encode([TEXT])[0]) == TEXT else TEXT.replace("▁", " ")
    ids = tokenizer.encode([TEXT])[0]
    assert len(ids) > len(TEXT), "characters take several ids"
    stream = TextStream(tokenizer.token_pieces())
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == expected
    assert "" in parts
    assert sum("\ufffd" in part for part in parts) == 1, "the text's own, and no half character"


def test_broken_bytes_spoil_only_themselves(tokenizer):
    """A lone continuation byte after a whole character: decoding all ids anew would spoil that one too."""
    pieces = tokenizer.token_pieces()
    ids = [pieces.index(bytes([byte])) for byte in "好".encode() + b"\x80" + b"\xe5" + b"a"]
    stream = TextStream(pieces)
    parts = [stream.push(token) for token in ids]
    assert parts[:3] == ["", "", "好"]
    assert "".join(parts) + stream.finish() == "好\ufffd\ufffda"
    half = TextStream(pieces)
    assert half.push(pieces.index(b"\xe5")) == ""
    assert half.finish() == "\ufffd"
    assert half.finish() == ""


def test_special_ids_stand_for_no_text(tokenizer):
    stream = TextStream(tokenizer.token_pieces())
    assert stream.push(tokenizer.eos_token_id) == ""
