"""`llm-pretrain export`: weights in the format of another library."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.errors import CheckpointError, ConfigError, printable
from llm_pretrain.files import check_replaceable
from llm_pretrain.text import size_text

EXAMPLES = """\
examples:
  llm-pretrain export runs/quickstart --to gguf --output quickstart.gguf
  llm-pretrain export runs/quickstart/weights/best --to gguf --dtype fp16 --output best.gguf
  llm-pretrain export runs/quickstart/weights/step-00000100 --to huggingface --dtype fp16 --output model
  llm-pretrain export runs/quickstart/checkpoints/step-00000400 --to huggingface --output model-fp32
  llm-pretrain export WEIGHTS --to gguf --output model.gguf --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="WEIGHTS",
        help="weights folder such as RUN/weights/step-00000100 or RUN/weights/best; RUN or RUN/weights: "
        "the newest; a checkpoint, RUN/checkpoints/step-00000100, for full precision",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=["gguf", "huggingface"],
        help="gguf: one file for llama.cpp and what builds on it; huggingface: a folder for transformers, "
        "vLLM, MLX and others",
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="file or folder to write")
    parser.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], help="of the matrices (default: the weights' own)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at --output")


def run(arguments: argparse.Namespace) -> int:
    """Write the export and print its path; returns the exit code."""
    from llm_pretrain.checkpoints.weights import convert_weights
    from llm_pretrain.export.gguf import write_gguf
    from llm_pretrain.export.huggingface import read_config

    source, output = find_weights(Path(arguments.source)), Path(arguments.output)
    is_folder, overwrite = arguments.to == "huggingface", arguments.overwrite

    def check() -> None:  # called twice: another export may create `output` meanwhile
        _check_output(source, output, is_folder=is_folder, overwrite=overwrite)

    check()
    notes: list[str] = []
    with _weights_of(source) as weights:
        dtype = arguments.dtype or _own_dtype(read_config(weights))
        if arguments.to == "gguf":
            Tokenizer(weights)  # raises for a broken tokenizer
            notes = write_gguf(weights, output, dtype, check=check)
        else:
            convert_weights(weights, output, dtype, check=check)
    print(printable(f"{arguments.to}  {output}, {dtype}, {size_text(_size(output))}, from {source}"))
    for note in notes:
        print(printable(f"note  {note}"))
    return 0


def find_weights(path: Path) -> Path:
    """`path` if it holds weights or a checkpoint, else the newest weights of a run or of its `weights/`."""
    from llm_pretrain.checkpoints.folders import committed_folders

    found = committed_folders(path / "weights") or committed_folders(path)
    return found[max(found)] if found and not (path / "config.json").is_file() else path


@contextmanager
def _weights_of(source: Path) -> Iterator[Path]:
    """`source`, or a temporary weights folder in full precision if `source` is a checkpoint."""
    from llm_pretrain.checkpoints.opening import is_checkpoint, open_model
    from llm_pretrain.checkpoints.weights import save_weights

    if not is_checkpoint(source):
        yield source
        return
    opened = open_model(source)
    if opened.tokenizer_folder is None or opened.run is None:
        raise CheckpointError(
            f"{source}: expected the run's tokenizer in its data store or beside its weights, found none"
        )
    tokenizer = open_tokenizer(opened.tokenizer_folder)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    with TemporaryDirectory(prefix="llm-pretrain-export-") as folder:
        yield save_weights(
            Path(folder),
            opened.step or 0,
            opened.model,
            opened.model.config,
            dtype="fp32",
            tokenizer_folder=opened.tokenizer_folder,
            token_ids={name: getattr(tokenizer, name) for name in names},
            keep_last=2,
            sequence_length=opened.run.training.sequence_length,
        )


def _check_output(source: Path, output: Path, *, is_folder: bool, overwrite: bool) -> None:
    """Refuse an existing --output, unless --overwrite is given and it is an export other than the source."""
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise ConfigError(f"--output {output}: expected a new path, found one in use; add --overwrite")
    if output.is_dir() != is_folder:
        expected, found = ("folder", "file") if is_folder else ("file", "folder")
        raise ConfigError(f"--output {output}: expected a {expected} to replace, found a {found}")
    if not is_folder:
        check_replaceable(output, b"llm_pretrain", begin=b"GGUF")
        return
    if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
        raise ConfigError(
            f"--output {output}: expected a folder without the weights to export, found them in it"
        )
    from llm_pretrain.checkpoints.weights import other_content

    if found := "a link" if output.is_symlink() else other_content(output):
        raise ConfigError(
            f"--output {output}: expected an empty folder or weights that this program wrote, found {found}; "
            "choose another"
        )


def _own_dtype(config: dict) -> str:
    """The weights' dtype in config.json; bf16 if it is missing or unsupported."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16")


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)
