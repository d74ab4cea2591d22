"""`llm-pretrain tokenizer`: trains a tokenizer on text and writes it as a folder."""

from __future__ import annotations

import argparse

from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.data.tokenizer_training import train_tokenizer
from llm_pretrain.errors import printable

EXAMPLES = """types:
  sentencepiece-bpe      the default: SentencePiece merges, encoded fastest
  sentencepiece-unigram  SentencePiece's most probable pieces
  bytelevel-bpe          merges of bytes, text split as Qwen2 does; the only type with merges that restores
                         U+2581; GGUF calls its pre-tokenizer `qwen2`
  char                   one token per character of the text, bytes for all others; restores U+2581 too
Every type but char has special tokens and a template for chats (ChatML).

examples:
  llm-pretrain tokenizer --input stdlib --vocab_size 6400 --output data/tokenizers/stdlib
  llm-pretrain tokenizer --input corpus.jsonl notes/ --vocab_size 16000 --output data/tokenizers/mine
  llm-pretrain tokenizer --input corpus.jsonl --type bytelevel-bpe --vocab_size 32000 \\
      --output data/tokenizers/bytes
  llm-pretrain tokenizer --input play.txt --type char --output data/tokenizers/characters
  llm-pretrain tokenizer --input scraped.jsonl --vocab_size 8000 --on_error skip --output data/tokenizers/mine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Trains a lossless tokenizer that transformers opens."
    add_parameters(parser, train_tokenizer, without=("notice",))


def run(arguments: argparse.Namespace) -> int:
    """Train the tokenizer, and print how well it compresses the text."""
    notice = lambda text: print(f"notice     {printable(text)}", flush=True)  # noqa: E731
    report = train_tokenizer(**chosen(arguments, train_tokenizer), notice=notice)
    print(f"tokenizer  {printable(arguments.output)}, {arguments.type}, {report.vocab_size} tokens")
    sampled = f" of {report.text_bytes:,}" if report.sampled_bytes < report.text_bytes else ""
    print(f"trained on {report.sampled_bytes:,}{sampled} bytes in {report.documents:,} documents")
    print(f"packs      {report.bytes_per_token:.3f} bytes per token")
    for cause, count in sorted(report.skipped.items()):
        print(f"left out   {count:,} × {cause}")
    if report.altered_documents:
        print(
            f"warning    {report.altered_documents:,} documents are altered by decoding (is U+2581 in them?)"
        )
    return 0
