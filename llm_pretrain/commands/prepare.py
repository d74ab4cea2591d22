"""`llm-pretrain prepare`: tokenizes a corpus into a token store to train on."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from tqdm import tqdm

from llm_pretrain.commands.inspect import print_text_facts
from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.data.preparation import Preparation, input_bytes, prepare_store
from llm_pretrain.errors import printable

EXAMPLES = """an input is one of:
  .jsonl .ndjson .jl .json         a record per line, or an array of records
  .parquet .arrow .feather .csv .tsv  a record per row
  any other file (.txt, .md, .py)  one document, or several with --document_separator
  each of them as .gz, .zst, .bz2 or .xz too (not .parquet and .arrow)
  a folder of these, in sorted order, or a pattern such as 'data/*.jsonl.gz'
  hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]  streamed from the Hugging Face hub (default: train)
  stdlib, stdlib-chat              the Python standard library's source, and conversations about it

a record is one of:
  {"text": "…"}                                     every token is trained on
  {"prompt": "…", "completion": "…"}                only the completion is trained on
  {"messages": [{"role": "user", "content": "…"}, …]}  by the tokenizer's chat template; only what the
                                                    assistant says is trained on (also `conversations`)
  {"segments": [{"text": "…", "loss": false}, …]}   the segments with loss are trained on
  {"input_ids": [5, 9, 2], "loss_mask": [0, 1, 1]}  stored as it is
  {"input_ids": [5, 9, 2], "labels": [-100, 9, 2]}  stored as it is; labels are not shifted

examples:
  llm-pretrain prepare --input stdlib --tokenizer data/tokenizers/stdlib --output data/stores/stdlib
  llm-pretrain prepare --input corpus.jsonl notes/ --tokenizer data/tokenizers/mine --output data/stores/mine
  llm-pretrain prepare --input 'shards/*.parquet' --text_column content --tokenizer qwen3/ \\
      --output data/stores/code
  llm-pretrain prepare --input hf://HuggingFaceFW/fineweb-edu/sample-10BT --tokenizer qwen3/ \\
      --output data/stores/edu
  llm-pretrain prepare --input big.jsonl --validation_fraction 0.001 --tokenizer qwen3/ --output data/stores/b
  llm-pretrain prepare --input crawl/ --deduplicate --tokenizer qwen3/ --output data/stores/crawl
  llm-pretrain prepare --input raw.jsonl --on_error skip --tokenizer qwen3/ --output data/stores/raw
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tokenizes a corpus on all cores, and splits it into train and validation by document hash. "
        "Started again with the same options after a kill, it resumes."
    )
    add_parameters(parser, Preparation, without=("shard_bytes", "commit_seconds", "progress", "notice"))


def run(arguments: argparse.Namespace) -> int:
    """Prepare the store, with a progress bar on a terminal, and print its counts."""
    started = time.perf_counter()
    preparation = Preparation(**chosen(arguments, Preparation))
    with tqdm(total=input_bytes(preparation), unit="B", unit_scale=True, disable=None, leave=False) as bar:
        notice = lambda text: bar.write(f"notice     {printable(text)}")  # noqa: E731
        store = prepare_store(replace(preparation, progress=bar.update, notice=notice))
    print(f"store      {printable(arguments.output)} in {time.perf_counter() - started:.1f} s")
    for name in ("train", "validation"):
        split = store.facts["splits"][name]
        print(
            f"{name:<10} {split['documents']:,} documents, {split['tokens']:,} tokens, "
            f"{split['targets']:,} trained on, {split['text_bytes']:,} bytes"
        )
    if len(preparation.inputs) > 1:
        for name, documents in zip(preparation.inputs, store.facts["input_documents"], strict=True):
            print(f"input      {documents:,} documents from {printable(name)}")
    facts = store.facts | {"zlib_bits_per_byte": store.zlib_bits_per_byte}
    if count := facts["special_tokens_in_texts"]:
        print(f"special    {count:,} tokens in texts, read as {facts['special_tokens']} (--special_tokens)")
    print_text_facts(facts)
    if arguments.validation_fraction > 0 and not store.facts["splits"]["validation"]["documents"]:
        print(
            "warning    no document is in the validation split: runs on this store evaluate nothing and keep "
            "no weights/best; raise --validation_fraction or cut the text into more documents"
        )
    return 0
