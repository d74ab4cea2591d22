"""`llm-pretrain tokenizer`: trains a tokenizer on text and writes it as a folder."""

from __future__ import annotations

import argparse

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
    """Adds the command's options to `parser`."""
    parser.description = "Trains a lossless tokenizer that transformers opens."
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="files (.jsonl, .parquet, .csv, text, …, also .gz and .zst), folders, patterns, hf://…, "
        "or `stdlib`: the Python standard library's source; `llm-pretrain prepare --help` lists them",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        metavar="N",
        help="exact size of the vocabulary, special tokens included; for char it may be left out, and is a "
        "maximum: the rarest characters become bytes",
    )
    parser.add_argument(
        "--type",
        choices=["sentencepiece-bpe", "sentencepiece-unigram", "char", "bytelevel-bpe"],
        default="sentencepiece-bpe",
        help="kind of tokenizer (default: %(default)s)",
    )
    parser.add_argument(
        "--text_column",
        default="text",
        metavar="NAME",
        help="field or column that holds a document's text (default: %(default)s)",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder to write")
    parser.add_argument(
        "--on_error",
        choices=["skip", "fail"],
        default="fail",
        help="a bad record is counted and left out, or stops with file and line (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains the tokenizer and prints how well it compresses the text."""
    from llm_pretrain.data.tokenizer_training import train_tokenizer

    report = train_tokenizer(
        arguments.input,
        arguments.output,
        arguments.vocab_size,
        type=arguments.type,
        on_error=arguments.on_error,
        text_column=arguments.text_column,
    )
    print(f"tokenizer  {printable(arguments.output)}, {arguments.type}, {report.vocab_size} tokens")
    sampled = f" of {report.text_bytes:,}" if report.sampled_bytes < report.text_bytes else ""
    print(f"trained on {report.sampled_bytes:,}{sampled} bytes in {report.documents:,} documents")
    print(f"packs      {report.bytes_per_token:.3f} bytes per token")
    for script in report.scripts[:6]:
        if script.share >= 0.001:
            packs = f"{script.bytes_per_token:.3f} in {script.share:6.1%} of the tokens"
            print(f"           {packs}: {script.script}")
    for cause, count in sorted(report.skipped.items()):
        print(f"left out   {count:,} × {cause}")
    if report.altered_documents:
        print(
            f"warning    {report.altered_documents:,} documents are altered by decoding (is U+2581 in them?)"
        )
    return 0
