"""`llm-pretrain configs`: lists the presets, and converts configurations of other projects."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.config.loading import PRESETS, from_dict
from llm_pretrain.config.yaml_text import read_settings_text, read_yaml
from llm_pretrain.errors import ConfigError, OutputError, printable
from llm_pretrain.files import check_replaceable, replace_text
from llm_pretrain.text import as_table, first_line, quantity

if TYPE_CHECKING:
    from llm_pretrain.export.importers import ImportedConfig

EXAMPLES = """\
examples:
  llm-pretrain configs
  llm-pretrain configs --from_pretrained SmolLM2-135M/ --output model.yaml
  llm-pretrain configs --from_minimind "--hidden_size 768 --use_moe 1 --batch_size 32" --output mine.yaml
"""

_ROWS = 4096
"""Assumed vocabulary size of a preset that names none, not even in its first line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without an option: lists the presets, whose names --config takes, with their sizes. With one of "
        "--from_…: writes a configuration file; its comments list what could not be carried over. "
        "docs/coming_from.md has the settings of nanoGPT, LitGPT and Trainer."
    )
    parser.add_argument("--folder", help="list the files of this folder (default: the presets)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from_pretrained", metavar="FOLDER", help="the model section of a Hugging Face folder's config.json"
    )
    source.add_argument(
        "--from_minimind", metavar="OPTIONS", help="the options of MiniMind's train_pretrain.py, in quotes"
    )
    parser.add_argument(
        "--minimind_version", type=int, choices=[2, 3],
        help="MiniMind2 or minimind-3: its architecture and defaults (default: as the options look)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="new file to write (default: print it)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is already there")


def run(arguments: argparse.Namespace) -> int:
    """List the presets, or convert one configuration; returns the exit code."""
    from llm_pretrain.export.importers import from_minimind, from_pretrained

    if arguments.from_minimind is not None:
        return _write(from_minimind(arguments.from_minimind, arguments.minimind_version), arguments)
    if arguments.from_pretrained is not None:
        return _write(from_pretrained(arguments.from_pretrained), arguments)
    if arguments.output is not None:
        raise ConfigError("--output: expected one of the options --from_… beside it, found none")
    return _list(None if arguments.folder is None else Path(arguments.folder))


def _write(imported: ImportedConfig, arguments: argparse.Namespace) -> int:
    """Write the configuration file atomically and print the notes; without --output print its text."""
    text = imported.text()
    if arguments.output is None:
        print(text, end="")
        return 0
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise OutputError(f"--output {output}: expected a new file, found one; choose another or --overwrite")
    check_replaceable(output, b"`llm-pretrain")
    replace_text(output, text)
    for note in imported.notes:
        print(printable(f"note   {note}"))
    for command in imported.commands:
        print(printable(f"data   {command}"))
    print(printable(f"wrote  {output}"))
    if imported.last_note:
        print(printable(f"note   {imported.last_note}"))
    return 0


def _list(folder: Path | None) -> int:
    """One line per preset: sizes, experts, batch."""
    files = sorted((folder or PRESETS).glob("*.yaml"))
    if not files:
        raise ConfigError(f"--folder {folder}: expected a folder with presets (*.yaml), found none")
    rows = [("preset", "parameters", "active", "layers", "sequence", "tokens/step")]
    rows += [(str(file) if folder else file.stem, *_sizes(file)) for file in files]
    print(as_table(rows, right=(1, 2, 4, 5)))
    print("\nlayers: `7 of 4/32+1`: 7 layers in which 4 of 32 experts, and 1 shared, process a token")
    if any("*" in row[1] for row in rows):
        print("*: with the vocabulary that the file's first line names; a run takes its tokenizer's")
    return 0


def _sizes(file: Path) -> tuple[str, str, str, str, str]:
    """Parameters, active parameters, layers, sequence length and tokens per step of a preset."""
    from llm_pretrain.model.sizes import count_parameters

    try:
        text = read_settings_text(file)
        tree = read_yaml(text) or {}
        config = from_dict(tree)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{file}: expected a configuration, found: {first_line(error)}") from error
    model, training, mark = config.model, config.training, ""
    if "hidden_size" not in (tree.get("model") or {}):
        return "", "", "extends another preset", "", ""
    if model.vocab_size is None:
        stated = re.match(r"# .*with a vocabulary of ([\d,]+)", text)
        rows = int(stated[1].replace(",", "")) if stated else _ROWS
        model, mark = dataclasses.replace(model, vocab_size=rows), "*"
    size = count_parameters(model)
    kind = f"{model.num_hidden_layers} dense"
    if model.moe_layers:
        kind = f"{len(model.moe_layers)} of {model.num_experts_per_tok}/{model.num_experts}"
        kind += f"+{model.n_shared_experts}" if model.n_shared_experts else ""
        dense = model.num_hidden_layers - len(model.moe_layers)
        kind += f", {dense} dense" if dense else ""
    sizes = (quantity(size.total) + mark, quantity(size.active) + mark)
    return *sizes, kind, f"{training.sequence_length:,}", f"{training.tokens_per_step:,}"
