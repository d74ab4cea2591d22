"""Options of the commands that use a trained model, and opening the model with its tokenizer."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from llm_pretrain.checkpoints import OpenedModel
    from llm_pretrain.data import Tokenizer
    from llm_pretrain.model import Decoder

SOURCE_HELP = (
    "weights folder (RUN/weights/step-00000100, RUN/weights/best, Hugging Face's), checkpoint "
    "(RUN/checkpoints/step-00000100), or RUN, RUN/weights, RUN/checkpoints for the latest in it"
)


@dataclass(frozen=True)
class Source:
    """An opened model with its tokenizer.

    Args:
        model: On `device`, in eval mode.
        tokenizer: The model's.
        start_id: The first id of a text, as in training: BOS, or else EOS; None with neither.
        stop_ids: Ids that end a text.
        opened: The opened files.
        device: Of the model.
    """

    model: Decoder
    tokenizer: Tokenizer
    start_id: int | None
    stop_ids: frozenset[int]
    opened: OpenedModel
    device: torch.device

    def encode(self, text: str) -> list[int]:
        """Start id and the ids of the text, in which no special token is recognised."""
        start = [] if self.start_id is None else [self.start_id]
        return start + self.tokenizer.encode([text])[0]


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


def open_source(arguments: argparse.Namespace) -> Source:
    """Open the model of the options of `add_source_arguments`.

    Raises:
        CheckpointError: The model or its tokenizer is missing, damaged or does not match.
        ConfigError: The device does not exist, or the decoder does not support the architecture.
        DataError: The tokenizer is damaged.
    """
    import torch

    from llm_pretrain.checkpoints import open_model
    from llm_pretrain.data import Tokenizer

    device = _device(arguments.device)
    opened = open_model(arguments.source)
    folder = Path(arguments.tokenizer) if arguments.tokenizer else opened.tokenizer_folder
    if folder is None:
        raise CheckpointError(
            f"{opened.path / 'tokenizer.json'}: expected the tokenizer beside the {opened.kind}, found no "
            "such file; name its folder with --tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder / 'tokenizer.json'}: expected a tokenizer, found no such file")
    tokenizer = Tokenizer(folder)
    rows = opened.model.lm_head.weight.shape[0]
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: expected at most the model's {rows} ids, found "
            f"{tokenizer.vocab_size}; it is another model's tokenizer"
        )
    own = opened.tokenizer_folder
    if own is not None and Tokenizer(own).hash != tokenizer.hash:
        print(f"warning: {folder} is not the tokenizer beside the model, {own}", file=sys.stderr)
    dtype = torch.bfloat16 if getattr(arguments, "dtype", "fp32") == "bf16" else torch.float32
    ends = _ids(opened.token_ids.get("eos_token_id")) or _ids(tokenizer.eos_token_id)
    starts = _ids(opened.token_ids.get("bos_token_id")) or _ids(tokenizer.bos_token_id) or ends
    if starts and not 0 <= starts[0] < rows:
        raise CheckpointError(
            f"{opened.path}: expected a bos_token_id of the model's {rows} ids, found {starts[0]}; correct "
            "generation_config.json, which goes before config.json"
        )
    return Source(
        model=opened.model.to(device, dtype),
        tokenizer=tokenizer,
        start_id=starts[0] if starts else None,
        stop_ids=frozenset(ends),
        opened=opened,
        device=device,
    )


def _ids(value: object) -> list[int]:
    """The ids of a JSON entry, a number, a list of numbers, or neither."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int)]


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on `meta`, which has no values
    except (RuntimeError, AssertionError, ImportError) as error:  # no package for it
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(
            f"--device: expected cpu or a device of this machine, found {name} ({reason})"
        ) from None
    return device
