"""Packs documents into sequences of S inputs and S labels. Works on lengths alone; reads no token.

A document of L tokens has L - 1 targets, and a piece of t targets takes t places: its inputs are tokens
[start, start + t) and its labels [start + 1, start + t + 1). Pieces of a split document thus overlap by
one token, and every token but a document's first is a target exactly once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_DOCUMENTS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class PackedIndex:
    """Which pieces stand in which sequence.

    `piece_start` int64 [P]: the token of the split at which the piece's inputs begin; `piece_length` int32
    [P]: its targets; `sequence_offsets` int64 [N + 1]: sequence n holds pieces [offsets[n], offsets[n + 1]).
    Out of a file they may be of smaller types, unsigned ones: widen before computing with them.
    """

    piece_start: np.ndarray
    piece_length: np.ndarray
    sequence_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1


@dataclass(frozen=True)
class PackedParts:
    """A `PackedIndex` that is never whole in memory: `whole` sequences of one piece each, then the `rest`.

    `starts` int64 [D] and `whole_pieces` int64 [D] say, by document, where the pieces of `sequence_length`
    begin and how many there are. The three columns are iterators of arrays to be joined, of any integers.
    """

    starts: np.ndarray
    whole_pieces: np.ndarray
    sequence_length: int
    whole: int
    rest: PackedIndex

    @property
    def counts(self) -> dict[str, int]:
        """How many pieces and sequences there are."""
        return {"pieces": self.whole + len(self.rest.piece_start), "sequences": self.whole + len(self.rest)}

    def piece_start(self) -> Iterator[np.ndarray]:
        """Column of `PackedIndex`."""
        for first in range(0, len(self.starts) if self.whole else 0, _DOCUMENTS_AT_ONCE):
            pieces = self.whole_pieces[first : first + _DOCUMENTS_AT_ONCE]
            done = np.arange(int(pieces.sum())) - _cumulative(pieces)[:-1].repeat(pieces)
            done *= self.sequence_length
            done += self.starts[first : first + _DOCUMENTS_AT_ONCE].repeat(pieces)
            yield done
        yield self.rest.piece_start

    def piece_length(self) -> Iterator[np.ndarray]:
        """Column of `PackedIndex`."""
        for first in range(0, self.whole, _DOCUMENTS_AT_ONCE):
            yield np.full(min(_DOCUMENTS_AT_ONCE, self.whole - first), self.sequence_length, dtype=np.int32)
        yield self.rest.piece_length

    def sequence_offsets(self) -> Iterator[np.ndarray]:
        """Column of `PackedIndex`."""
        for first in range(0, self.whole, _DOCUMENTS_AT_ONCE):
            yield np.arange(first, min(first + _DOCUMENTS_AT_ONCE, self.whole))
        yield self.rest.sequence_offsets + self.whole


def pack(offsets: np.ndarray, sequence_length: int, packing: str) -> PackedIndex:
    """Packs the documents whose tokens are [offsets[d], offsets[d + 1]) into sequences of `sequence_length`.

    `best_fit` splits only documents longer than a sequence and wastes next to nothing, `concat` fills
    sequences consecutively and splits at their edges, `pad` gives every piece a sequence of its own.
    """
    parts = pack_in_parts(offsets, sequence_length, packing)
    columns = parts.piece_start(), parts.piece_length(), parts.sequence_offsets()
    return PackedIndex(*(np.concatenate(list(column)) for column in columns))


def pack_in_parts(offsets: np.ndarray, sequence_length: int, packing: str) -> PackedParts:
    """What `pack` returns, in much less memory where documents are longer than sequences."""
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    targets = np.diff(np.asarray(offsets, dtype=np.int64))
    targets -= 1
    kept = targets > 0
    if not kept.all():
        starts, targets = starts[kept], targets[kept]
    del kept  # a large store's documents are millions, and every array of theirs counts
    whole_pieces = np.zeros(0, dtype=np.int64)
    if packing == "concat":
        rest = _concat(starts, targets, sequence_length)
    elif packing == "pad":
        piece_start, piece_length = _split_long(starts, targets, sequence_length)
        rest = PackedIndex(piece_start, piece_length, np.arange(len(piece_start) + 1))
    elif packing == "best_fit":
        whole_pieces = targets // sequence_length  # best-fit decreasing places them first, by themselves
        targets -= whole_pieces * sequence_length
        documents = np.flatnonzero(targets)
        piece_length = targets[documents].astype(np.int32)
        del targets
        order, sequence_offsets = _best_fit(piece_length, sequence_length)
        piece_length, documents = piece_length[order], documents[order]
        del order
        piece_start = whole_pieces[documents] * sequence_length
        piece_start += starts[documents]
        rest = PackedIndex(piece_start, piece_length, sequence_offsets)
    else:
        raise ValueError(f"unknown packing {packing!r}")
    return PackedParts(starts, whole_pieces, sequence_length, int(whole_pieces.sum()), rest)


def _best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of pieces in which one sequence's follow another's, and where sequences begin in it."""
    sequence = best_fit_decreasing(sizes, capacity)
    offsets = _cumulative(np.bincount(sequence))
    return np.argsort(sequence, kind="stable"), offsets  # within a sequence: as in the corpus


def _cumulative(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _split_long(starts: np.ndarray, targets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts every document into pieces of `length` targets and one shorter rest."""
    pieces = -(-targets // length)
    first = _cumulative(pieces)[:-1]
    first *= length
    done = np.arange(0, int(pieces.sum()) * length, length)
    done -= np.repeat(first, pieces)  # targets of the document in the pieces before
    del first
    piece_length = np.repeat(targets, pieces)
    piece_length -= done
    np.minimum(piece_length, length, out=piece_length)
    piece_length = piece_length.astype(np.int32)
    done += np.repeat(starts, pieces)
    return done, piece_length


def _concat(starts: np.ndarray, targets: np.ndarray, length: int) -> PackedIndex:
    """One stream of targets, cut at every document's edge and every sequence's edge."""
    edges = _cumulative(targets)
    total = int(edges[-1])
    cuts = np.sort(np.concatenate([edges, np.arange(0, total, length)]), kind="stable")  # merges two runs
    cuts = cuts[np.concatenate([[True], cuts[1:] > cuts[:-1]])]
    begin = cuts[:-1]
    document = np.searchsorted(edges, begin, side="right") - 1
    piece_start = starts[document] + begin - edges[document]
    counts = np.bincount(begin // length, minlength=-(-total // length))
    return PackedIndex(piece_start, np.diff(cuts).astype(np.int32), _cumulative(counts))


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each piece by best-fit decreasing: largest first, each into the fullest bin it fits.

    Pieces of one size are placed together: the fullest bin that takes one takes more of them until it no
    longer can, so whole groups of bins with the same room are filled at once. O(n + distinct sizes ·
    distinct rooms). `sizes` [P] in 1..capacity; returns integers [P], bins numbered in order of opening.
    """
    small = np.uint16 if capacity < 1 << 16 else np.int64  # the first is sorted faster, and in less room
    order = np.argsort((capacity - sizes).astype(small), kind="stable")
    number = np.int32 if len(sizes) < 1 << 31 else np.int64
    bins = np.empty(len(sizes), dtype=number)
    distinct, counts = np.unique(sizes, return_counts=True)
    rooms = _Rooms(capacity)
    placed = opened = 0
    for size, total in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        count = total
        while count:
            room = rooms.tightest(size)
            if room is None:
                room, per_bin = capacity, capacity // size
                fresh = -(-count // per_bin)
                candidates = np.arange(opened, opened + fresh, dtype=number)
                opened += fresh
            else:
                candidates, per_bin = rooms.take(room), room // size
            full = min(len(candidates), count // per_bin)
            rest = count - full * per_bin if full < len(candidates) else 0
            chosen = np.repeat(candidates[:full], per_bin)
            if rest:
                chosen = np.append(chosen, np.full(rest, candidates[full]))
                rooms.put(room - rest * size, candidates[full : full + 1])
            rooms.put(room - per_bin * size, candidates[:full])
            rooms.put(room, candidates[full + bool(rest) :])
            bins[order[placed : placed + len(chosen)]] = chosen
            placed += len(chosen)
            count -= len(chosen)
    return bins


class _Rooms:
    """Open bins by the room left in them; the set of rooms that occur is the bits of one integer."""

    def __init__(self, capacity: int):
        self._bins: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
        self._occurring = 0

    def tightest(self, size: int) -> int | None:
        fitting = self._occurring >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else None

    def take(self, room: int) -> np.ndarray:
        self._occurring &= ~(1 << room)
        groups, self._bins[room] = self._bins[room], []
        return groups[0] if len(groups) == 1 else np.concatenate(groups)

    def put(self, room: int, bins: np.ndarray) -> None:
        if room and len(bins):
            self._bins[room].append(bins)
            self._occurring |= 1 << room
