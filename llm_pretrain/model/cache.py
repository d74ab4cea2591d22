"""The key-value cache: what attention keeps of positions already seen, so that each is computed once.

Slot t of a row holds position t, in every row, however long the rows' prompts are: prompts are padded on the
right, the padding is forgotten (`truncate`), and new positions overwrite its slots. Arithmetic is in
`attention.py`. For generation only: training has no cache.

Shapes: B rows, S new positions, T slots in use (the longest row's), M key and value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SLOTS_AT_FIRST = 64


class KeyValueCache:
    """Keys and values of all layers, and how many positions each row holds.

    Pass it to `Decoder.forward` with each row's next ids; positions follow from it. Rows may differ in
    length:

        logits = model(padded, cache=cache).logits       # [B, S, V], rows padded on the right to one length
        cache.truncate([len(prompt) for prompt in prompts])
        logits = model(next_ids, cache=cache).logits     # [B, 1, V], each row at its own position

    Attributes: `lengths` (positions held, per row), `layers`, and for the forward pass under way `positions`
    int64 [B, S] and `mask` bool [B, 1, S, T] (None where causality alone says who may be attended to).
    """

    def __init__(self, num_layers: int):
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.lengths: list[int] = []
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.mask: Tensor | None = None
        self.start: int | None = None
        """First new position where it is the same in all rows, so that slots are a slice."""
        self.stop = 0
        """T."""

    def advance(self, input_ids: Tensor) -> Tensor:
        """Make room for the positions of `input_ids` [B, S]; returns them, int64 [B, S]."""
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
        """Forget each row's positions from `lengths[row]` on: padding, or a text that is taken back."""
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)
        ):
            raise ValueError(f"expected a length up to {self.lengths} for each row, found {list(lengths)}")
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.select(rows)


class LayerCache:
    """One layer's keys and values, [B, slots, M, D] each; slots grow by doubling."""

    def __init__(self, whole: KeyValueCache):
        self.whole = whole
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what stands at the new positions, [B, S, M, D]; returns the slots in use, [B, T, M, D]."""
        self._keys = self._store(self._keys, key)
        self._values = self._store(self._values, value)
        return self._keys[:, : self.whole.stop], self._values[:, : self.whole.stop]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        if self._keys is not None and self._values is not None:
            index = torch.tensor(rows, device=self._keys.device)
            self._keys, self._values = self._keys[index], self._values[index]

    def _store(self, slots: Tensor | None, new: Tensor) -> Tensor:
        whole = self.whole
        held = 0 if slots is None else slots.shape[1]
        if held < whole.stop:
            # Zeros: slots that are masked out must not hold NaN, which no weight of 0 would silence.
            size = max(_SLOTS_AT_FIRST, whole.stop, 2 * held)
            larger = new.new_zeros(new.shape[0], size, *new.shape[2:])
            if slots is not None:
                larger[:, :held] = slots
            slots = larger
        assert slots is not None
        if whole.start is not None:
            slots[:, whole.start : whole.stop] = new
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            slots[rows, whole.positions] = new
        return slots
