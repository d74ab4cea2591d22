"""`llm-pretrain convert`: converts token files of nanoGPT and llm.c into a token store."""

from __future__ import annotations

import argparse

from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.data.conversion import convert
from llm_pretrain.errors import printable

EXAMPLES = """formats, which a file's header tells apart:
  nanogpt  .bin files of uint16 token ids (others with --dtype), and .npy files; documents end with the
           tokenizer's eos token; the characters in a meta.pkl beside them are the default tokenizer and must
           be those of --tokenizer (read without running what a pickle may contain)
  llm.c    the same with the header of llm.c and modded-nanogpt, of uint16 or uint32

Files with `val`, `valid` or `dev` in their names are the validation split (without any, documents are chosen
by hash); those with `test` or `eval` are left out beside files to train on.

examples:
  llm-pretrain convert --from nanogpt --input train.bin val.bin --tokenizer gpt2/ --output data/stores/web
  llm-pretrain convert --from llm.c --input fineweb10B/ --tokenizer gpt2/ --output data/stores/fineweb
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a store of tokens as they are; nothing is tokenized again."
    parser.add_argument("--from", choices=["nanogpt", "llm.c"], required=True, help="format of --input")
    add_parameters(parser, convert)


def run(arguments: argparse.Namespace) -> int:
    """Convert the files, and print what was read and written."""
    report = convert(**chosen(arguments, convert))
    print(f"store      {printable(arguments.output)}")
    print(f"read       {report.tokens_read:,} tokens")
    for name in ("train", "validation"):
        print(f"{name:<10} {report.documents[name]:,} documents, {report.tokens[name]:,} tokens")
    if report.first_tokens_added:
        print(f"added      {report.first_tokens_added:,} first tokens, one to each document that lacked it")
    if report.empty_documents:
        print(f"left out   {report.empty_documents:,} × empty document")
    for name in report.left_out:
        print(f"left out   {printable(name)}, by its name for tests")
    for name in report.unended:
        print(f"warning    {printable(name)}: not one end of a document in it; is this its tokenizer?")
    return 0
