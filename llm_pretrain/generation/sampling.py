"""Continues prompts, each by its own random numbers, through one batch and one key-value cache.

Which token is drawn is decided in fp64 on the CPU by one uniform number per token, whatever the device.

Shapes: B prompts still being continued, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from llm_pretrain.errors import ConfigError
from llm_pretrain.model import Decoder, KeyValueCache

_PREFILL_LOGITS = 1 << 25
"""Logits held at a time while prompts are read, in parts: all but the last are thrown away."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield, per position, one new id per prompt; None for a prompt that has ended.

    A prompt ends at one of `stop_ids` (which is yielded), after `max_new_tokens`, or where prompt and text
    together fill `max_position_embeddings`: the text is never continued from a shortened prefix. Its text
    depends on the prompt and its seed alone, up to rounding, not on the prompts beside it. The global random
    state is neither read nor changed.

    Args:
        model: In eval mode; runs where its parameters are.
        prompts: At least one id each.
        vocab_size: The tokenizer's; the model's rows beyond it are padding and never drawn.
        max_new_tokens: Per prompt.
        temperature: Divides the logits; 0 takes the likeliest.
        top_k: Draw from so many likeliest; 0 from all.
        top_p: Draw from the likeliest that together have this probability, after temperature and top_k
            (nucleus sampling, arXiv:1904.09751); 1 from all.
        seed: Of the sampling, the same for all prompts, or one for each.
        stop_ids: Ids that end a text.

    Raises:
        ConfigError: naming the prompt that is empty or leaves no position free, or the setting out of range.
    """
    limit = model.config.max_position_embeddings
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise ConfigError(
                f"prompt {index + 1}: expected 1 to {limit - 1} tokens, since the model has {limit} "
                f"positions (max_position_embeddings), found {len(prompt)}"
            )
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    room = [min(max_new_tokens, limit - len(prompt)) for prompt in prompts]
    if not prompts or not max(room):
        return iter(())
    draw = _Draw(vocab_size, temperature, top_k, top_p)
    return _generate(model, prompts, draw, generators, room, frozenset(stop_ids))


def _generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    draw: _Draw,
    generators: Sequence[torch.Generator],
    room: Sequence[int],
    stop_ids: frozenset[int],
) -> Iterator[list[int | None]]:
    """The loop of `generate`: row b of the batch continues prompt `active[b]`."""
    device = next(model.parameters()).device
    cache = KeyValueCache(model.config.num_hidden_layers)
    logits = _prefill(model, prompts, cache, device)
    active = list(range(len(prompts)))
    position = 0
    while True:
        position += 1
        new_ids = draw(logits, [generators[prompt] for prompt in active])
        yielded: list[int | None] = [None] * len(prompts)
        for prompt, token in zip(active, new_ids, strict=True):
            yielded[prompt] = token
        rows = [
            row
            for row, prompt in enumerate(active)
            if new_ids[row] not in stop_ids and position < room[prompt]
        ]
        yield yielded
        if not rows:
            return
        # Not around the loop: the mode would be the caller's too, for as long as it holds the iterator.
        with torch.inference_mode():
            if len(rows) < len(active):
                cache.select(rows)
            active = [active[row] for row in rows]
            fed = torch.tensor([[new_ids[row]] for row in rows], device=device)
            logits = _last_logits(model(fed, cache=cache).logits)[:, 0]


def _prefill(
    model: Decoder, prompts: Sequence[Sequence[int]], cache: KeyValueCache, device: torch.device
) -> Tensor:
    """Read all prompts into the cache; returns the logits [B, V] after each one's last id."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = torch.tensor(prompt)
    vocab_size = model.lm_head.weight.shape[0]
    part = max(1, _PREFILL_LOGITS // (len(prompts) * vocab_size))
    last: dict[int, Tensor] = {}
    with torch.inference_mode():
        for start in range(0, max(lengths), part):
            logits = model(padded[:, start : start + part].to(device), cache=cache).logits
            ends_here = [row for row, length in enumerate(lengths) if start < length <= start + part]
            last |= {row: logits[row, lengths[row] - 1 - start] for row in ends_here}
        cache.truncate(lengths)
        return _last_logits(torch.stack([last[row] for row in range(len(prompts))]))


def _last_logits(logits: Tensor) -> Tensor:
    return logits.double().cpu()


class _Draw:
    """How one id per row is drawn from logits."""

    def __init__(self, vocab_size: int, temperature: float, top_k: int, top_p: float):
        self.vocab_size, self.temperature, self.top_p = vocab_size, temperature, top_p
        self.top_k = min(top_k, vocab_size) or vocab_size

    def __call__(self, logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """One id for each row of `logits`, float64 [B, V]."""
        logits = logits[:, : self.vocab_size]
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        kept, ids = logits.topk(self.top_k)  # falling
        probs = ((kept - kept[:, :1]) / self.temperature).softmax(-1)  # no overflow near temperature 0
        reached = probs.cumsum(-1)
        if self.top_p < 1:
            probs = probs.masked_fill(reached - probs >= self.top_p, 0)  # the likeliest always stays
            reached = probs.cumsum(-1)
        uniform = [torch.rand(1, generator=each, dtype=torch.float64) for each in generators]
        # One number per token, however many are kept: rounding cannot shift the numbers of later tokens.
        target = torch.stack(uniform) * reached[:, -1:]
        chosen = torch.searchsorted(reached, target, right=True).clamp_(max=self.top_k - 1)
        return ids.gather(-1, chosen)[:, 0].tolist()


def _check_settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    problems = [
        f"{name}: expected 0 or more, found {value}"
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("temperature", temperature),
            ("top_k", top_k),
        )
        if not 0 <= value < float("inf")
    ]
    if not 0 < top_p <= 1:
        problems.append(f"top_p: expected a number above 0 and up to 1, found {top_p}")
    if problems:
        raise ConfigError(*problems)
