"""`llm-pretrain inspect`: prints what is in a token store, or what a run read at a step, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.data.inspection import Sample, SamplePart, inspect_store, sample_documents
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import ConfigError, printable
from llm_pretrain.runs.record import is_run_folder

EXAMPLES = """\
examples:
  llm-pretrain inspect data/stores/stdlib
  llm-pretrain inspect data/stores/stdlib --sequence_length 4096
  llm-pretrain inspect data/stores/chat --samples 3 --seed 1
  llm-pretrain inspect data/stores/web --verify
  llm-pretrain inspect data/stores/web --samples 2 --json
  llm-pretrain inspect runs/quickstart --step 120 --loss
"""
_BAR = 40
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Symbols of control characters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="folder of a token store, or of a run with --step")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="show the sequences that a run read at step N, confirmed by its row",
    )
    parser.add_argument(
        "--loss", action="store_true", help="with each one's loss under the newest checkpoint before the step"
    )
    parser.add_argument(
        "--sequence_length",
        type=int,
        default=512,
        metavar="S",
        help="length of the sequences that packing is shown for (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="N",
        help="show the beginnings of N documents, masked tokens dim or between ⟦ ⟧ (default: %(default)s)",
    )
    parser.add_argument(
        "--split",
        choices=["train", "validation"],
        default="train",
        help="split of the samples (default: train)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed that chooses the samples (default: 0)")
    parser.add_argument("--verify", action="store_true", help="read every file and check its hash")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Open the store, which also checks it, and print its content."""
    if arguments.step is not None:
        return _run_of_step(Path(arguments.store), arguments)
    if is_run_folder(Path(arguments.store)):
        raise ConfigError(f"--step: expected a step of the run {arguments.store}, found none")
    if arguments.seed < 0:
        raise ConfigError(f"--seed: expected 0 or more, found {arguments.seed}")
    store = TokenStore(arguments.store)
    if arguments.verify:
        store.verify()
    facts = inspect_store(store, arguments.sequence_length)
    samples = list(sample_documents(store, arguments.samples, arguments.seed, arguments.split))
    if arguments.json:
        verified = {"verified": arguments.verify, "samples": [dataclasses.asdict(s) for s in samples]}
        print(json.dumps(facts | verified, indent=1, ensure_ascii=False))
        return 0
    _print_store(facts, verified=arguments.verify)
    for name, split in facts["splits"].items():
        _print_split(name, split, facts["sequence_length"])
    for sample in samples:
        _print_sample(sample)
    return 0


def _run_of_step(folder: Path, arguments: argparse.Namespace) -> int:
    from llm_pretrain.audit.step_samples import sequences_of_step

    sequences = sequences_of_step(folder, arguments.step, with_loss=arguments.loss)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in sequences], indent=1, ensure_ascii=False))
        return 0
    for sequence in sequences:
        loss = "" if sequence.loss is None else f", loss {sequence.loss:.4f} at step {sequence.loss_step}"
        mark = ", stands out" if sequence.stands_out else ""
        print(f"\n=== sequence {sequence.slot}, of {printable(sequence.source)}{loss}{mark}")
        for piece in sequence.pieces:
            _print_parts(
                f"document {piece.document:,} from token {piece.start:,}, {piece.tokens:,} tokens",
                piece.parts,
            )
    if slots := [str(sequence.slot) for sequence in sequences if sequence.stands_out]:
        print(f"\nsequences whose loss stands out: {', '.join(slots)}")
    return 0


def _print_store(facts: dict[str, Any], *, verified: bool) -> None:
    checked = ", every file has its hash" if verified else ""
    size = f"{facts['bytes_on_disk']:,} bytes, {facts['dtype']}"
    print(f"store      {printable(facts['store'])}, {size}{checked}")
    counts = facts["input_documents"] or [None] * len(facts["inputs"])
    for name, count in zip(facts["inputs"], counts, strict=False):
        print(f"input      {_visible(name)}" + ("" if count is None else f", {count:,} documents"))
    tokenizer = facts["tokenizer"]
    names = ", ".join(
        f"{key} {_visible(tokenizer[key])}" for key in ("bos", "eos", "pad") if tokenizer[key] is not None
    )
    chat = ", chat template" if tokenizer["chat_template"] else ""
    print(f"tokenizer  {tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, {names}{chat}")
    print_text_facts(facts)


def print_text_facts(facts: Mapping[str, Any]) -> None:
    """Print how zlib compresses a store's text, and what of its inputs the store does not have."""
    if facts["zlib_bits_per_byte"] is not None:
        print(f"zlib -9    {facts['zlib_bits_per_byte']:.3f} bits per byte of the validation text")
    for cause, count in sorted(facts["skipped"].items()):
        print(f"left out   {count:,} × {_visible(cause)}")
    if facts["duplicates"]:
        print(f"left out   {facts['duplicates']:,} × duplicate")
    if altered := facts["altered_documents"]:
        print(f"warning    {altered:,} documents: this tokenizer does not give back their text exactly")


def _print_split(name: str, split: dict[str, Any], sequence_length: int) -> None:
    print(f"\n{name:<10} {split['documents']:,} documents, {split['tokens']:,} tokens", end="")
    if not split["documents"]:
        print()
        return
    print(f", {split['text_bytes']:,} bytes, {split['bytes_per_token']:.3f} bytes per token")
    print(f"masked     {split['masked_share']:.2%} of the tokens to predict, {split['targets']:,} trained on")
    print("lengths    " + ", ".join(f"{key} {value:,.0f}" for key, value in split["lengths"].items()))
    most = max(row["documents"] for row in split["histogram"])
    for row in split["histogram"]:
        bar = "█" * round(_BAR * row["documents"] / most) or ("▏" if row["documents"] else "")
        span = f"{row['from']}-{row['to']}" if row["to"] > row["from"] else str(row["from"])
        print(f"{span:>17}  {bar} {row['documents']:,}".rstrip())
    for packing, packed in split["packing"].items():
        print(
            f"{packing:<10} {packed['efficiency']:.2%} of the places filled, "
            f"{packed['sequences']:,} sequences of {sequence_length:,}"
        )


def _print_sample(sample: Sample) -> None:
    rest = f", first {sample.shown:,}" if sample.shown < sample.tokens else ""
    title = f"{sample.split} document {sample.document:,}, {sample.tokens:,} tokens{rest}"
    _print_parts(title, sample.parts)


def _print_parts(title: str, parts: Sequence[SamplePart]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    marked = console.is_terminal and not console.no_color
    text = Text(f"\n{title}\n", style="bold")
    for part in parts:
        shown = _visible(part.text)
        if not part.masked:
            text.append(shown, style="not bold")
        elif marked:
            text.append(shown, style="not bold dim cyan")
        else:
            text.append(f"⟦{shown}⟧", style="not bold")
    if marked:
        console.print(text)
    else:
        sys.stdout.write(text.plain + "\n")


def _visible(text: str) -> str:
    """Replace control characters by symbols, so that a document cannot control the terminal."""
    return text.translate(_PICTURES)
