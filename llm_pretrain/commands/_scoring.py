"""Log-probabilities of given continuations: what figures on lm-eval's windows and tasks come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from llm_pretrain.model import Decoder


def autocast(device: torch.device, precision: str) -> Any:
    """The context that `training.precision` stands for."""
    import torch

    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def rolling_windows(ids: Sequence[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, predicted ids) such that each of `ids` is predicted once, with at most `length` inputs.

    The windows of lm-eval's `loglikelihood_rolling` (context_len 1): the first begins with `prefix` in the
    place of a token before the text; each further one predicts `length` more ids after one id of context;
    the last is moved back to be full too, so that what is left has as much context as there is room for.
    The text's end is not predicted.
    """
    for start in range(0, len(ids), length):
        stop = min(start + length, len(ids))
        yield list(ids[stop - length - 1 : start]) if start else [prefix], list(ids[start:stop])


def score_windows(
    model: Decoder,
    windows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int,
    precision: str = "fp32",
    vocab_size: int | None = None,
    masks: Sequence[Sequence[bool]] | None = None,
) -> list[tuple[float, bool]]:
    """The log-probability of each continuation, and whether every id of it was the likeliest.

    Args:
        model: In eval mode.
        windows: (context, continuation), ids; the context has one at least.
        batch_size: Windows that are computed at a time.
        precision: `fp32`, or the type to autocast to.
        vocab_size: Ids that exist, where the likeliest is looked for; default: the model's rows.
        masks: For each window, which ids of the continuation count; default: all.
    """
    import torch

    device = next(model.parameters()).device
    order = sorted(range(len(windows)), key=lambda index: -sum(map(len, windows[index])))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        rows = [[*windows[index][0], *windows[index][1]] for index in chosen]
        padded = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
        for row, ids in enumerate(rows):
            padded[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        with torch.inference_mode(), autocast(device, precision):
            logits = model(padded.to(device)).logits
        for row, index in enumerate(chosen):
            targets = torch.tensor(list(windows[index][1]), device=device)
            if not len(targets):
                continue
            stop = len(rows[row]) - 1
            own = logits[row, stop - len(targets) : stop].float()
            scores = own.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
            if masks is not None:
                scores = scores * torch.tensor(masks[index], device=device)
            greedy = bool((own[:, :vocab_size].argmax(-1) == targets).all())
            results[index] = float(scores.sum()), greedy
    return results
