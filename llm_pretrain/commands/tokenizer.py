"""`llm-pretrain tokenizer`: trains a tokenizer on text and writes it as a folder."""

from __future__ import annotations

import argparse

HELP = "train a tokenizer on jsonl or text files"

_EXAMPLES = """examples:
  llm-pretrain tokenizer --input stdlib --vocab_size 6400 --output data/stdlib-tokenizer
  llm-pretrain tokenizer --input corpus.jsonl notes/ --vocab_size 16000 --output data/tokenizer
  llm-pretrain tokenizer --input scraped.jsonl --vocab_size 8000 --on_error skip --output data/tokenizer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to `parser`."""
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Trains a tokenizer that gives back every text exactly, and that transformers opens."
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files (.jsonl, .parquet, .csv, text, …, also .gz and .zst), folders, patterns, hf://…, "
        "or `stdlib`: the Python standard library's source; `llm-pretrain prepare --help` lists them",
    )
    parser.add_argument(
        "--vocab_size", type=int, required=True, metavar="N", help="exact size of the vocabulary"
    )
    parser.add_argument(
        "--type",
        choices=["sentencepiece-bpe"],
        default="sentencepiece-bpe",
        help="kind of tokenizer (default: %(default)s)",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder to write")
    parser.add_argument(
        "--on_error",
        choices=["skip", "fail"],
        default="fail",
        help="a bad record is counted and left out, or stops with file and line (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains the tokenizer and says how well it packs."""
    from llm_pretrain.data import train_sentencepiece_bpe

    report = train_sentencepiece_bpe(
        arguments.input, arguments.output, arguments.vocab_size, on_error=arguments.on_error
    )
    print(f"tokenizer  {arguments.output}, {arguments.vocab_size} tokens")
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
