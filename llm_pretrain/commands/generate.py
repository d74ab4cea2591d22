"""`llm-pretrain generate`: continue a prompt with a weights folder.

For a look at what a model has learnt; it recomputes the prefix for every token. Serving is the business
of the libraries that open the same folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from llm_pretrain.model import Decoder

HELP = "continue a prompt with trained weights"

EXAMPLES = """\
examples:
  llm-pretrain generate runs/quickstart/weights --prompt "def main("
  llm-pretrain generate runs/quickstart/weights/step-00000100 --prompt "def main("
  llm-pretrain generate WEIGHTS --prompt "import os" --temperature 0 --max_new_tokens 50
  llm-pretrain generate WEIGHTS --prompt "class " --top_k 50 --seed 7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        help="weights folder, such as RUN/weights/step-00000100, or RUN/weights for its newest",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue; may be empty")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="tokens at most (default: 100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top_k", type=int, default=50, help="sample from the k likeliest; 0: all (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation; returns the exit code."""
    negative = [name for name in ("max_new_tokens", "temperature", "top_k") if getattr(arguments, name) < 0]
    if negative:
        raise ConfigError(f"--{negative[0]}: expected 0 or more, found {getattr(arguments, negative[0])}")
    from tokenizers import Tokenizer

    from llm_pretrain.export import load_pretrained, read_config

    folder = weights_folder(Path(arguments.weights))
    config = read_config(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: expected the tokenizer beside the weights, found no such file")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # as in training: text that looks like a special token is text
    end = config.get("eos_token_id")
    start = config["bos_token_id"] if config.get("bos_token_id") is not None else end
    ids = ([] if start is None else [start]) + tokenizer.encode(
        arguments.prompt, add_special_tokens=False
    ).ids
    if not ids:
        raise ConfigError("--prompt: expected some text, since this tokenizer has no start token; found none")
    model = load_pretrained(folder).eval()
    new_ids: list[int] = []
    for token in sample(
        model,
        ids,
        vocab_size=tokenizer.get_vocab_size(),
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    ):
        if token == end:
            break
        new_ids.append(token)
    prompt_ids = ids if start is None else ids[1:]
    sys.stdout.write(tokenizer.decode([*prompt_ids, *new_ids]) + "\n")
    return 0


def weights_folder(folder: Path) -> Path:
    """The folder itself where it holds weights; of a run's `weights/`, its newest."""
    return folder if (folder / "config.json").exists() else max(folder.glob("step-*"), default=folder)


def sample(
    model: Decoder,
    ids: list[int],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yield new token ids, without end-of-sequence handling.

    Args:
        model: In eval mode.
        ids: The prompt, at least one id.
        vocab_size: The tokenizer's; the model's rows beyond it are padding and never sampled.
        max_new_tokens: How many to yield.
        temperature: Divides the logits; 0 takes the likeliest.
        top_k: Sample from so many likeliest; 0 from all.
        seed: Of the sampling.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(max_new_tokens):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]])
        with torch.inference_mode():
            logits = model(window).logits[0, -1, :vocab_size].float()
        ids.append(_choose(logits, temperature, top_k, generator))
        yield ids[-1]


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    kept, positions = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
    choice = (kept / temperature).softmax(0).multinomial(1, generator=generator)
    return int(positions[choice])
