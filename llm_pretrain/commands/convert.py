"""`llm-pretrain convert`: token files of nanoGPT, llm.c and Megatron into a token store, and back."""

from __future__ import annotations

import argparse

from llm_pretrain.errors import printable

EXAMPLES = """formats:
  store     what `llm-pretrain prepare` writes
  nanogpt   .bin files of uint16 token ids, also with the header of llm.c and modded-nanogpt; documents end
            with the tokenizer's eos token, and get one where they lack it (conversations do), since
            nothing else separates them; the characters in a meta.pkl beside them are the default tokenizer
            and must be those of --tokenizer (read without running what a pickle may contain)
  megatron  pairs of .bin and .idx (indexed dataset); the loss mask, which Megatron cannot store, is a
            second dataset beside it, NAME-loss_mask

Files with `val` in their names are the validation split. Without any, documents are split by their hash.

examples:
  llm-pretrain convert --from nanogpt --input train.bin val.bin --tokenizer gpt2/ --to store \\
      --output data/stores/web
  llm-pretrain convert --from nanogpt --input fineweb10B/ --tokenizer gpt2/ --to store \\
      --output data/stores/fineweb
  llm-pretrain convert --from megatron --input corpus_text_document --tokenizer qwen3/ --to store \\
      --output data/stores/c
  llm-pretrain convert --from store --input data/stores/stdlib --to megatron --output data/megatron/stdlib
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to `parser`."""
    parser.description = "Converts tokens as they are; nothing is tokenised again."
    formats = ["store", "nanogpt", "megatron"]
    parser.add_argument("--from", dest="source", choices=formats, required=True, help="format of --input")
    parser.add_argument("--to", dest="target", choices=formats, required=True, help="format of --output")
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH",
        help="files, folders, Megatron's prefixes, or one store",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder to write")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="the tokenizer that wrote the ids (default: the folder `tokenizer` that lies with the input, "
        "else nanoGPT's meta.pkl)",
    )
    parser.add_argument(
        "--validation_fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the documents kept for validation where no file is named so (default: %(default)s)",
    )
    parser.add_argument(
        "--keep_ids",
        action="store_true",
        help="leave documents as they are; otherwise those that lack the first token that `prepare` writes "
        "(bos, or eos where there is none) get it, those without text are left out, and for nanogpt those "
        "that lack the eos token at their end get it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Converts, and prints what was read and written."""
    from llm_pretrain.data import Conversion, convert

    report = convert(
        Conversion(
            arguments.source,
            arguments.target,
            arguments.input,
            arguments.output,
            tokenizer=arguments.tokenizer,
            validation_fraction=arguments.validation_fraction,
            keep_ids=arguments.keep_ids,
        )
    )
    print(f"{arguments.target:<10} {printable(arguments.output)}")
    print(f"read       {report.tokens_read:,} tokens")
    for name in ("train", "validation"):
        print(f"{name:<10} {report.documents[name]:,} documents, {report.tokens[name]:,} tokens")
    if report.masked:
        print(f"masked     {report.masked:,} tokens")
    if report.first_tokens_added:
        print(f"added      {report.first_tokens_added:,} first tokens, one to each document that lacked it")
    if report.ends_added:
        print(f"added      {report.ends_added:,} eos tokens, one to each document that did not end in it")
    if report.ends_missing:
        print(
            f"warning    {report.ends_missing:,} documents end without the eos token and run into the next "
            "one"
        )
    if report.ends_inside:
        print(
            f"warning    {report.ends_inside:,} eos tokens inside documents: readers of nanoGPT's files end "
            "a document at each"
        )
    if report.empty_documents:
        print(f"left out   {report.empty_documents:,} × empty document")
    for name in report.unended:
        print(f"warning    {printable(name)}: not one end of a document in it; is this its tokenizer?")
    if report.mask_lost:
        print(f"warning    {arguments.target} has no place for the loss mask: it is lost")
    return 0
