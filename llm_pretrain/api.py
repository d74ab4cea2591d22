"""Opens a trained model with its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.text import reason_of

if TYPE_CHECKING:
    import torch

    from llm_pretrain.checkpoints.opening import OpenedModel
    from llm_pretrain.data.tokenizers import Tokenizer
    from llm_pretrain.model.decoder import Decoder


@dataclass(frozen=True)
class TrainedModel:
    """An opened model with its tokenizer.

    Args:
        model: On `device`, in eval mode.
        tokenizer: The model's.
        start_id: The first id of a text, as in training: BOS, or else EOS; None with neither.
        stop_ids: Ids that end a text.
        opened: The opened files.
        device: The model's device.
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


def open_source(
    source: str | Path,
    tokenizer: str | Path | None = None,
    device: str | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> TrainedModel:
    """Open a trained model with its tokenizer.

    Args:
        source: Weights folder (RUN/weights/step-00000100, RUN/weights/best, Hugging Face's), checkpoint
            (RUN/checkpoints/step-00000100), or RUN, RUN/weights, RUN/checkpoints for the latest in it.
        tokenizer: Tokenizer folder (default: the one beside the model).
        device: Device: cpu, cuda, cuda:1 … (default: cuda where there is one).
        dtype: What the model computes in; bf16 takes half the memory.

    Raises:
        CheckpointError: The model or its tokenizer is missing, damaged or does not match.
        ConfigError: The device does not exist, or the decoder does not support the architecture.
        DataError: The tokenizer is damaged.
    """

    from llm_pretrain.checkpoints.opening import open_model
    from llm_pretrain.data.tokenizers import Tokenizer
    from llm_pretrain.model.kernels import DTYPES

    on, opened = _device(device), open_model(source)
    folder = Path(tokenizer) if tokenizer else opened.tokenizer_folder
    if folder is None:
        raise CheckpointError(
            f"{opened.path / 'tokenizer.json'}: expected the tokenizer beside the {opened.kind}, found no "
            "such file; name its folder with --tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder / 'tokenizer.json'}: expected a tokenizer, found no such file")
    chosen = Tokenizer(folder)
    rows = opened.model.lm_head.weight.shape[0]
    if chosen.vocab_size > rows:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: expected at most the model's {rows} ids, found "
            f"{chosen.vocab_size}; it is another model's tokenizer"
        )
    own = opened.tokenizer_folder
    if own is not None and Tokenizer(own).hash != chosen.hash:
        print(f"warning: {folder} is not the tokenizer beside the model, {own}", file=sys.stderr)
    ends = _ids(opened.token_ids.get("eos_token_id")) or _ids(chosen.eos_token_id)
    starts = _ids(opened.token_ids.get("bos_token_id")) or _ids(chosen.bos_token_id) or ends
    return TrainedModel(
        model=opened.model.to(on, DTYPES[dtype]),
        tokenizer=chosen,
        start_id=starts[0] if starts else None,
        stop_ids=frozenset(ends),
        opened=opened,
        device=on,
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
        reason = reason_of(error).partition(". ")[0]
        raise ConfigError(
            f"--device: expected cpu or a device of this machine, found {name} ({reason})"
        ) from None
    return device
