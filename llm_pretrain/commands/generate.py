"""`llm-pretrain generate`: continue prompts with trained weights, or with a running run's last checkpoint."""

from __future__ import annotations

import argparse
import math
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.api import TrainedModel, open_source
from llm_pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EXAMPLES = """\
examples:
  llm-pretrain generate runs/quickstart --prompt "def main("
  llm-pretrain generate runs/quickstart/weights/step-00000100 --prompt "def main(" --prompt "class "
  llm-pretrain generate runs/quickstart/weights/best --prompt "import os" --temperature 0 --max_new_tokens 50
  llm-pretrain generate WEIGHTS --prompt_file beginning.txt --top_k 0 --top_p 0.9 --num_samples 3 --seed 7
"""

_ROWS = 64
"""Texts of a batch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
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
    add_sampling_arguments(parser, max_new_tokens=100)
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
    problems = check_sampling(arguments)
    if arguments.num_samples < 1:
        problems.append(f"--num_samples: expected 1 or more, found {arguments.num_samples}")
    if problems:
        raise ConfigError(*problems)
    prompts = [check_utf8("--prompt", text) for text in arguments.prompt]
    prompts += [_read_prompt(name) for name in arguments.prompt_file]
    if not prompts:
        raise ConfigError("--prompt: expected a text to continue, found none; or name a --prompt_file")
    source = open_source(arguments.source, arguments.tokenizer, arguments.device, arguments.dtype)
    encoded = [source.encode(prompt) for prompt in prompts]
    if not all(encoded):
        raise ConfigError("--prompt: expected some text, since this tokenizer has no start token; found none")
    count = arguments.num_samples
    if len(prompts) == count == 1 and not arguments.no_stream:
        parts = _continue(source, arguments, encoded, [(0, 0)])
        write_out(prompts[0])
        for _, part in parts:
            write_out(part)
        write_out("\n")
        return 0
    wanted = ((prompt, sample) for prompt in range(len(prompts)) for sample in range(count))
    while batch := list(islice(wanted, _ROWS)):
        texts = [""] * len(batch)
        for row, part in _continue(source, arguments, encoded, batch):
            texts[row] += part
        for (prompt, sample), text in zip(batch, texts, strict=True):
            write_out(_title(prompt, len(prompts), sample, count) + prompts[prompt] + text + "\n")
    return 0


def _continue(
    source: TrainedModel,
    arguments: argparse.Namespace,
    encoded: list[list[int]],
    wanted: list[tuple[int, int]],
) -> Iterator[tuple[int, str]]:
    """(row, new text) during generation, for the (prompt, sample) pairs `wanted`."""
    from llm_pretrain.model.generation import generate

    columns = generate(
        source.model,
        [encoded[prompt] for prompt, _ in wanted],
        vocab_size=source.tokenizer.vocab_size,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=[arguments.seed + sample for _, sample in wanted],
        stop_ids=source.stop_ids,
    )
    return _texts(source, columns, [len(encoded[prompt]) for prompt, _ in wanted])


def _texts(
    source: TrainedModel, columns: Iterable[list[int | None]], lengths: list[int]
) -> Iterator[tuple[int, str]]:
    """(row, new text) for columns of new ids; `lengths` are those of the prompts."""
    from llm_pretrain.model.generation import TextStream

    pieces = source.tokenizer.token_pieces()
    streams = [TextStream(pieces) for _ in lengths]
    ended = [False] * len(lengths)
    for column in columns:
        for row, token in enumerate(column):
            if token is None or token in source.stop_ids:
                ended[row] = ended[row] or token is not None
                continue
            lengths[row] += 1
            if part := streams[row].push(token):
                yield row, part
    for row, stream in enumerate(streams):
        if rest := stream.finish():
            yield row, rest
    limit = source.model.config.max_position_embeddings
    if any(length >= limit and not end for length, end in zip(lengths, ended, strict=True)):
        print(f"note: ended at the model's {limit} positions (max_position_embeddings)", file=sys.stderr)


def _title(prompt: int, prompts: int, sample: int, samples: int) -> str:
    """The line above a text if there are several."""
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


SOURCE_HELP = (
    "weights folder (RUN/weights/step-00000100, RUN/weights/best, Hugging Face's), checkpoint "
    "(RUN/checkpoints/step-00000100), or RUN, RUN/weights, RUN/checkpoints for the latest in it"
)


def add_source_arguments(parser: argparse.ArgumentParser, *, dtype: bool = True) -> None:
    """Declare SOURCE and the options for opening it; `--dtype` only if `dtype`."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer folder (default: the one beside the model)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")
    if dtype:
        parser.add_argument(
            "--dtype",
            choices=["fp32", "bf16"],
            default="fp32",
            help="what the model computes in; bf16 takes half the memory (default: %(default)s)",
        )


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Declare the options of sampling."""
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=max_new_tokens,
        help="tokens at most; a text also ends where the model's max_position_embeddings do "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top_k", type=int, default=50, help="sample from the k likeliest; 0: all (default: 50)"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        help="sample from the likeliest that together have probability p (default: 1, all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")


def check_sampling(arguments: argparse.Namespace) -> list[str]:
    """Problems of sampling options that are out of range, found before a model is opened."""
    problems = [
        f"--{name}: expected 0 or more, found {getattr(arguments, name)}"
        for name in ("max_new_tokens", "temperature", "top_k")
        if not 0 <= getattr(arguments, name) < math.inf
    ]
    if not 0 < arguments.top_p <= 1:
        problems.append(f"--top_p: expected a number above 0 and up to 1, found {arguments.top_p}")
    if not 0 <= arguments.seed < 1 << 62:
        problems.append(f"--seed: expected 0 to 2^62 - 1, found {arguments.seed}")
    return problems


def check_utf8(option: str, text: str) -> str:
    """`text` if it is valid UTF-8; other bytes of the command line arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{option}: expected UTF-8 text, found other bytes at character {error.start}"
        ) from None
    return text


def write_out(text: str) -> None:
    """Print and flush without a newline; a character that the terminal cannot encode becomes `?`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
