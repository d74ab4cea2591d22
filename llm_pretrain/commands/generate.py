"""`llm-pretrain generate`: continue prompts with trained weights, or with a running run's last checkpoint."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llm_pretrain.api import TrainedModel, open_model
from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.config.schema import NonNegativeFloat, NonNegativeInt, Range
from llm_pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = """\
examples:
  llm-pretrain generate runs/quickstart --prompt "def main("
  llm-pretrain generate runs/quickstart/weights/step-00000100 --prompt "def main(" --prompt "class "
  llm-pretrain generate runs/quickstart/weights/best --prompt "import os" --temperature 0 --max_new_tokens 50
  llm-pretrain generate WEIGHTS --prompt_file beginning.txt --top_k 0 --top_p 0.9 --num_samples 3 --seed 7
"""

_ROWS = 64
"""Number of texts that are generated in one batch."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        max_new_tokens: Tokens at most; a text also ends where the model's max_position_embeddings do.
        temperature: 0 always takes the likeliest.
        top_k: Sample from the k likeliest; 0: all.
        top_p: Sample from the likeliest that together have probability p; 1: all.
        seed: Seed of the sampling.
        no_token_healing: Continue after the prompt's last token, though the text may go on within it.
    """

    max_new_tokens: NonNegativeInt = 100
    temperature: NonNegativeFloat = 0.8
    top_k: NonNegativeInt = 50
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    seed: Annotated[int, Range(ge=0, le=(1 << 62) - 1)] = 0
    no_token_healing: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, open_model, positional=["source"])
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be empty, and may be given several times",
    )
    parser.add_argument(
        "--prompt_file",
        action="append",
        default=[],
        metavar="FILE",
        help="file whose whole text is a prompt, without the line break at its end; - reads standard input",
    )
    add_parameters(parser, Sampling)
    parser.add_argument(
        "--num_samples",
        type=int,
        default=1,
        help="texts for each prompt; sample k has seed + k - 1 (default: 1)",
    )
    parser.add_argument(
        "--no_stream", action="store_true", help="print a text when it is whole, not token by token"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt and its continuation; returns the exit code."""
    count, problems = arguments.num_samples, []
    if count < 1:
        problems.append(f"--num_samples: expected 1 or more, found {count}")
    sampling = chosen(arguments, Sampling, *problems)
    prompts = [*arguments.prompt, *map(_read_prompt, arguments.prompt_file)]
    if not prompts:
        raise ConfigError("--prompt: expected a text to continue, found none; or name a --prompt_file")
    source = open_model(**chosen(arguments, open_model))
    encoded = [source.encode(prompt) for prompt in prompts]
    if not all(encoded):
        raise ConfigError("--prompt: expected some text, since this tokenizer has no start token; found none")
    if len(prompts) == count == 1 and not arguments.no_stream:
        parts = _continue(source, sampling, encoded, [(0, 0)])
        write_out(prompts[0])
        for _, part in parts:
            write_out(part)
        write_out("\n")
        return 0
    wanted = ((prompt, sample) for prompt in range(len(prompts)) for sample in range(count))
    while batch := list(islice(wanted, _ROWS)):
        texts = [""] * len(batch)
        for row, part in _continue(source, sampling, encoded, batch):
            texts[row] += part
        for (prompt, sample), text in zip(batch, texts, strict=True):
            write_out(_title(prompt, len(prompts), sample, count) + prompts[prompt] + text + "\n")
    return 0


def _continue(
    source: TrainedModel,
    sampling: dict[str, Any],
    encoded: list[list[int]],
    wanted: list[tuple[int, int]],
) -> Iterator[tuple[int, str]]:
    """Generate texts for the (prompt, sample) pairs `wanted`; yields (row, new text) meanwhile."""
    from llm_pretrain.model.generation import generate_texts

    prompts = [encoded[prompt] for prompt, _ in wanted]
    how = {**sampling, "seed": [sampling["seed"] + sample for _, sample in wanted]}
    how["token_healing"] = not how.pop("no_token_healing")
    pieces, limit = source.tokenizer.token_pieces(), source.model.config.longest_sequence
    return _noting(generate_texts(source.model, prompts, pieces, stop_ids=source.stop_ids, **how), limit)


def _noting(texts: Iterator[tuple[int, str, str | None]], limit: int) -> Iterator[tuple[int, str]]:
    """The texts, and a note if one of them ended at the last of `limit` positions."""
    ends = set()
    for row, part, end in texts:
        ends.add(end)
        yield row, part
    if "positions" in ends:
        print(f"note: ended at the model's {limit} positions (max_position_embeddings)", file=sys.stderr)


def _title(prompt: int, prompts: int, sample: int, samples: int) -> str:
    """The line above a text; empty if there is only one text."""
    names = [f"prompt {prompt + 1}"] if prompts > 1 else []
    names += [f"sample {sample + 1}"] if samples > 1 else []
    return f"--- {', '.join(names)} ---\n" if names else ""


def _read_prompt(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise DataError(f"--prompt_file {name}: expected a readable file, found: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt_file {name}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset "
            f"{error.start}"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def write_out(text: str) -> None:
    """Print and flush without a newline; a character that the terminal cannot encode becomes `?`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
