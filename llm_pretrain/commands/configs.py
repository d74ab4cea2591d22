"""`llm-pretrain configs`: lists the presets with their sizes, and writes foreign configurations as ours.

The readers of foreign formats are in `foreign_configs/`. Nothing is trained and nothing is run.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from llm_pretrain.commands.foreign_configs import Imported

HELP = "list the presets; write other frameworks' configurations as ours"

EXAMPLES = """\
examples:
  llm-pretrain configs
  llm-pretrain configs --from_pretrained SmolLM2-135M/ --output model.yaml
  llm-pretrain configs --from_minimind "--hidden_size 768 --use_moe 1 --batch_size 32" --output mine.yaml
  llm-pretrain configs --from_nanogpt nanoGPT/config/train_gpt2.py --output gpt2.yaml
  llm-pretrain configs --from_litgpt config_hub/pretrain/tinyllama.yaml --output tinyllama.yaml
"""

_ROWS = 4096
"""Rows of the vocabulary that a listing counts where a preset takes the tokenizer's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.description = (
        "Without an option: the presets in a folder with their sizes. With one of --from_…: a configuration "
        "file, in whose comments stands whatever could not be carried over."
    )
    parser.add_argument("--folder", default="configs", help="folder of presets (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from_pretrained", metavar="FOLDER", help="the model section of a Hugging Face folder's config.json"
    )
    source.add_argument(
        "--from_minimind", metavar="OPTIONS", help="the options of MiniMind's train_pretrain.py, in quotes"
    )
    source.add_argument(
        "--from_nanogpt", metavar="FILE", help="a configuration file of nanoGPT; parsed, never run"
    )
    source.add_argument("--from_litgpt", metavar="FILE", help="a pretraining file of litgpt")
    parser.add_argument(
        "--minimind_version", type=int, choices=[2, 3],
        help="MiniMind2 or minimind-3: its architecture and defaults (default: as the options look)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="new file to write (default: print it)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is already there")


def run(arguments: argparse.Namespace) -> int:
    """List, or import one configuration; returns the exit code."""
    from llm_pretrain.commands.foreign_configs import (
        from_litgpt,
        from_minimind,
        from_nanogpt,
        from_pretrained,
    )

    if arguments.from_pretrained is not None:
        return _write(from_pretrained(arguments.from_pretrained), arguments)
    if arguments.from_minimind is not None:
        return _write(from_minimind(arguments.from_minimind, arguments.minimind_version), arguments)
    if arguments.from_nanogpt is not None:
        return _write(from_nanogpt(arguments.from_nanogpt), arguments)
    if arguments.from_litgpt is not None:
        return _write(from_litgpt(arguments.from_litgpt), arguments)
    if arguments.output is not None:
        raise ConfigError("--output: expected one of the options --from_… beside it, found none")
    return _list(Path(arguments.folder))


def _write(imported: Imported, arguments: argparse.Namespace) -> int:
    """The file, whole or not at all, and its notes on the console; without --output the file's text."""
    text = imported.text()
    if arguments.output is None:
        print(text, end="")
        return 0
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise OutputError(f"--output {output}: expected a new file, found one; choose another or --overwrite")
    temporary = output.with_name(f".{output.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(output)
    for note in imported.notes:
        print(f"note   {note}")
    for command in imported.commands:
        print(f"data   {command}")
    print(f"wrote  {output}")
    return 0


def _list(folder: Path) -> int:
    """One line per preset: sizes, experts, batch."""
    import dataclasses

    from llm_pretrain.config import YamlError, from_dict, read_yaml
    from llm_pretrain.model import count_parameters

    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(
            f"--folder {folder}: expected a folder with presets (*.yaml), found none; start in the project's "
            "folder or name it"
        )
    rows = [("preset", "parameters", "active", "layers", "sequence", "tokens/step")]
    counted = set()
    for file in files:
        try:
            text = file.read_text("utf-8")
            config = from_dict(read_yaml(text) or {})
        except (YamlError, ConfigError, ValueError) as error:
            raise ConfigError(
                f"{file}: expected a configuration, found: {str(error).splitlines()[0]}"
            ) from error
        model, training, mark = config.model, config.training, ""
        if model.vocab_size is None:
            stated = re.match(r"# .*with a vocabulary of ([\d,]+)", text)
            counted.add(rows_counted := int(stated[1].replace(",", "")) if stated else _ROWS)
            model, mark = dataclasses.replace(model, vocab_size=rows_counted), "*"
        size = count_parameters(model)
        kind = f"{model.num_hidden_layers} dense"
        if model.moe_layers:
            kind = f"{len(model.moe_layers)} of {model.num_experts_per_tok}/{model.num_experts}"
            kind += f"+{model.n_shared_experts}" if model.n_shared_experts else ""
            dense = model.num_hidden_layers - len(model.moe_layers)
            kind += f", {dense} dense" if dense else ""
        tokens = training.global_batch_size * training.sequence_length
        sizes = (_short(size.total) + mark, _short(size.active) + mark)
        rows.append((str(file), *sizes, kind, f"{training.sequence_length:,}", f"{tokens:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, 3) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print("\nlayers: `7 of 4/32+1`: 7 layers in which 4 of 32 experts, and 1 shared, answer a token")
    if counted:
        rows_text = " or ".join(f"{count:,}" for count in sorted(counted))
        print(f"*: takes the tokenizer's vocabulary; counted with {rows_text} tokens")
    return 0


def _short(count: int) -> str:
    """Three digits and a unit."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count / size:,.0f}{unit}"
    return f"{count / 1000:.3g}k"
