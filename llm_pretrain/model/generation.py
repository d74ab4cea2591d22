"""Text generation: sampling continuations of prompts in one batch with a key-value cache.

Shapes: B rows (prompts that have not ended), S new positions, T cache slots in use, V vocab_size, M key and
value heads, D head_dim.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm_pretrain.errors import ConfigError
from llm_pretrain.model.decoder import Decoder

_PREFILL_LOGITS = 1 << 25
"""Largest number of logits per forward pass over prompts; long prompts are read in several passes."""
_INITIAL_SLOTS = 64
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN, which torch prefers on Hopper and Blackwell: it would spend tenths of a second on a plan for
each new number of keys (modelscope/FunASR#3704), thus for each token."""


End = Literal["stop", "max_new_tokens", "positions"]
"""What ends a text: one of the stop ids, or one of two bounds of its length."""


def generate_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    pieces: Sequence[bytes],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Collection[int] = (),
    token_healing: bool = True,
    lockstep: bool = False,
) -> Iterator[tuple[int, str, End | None]]:
    """Yield (prompt's index, new text, None) while texts grow, and each one's last text with its `End`.

    Arguments and errors are those of `generate` except for these.

    Args:
        pieces: UTF-8 bytes of each id of the tokenizer, empty for special ids.
        token_healing: Let a prompt end within a token, see `heal`.
        lockstep: Make equally many forward passes whatever is drawn after the (healed) prompts, as ranks that
            share a model must.
    """
    healed = [(list(prompt), b"") for prompt in prompts]
    if token_healing and max_new_tokens > 0:
        healed = heal(model, prompts, pieces, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    columns = generate(
        model,
        [ids for ids, _ in healed],
        vocab_size=len(pieces),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=() if lockstep else stop_ids,
    )
    return _texts(columns, healed, pieces, stop_ids, model.config.longest_sequence)


def _texts(
    columns: Iterator[list[int | None]],
    healed: Sequence[tuple[list[int], bytes]],
    pieces: Sequence[bytes],
    stop_ids: Collection[int],
    limit: int,
) -> Iterator[tuple[int, str, End | None]]:
    """The loop of `generate_texts`."""
    lengths = [len(ids) for ids, _ in healed]
    growing = {row: TextStream(pieces) for row in range(len(healed))}
    for row, (_, added) in enumerate(healed):
        yield row, growing[row].decode(added), None
    for column in columns:
        for row, token in enumerate(column):
            if token in stop_ids and row in growing:
                yield row, growing.pop(row).finish(), "stop"
            elif token is not None and row in growing:
                lengths[row] += 1
                yield row, growing[row].push(token), None
    for row, stream in growing.items():
        yield row, stream.finish(), "positions" if lengths[row] >= limit else "max_new_tokens"


def heal(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    pieces: Sequence[bytes],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
) -> list[tuple[list[int], bytes]]:
    """Replace the last tokens of each prompt by one that covers them; returns the ids and the bytes they add.

    The text `def ` ends in a token ` `, but a text that goes on with `main` has a token ` main` there, so the
    model has not seen ` ` before `main`. The candidates are the tokens whose bytes begin with the rest of the
    prompt from some token on, and the prompt's own last token. One is drawn by the probability of the
    prompt's earlier tokens and of it (covers: arXiv:2412.03719). Arguments and errors are those of
    `generate_texts`; the new ids are not more than the old.
    """
    _check_settings(0, temperature, top_k, top_p)
    _check_prompts(model, prompts)
    vocabulary = _SortedPieces(pieces)
    kept = [len(prompt) - vocabulary.open_tokens(prompt) for prompt in prompts]
    ends = [prompt[count:] for prompt, count in zip(prompts, kept, strict=True)]
    passes = max(map(len, ends), default=0)
    if not passes:
        return [(list(prompt), b"") for prompt in prompts]
    cache, device = KeyValueCache(model.config.num_hidden_layers), next(model.parameters()).device
    logits = _prefill(
        model, [prompt[:count] for prompt, count in zip(prompts, kept, strict=True)], cache, device
    )
    before = [0.0] * len(prompts)
    scores: list[list[float]] = [[] for _ in prompts]
    covers: list[list[tuple[int, int]]] = [[] for _ in prompts]  # place in the end of the prompt, id
    for place in range(passes):
        log_probs = logits[:, : len(pieces)].log_softmax(-1)
        for row, end in enumerate(ends):
            if place < len(end):
                found = vocabulary.longer_than(b"".join(pieces[token] for token in end[place:]))
                found += end[place:] if place + 1 == len(end) else []
                scores[row] += (before[row] + log_probs[row, found]).tolist()
                covers[row] += [(place, token) for token in found]
                before[row] += log_probs[row, end[place]].item()
        if place + 1 < passes:
            next_ids = torch.tensor([[end[place] if place < len(end) else 0] for end in ends], device=device)
            with _inference():
                logits = _last_logits(model(next_ids, cache=cache).logits)[:, 0]
    healed = []
    for row, (prompt, generator) in enumerate(
        zip(prompts, _generators(seed, len(prompts), 1 << 62), strict=True)
    ):
        new, added = list(prompt), b""
        if scores[row]:
            sampler = _Sampler(len(scores[row]), temperature, top_k, top_p)
            (index,) = sampler(torch.tensor([scores[row]], dtype=torch.float64), [generator])
            place, token = covers[row][index]
            new = [*prompt[: kept[row] + place], token]
            added = pieces[token][sum(len(pieces[each]) for each in ends[row][place:]) :]
        healed.append((new, added))
    return healed


class _SortedPieces:
    """A vocabulary's ids by the bytes that they begin with."""

    def __init__(self, pieces: Sequence[bytes]):
        self.ids = sorted(range(len(pieces)), key=pieces.__getitem__)
        self.sorted = [pieces[token] for token in self.ids]
        self.pieces, self.longest = pieces, max(map(len, pieces))

    def longer_than(self, text: bytes) -> list[int]:
        """The ids whose bytes begin with `text` and go on."""
        places = range(bisect_left(self.sorted, text), len(self.ids))
        found = takewhile(lambda place: self.sorted[place].startswith(text), places)
        return [self.ids[place] for place in found if len(self.sorted[place]) > len(text)]

    def open_tokens(self, prompt: Sequence[int]) -> int:
        """How many of the last ids may be the beginning of one, but for the first id of the prompt."""
        text, count = b"", 0
        for number in range(1, len(prompt)):
            piece = self.pieces[prompt[-number]]
            text = piece + text
            if not piece or len(text) >= self.longest:
                break
            if self.longer_than(text):
                count = number
        return count


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

    A prompt ends at one of `stop_ids` (which is yielded), after `max_new_tokens`, or when prompt and text
    together fill `max_position_embeddings`: the prompt is never shortened. A text depends on its prompt and
    its seed only, up to rounding, and not on the other prompts. Whatever the device, tokens are drawn in fp64
    on the CPU, by one uniform number per token. The global random state is neither read nor changed.

    Args:
        model: In eval mode; runs on the device of its parameters.
        prompts: At least one id each.
        vocab_size: The tokenizer's number of tokens. The model's rows above it are padding and never drawn.
        max_new_tokens: Per prompt.
        temperature: Divides the logits; 0 selects the most likely token.
        top_k: Draw from this many most likely tokens; 0 means all.
        top_p: Draw from the most likely tokens that together have this probability, after temperature and
            top_k (nucleus sampling, arXiv:1904.09751); 1 means all.
        seed: Seed of the sampling, one for all prompts or one for each.
        stop_ids: Ids that end a text.

    Raises:
        ConfigError: A prompt is empty or leaves no position free, or a setting is out of range.
    """
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    _check_prompts(model, prompts)
    generators = _generators(seed, len(prompts))
    room = [min(max_new_tokens, model.config.longest_sequence - len(prompt)) for prompt in prompts]
    if not prompts or not max(room):
        return iter(())
    sampler = _Sampler(vocab_size, temperature, top_k, top_p)
    return _generate(model, prompts, sampler, generators, room, frozenset(stop_ids))


def _generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampler: _Sampler,
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
        new_ids = sampler(logits, [generators[prompt] for prompt in active])
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
        # Around the whole loop, inference mode would also apply to the caller's code between two tokens.
        with _inference():
            if len(rows) < len(active):
                cache.select(rows)
            active = [active[row] for row in rows]
            next_ids = torch.tensor([[new_ids[row]] for row in rows], device=device)
            logits = _last_logits(model(next_ids, cache=cache).logits)[:, 0]


@contextmanager
def _inference() -> Iterator[None]:
    with torch.inference_mode(), sdpa_kernel(_BACKENDS):
        yield


def _prefill(
    model: Decoder, prompts: Sequence[Sequence[int]], cache: KeyValueCache, device: torch.device
) -> Tensor:
    """Read all prompts into the cache; returns the logits [B, V] after each prompt's last id."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = torch.tensor(prompt)
    vocab_size = model.lm_head.weight.shape[0]
    part = max(1, _PREFILL_LOGITS // (len(prompts) * vocab_size))
    last: dict[int, Tensor] = {}
    with _inference():
        for start in range(0, max(lengths), part):
            logits = model(padded[:, start : start + part].to(device), cache=cache).logits
            ends_here = [row for row, length in enumerate(lengths) if start < length <= start + part]
            last |= {row: logits[row, lengths[row] - 1 - start] for row in ends_here}
        cache.truncate(lengths)
        return _last_logits(torch.stack([last[row] for row in range(len(prompts))]))


def _last_logits(logits: Tensor) -> Tensor:
    return logits.double().cpu()


class _Sampler:
    """Draws one id per row from logits."""

    def __init__(self, vocab_size: int, temperature: float, top_k: int, top_p: float):
        self.vocab_size, self.temperature, self.top_p = vocab_size, temperature, top_p
        self.top_k = min(top_k, vocab_size) or vocab_size

    def __call__(self, logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """One id for each row of `logits`, float64 [B, V]."""
        logits = logits[:, : self.vocab_size]
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        kept, ids = logits.topk(self.top_k)  # in descending order
        scaled = (kept - kept[:, :1]) / self.temperature  # the maximum is 0: no overflow near temperature 0
        probs = scaled.softmax(-1)
        reached = probs.cumsum(-1)
        if self.top_p < 1:
            probs = probs.masked_fill(reached - probs >= self.top_p, 0)  # always keeps the likeliest id
            reached = probs.cumsum(-1)
        uniform = [torch.rand(1, generator=each, dtype=torch.float64) for each in generators]
        # One random number per token, however many ids are kept: rounding shifts no number of a later token.
        target = torch.stack(uniform) * reached[:, -1:]
        chosen = torch.searchsorted(reached, target, right=True).clamp_(max=self.top_k - 1)
        return ids.gather(-1, chosen)[:, 0].tolist()


def _generators(seed: int | Sequence[int], count: int, offset: int = 0) -> list[torch.Generator]:
    seeds = [seed] * count if isinstance(seed, int) else seed
    return [torch.Generator().manual_seed(each + offset) for each in seeds]


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    limit = model.config.longest_sequence
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < limit:
            raise ConfigError(
                f"prompt {index + 1}: expected 1 to {limit - 1} tokens, since the model has {limit} "
                f"positions (max_position_embeddings), found {len(prompt)}"
            )


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


class KeyValueCache:
    """Keys and values of all layers, and the number of positions in each row.

    Pass the cache to `Decoder.forward` with each row's next ids: it determines their positions. Slot t of a
    row holds position t. Pad prompts of different lengths on the right. `truncate` then removes the padding,
    and new positions overwrite its slots:

        logits = model(padded, cache=cache).logits       # [B, S, V], rows padded on the right to one length
        cache.truncate([len(prompt) for prompt in prompts])
        logits = model(next_ids, cache=cache).logits     # [B, 1, V], each row at its own position

    Attributes: `lengths` (positions of each row) and `layers`. For the current forward pass, `positions` is
    int64 [B, S] and `mask` is bool [B, 1, S, T], or None if attention is causal or sees all keys.
    """

    def __init__(self, num_layers: int):
        self.layers = [_LayerCache(self) for _ in range(num_layers)]
        self.lengths: list[int] = []
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.mask: Tensor | None = None
        self.start: int | None = None
        """The first new position, if all rows have the same one (the new slots are then a slice), or None."""
        self.stop = 0
        """T, the number of cache slots in use."""

    def advance(self, input_ids: Tensor) -> Tensor:
        """Make room for `input_ids` [B, S]; returns their positions, int64 [B, S]."""
        (rows, count), device = input_ids.shape, input_ids.device
        lengths = self.lengths or [0] * rows
        if len(lengths) != rows:
            raise ValueError(f"the cache holds {len(lengths)} rows, found {rows}")
        self.lengths = [length + count for length in lengths]
        self.stop = max(self.lengths)
        self.start = lengths[0] if min(lengths) == max(lengths) else None
        first = torch.tensor(lengths, device=device)[:, None]
        self.positions = first + torch.arange(count, device=device)
        self.mask = None
        if self.start is None or (self.start > 0 and count > 1):
            slots = torch.arange(self.stop, device=device)
            self.mask = slots <= self.positions[:, None, :, None]
        return self.positions

    def truncate(self, lengths: Sequence[int]) -> None:
        """Remove each row's positions from `lengths[row]` on."""
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)
        ):
            raise ValueError(f"expected a length up to {self.lengths} for each row, found {list(lengths)}")
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in the given order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.select(rows)


class _LayerCache:
    """One layer's keys and values, [B, slots, M, D] each; the number of slots doubles when they are full."""

    def __init__(self, cache: KeyValueCache):
        self.cache = cache
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store [B, S, M, D] at the new positions; returns keys and values [B, T, M, D], and the mask."""
        self._keys = self._store(self._keys, key)
        self._values = self._store(self._values, value)
        stop = self.cache.stop
        return self._keys[:, :stop], self._values[:, :stop], self.cache.mask

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the given rows."""
        if self._keys is not None and self._values is not None:
            index = torch.tensor(rows, device=self._keys.device)
            self._keys, self._values = self._keys[index], self._values[index]

    def _store(self, slots: Tensor | None, new: Tensor) -> Tensor:
        cache = self.cache
        size = 0 if slots is None else slots.shape[1]
        if size < cache.stop:
            # Zeros: a masked slot must not hold NaN, since 0 · NaN is NaN.
            larger = new.new_zeros(len(new), max(_INITIAL_SLOTS, cache.stop, 2 * size), *new.shape[2:])
            if slots is not None:
                larger[:, :size] = slots
            slots = larger
        assert slots is not None
        if cache.start is not None:
            slots[:, cache.start : cache.stop] = new
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            slots[rows, cache.positions] = new
        return slots


class TextStream:
    """Decodes ids to text one at a time; the returned parts, joined, are the text.

    A tokenizer's decoder, called again for all ids, could change earlier characters when an id is added. So
    this class decodes bytes: it buffers the bytes of an incomplete character until the character is complete,
    and replaces bytes that begin no character by U+FFFD.

    Args:
        pieces: The UTF-8 bytes of each id, empty for special ids.
    """

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this id completes; may be empty."""
        return self.decode(self._pieces[token])

    def decode(self, text: bytes) -> str:
        """The text that these bytes complete; may be empty."""
        return self._decoder.decode(text)

    def finish(self) -> str:
        """Decode the bytes that are still buffered, at the end of the text."""
        return self._decoder.decode(b"", final=True)
