"""Every token but a document's first is a target exactly once, whatever the packing."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import fuzzed

from llm_pretrain.data.packing import PackedIndex, best_fit_decreasing, pack

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
PACKINGS = st.sampled_from(["best_fit", "concat", "pad"])


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def targets_of(index: PackedIndex) -> list[int]:
    """Positions of all labels, as the pieces name them."""
    pieces = zip(index.piece_start.tolist(), index.piece_length.tolist(), strict=True)
    return [start + 1 + i for start, length in pieces for i in range(length)]


@fuzzed(150)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 17), packing=PACKINGS)
def test_every_token_but_the_first_is_a_target_once(lengths: list[int], sequence_length: int, packing: str):
    offsets = offsets_of(lengths)
    index = pack(offsets, sequence_length, packing)
    firsts = {int(start) for start, length in zip(offsets, lengths, strict=False) if length}
    assert sorted(targets_of(index)) == [t for t in range(int(offsets[-1])) if t not in firsts]


@fuzzed(150)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 17), packing=PACKINGS)
def test_pieces_fit_their_sequence_and_stay_in_their_document(
    lengths: list[int], sequence_length: int, packing: str
):
    offsets = offsets_of(lengths)
    index = pack(offsets, sequence_length, packing)
    bounds = index.sequence_offsets
    assert bounds[0] == 0
    assert bounds[-1] == len(index.piece_start)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert 0 < index.piece_length[first:last].sum() <= sequence_length
    begin = np.searchsorted(offsets, index.piece_start, side="right")
    end = np.searchsorted(offsets, index.piece_start + index.piece_length, side="right")
    assert (begin == end).all()


@fuzzed(100)
@given(sizes=st.lists(st.integers(1, 12), max_size=80))
@example(sizes=[8, 8, 8, 2] + [1] * 9)  # one of three bins of a group is filled further
def test_grouped_best_fit_equals_one_by_one(sizes: list[int]):
    """The grouped algorithm leaves the same rooms as the textbook one, piece by piece."""
    bins = best_fit_decreasing(np.array(sizes, dtype=np.int64), 12)
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [k for k, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda k: rooms[k])] -= size
        else:
            rooms.append(12 - size)
    filled = np.bincount(bins, weights=sizes) if sizes else np.zeros(0)
    assert sorted(12 - filled) == sorted(rooms)


def test_only_documents_longer_than_a_sequence_are_split():
    index = pack(offsets_of([11, 5, 26, 9]), 10, "best_fit")
    lengths = dict(zip(index.piece_start.tolist(), index.piece_length.tolist(), strict=True))
    assert lengths == {0: 10, 11: 4, 16: 10, 26: 10, 36: 5, 42: 8}


def test_concat_leaves_only_the_last_sequence_unfilled():
    index = pack(offsets_of([7, 30, 2, 15]), 8, "concat")
    filled = np.add.reduceat(index.piece_length, index.sequence_offsets[:-1])
    assert (filled[:-1] == 8).all()


def test_two_hundred_thousand_documents_pack_tightly_and_fast():
    sequence_length = 340
    generator = np.random.default_rng(0)
    lengths = np.maximum(2, generator.lognormal(np.log(250), 0.8, 200_000).astype(np.int64))
    started = time.process_time()
    index = pack(offsets_of(lengths.tolist()), sequence_length, "best_fit")
    assert time.process_time() - started < 2.0
    assert (lengths - 1).sum() / (len(index) * sequence_length) > 0.995
