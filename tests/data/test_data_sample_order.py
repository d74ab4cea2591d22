"""The sample order is a bijection per epoch, depends on the seed, and keeps a mixture's quotas."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzed

from llm_pretrain.data.sample_order import BLOCK, SampleOrder, shuffled
from llm_pretrain.errors import DataError


@fuzzed(60)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_bijection(n: int, seed: int, epoch: int):
    order = shuffled("source 0", seed, n, epoch * n + np.arange(n))
    assert sorted(order.tolist()) == list(range(n))


def test_one_source_is_the_plain_permutation_and_epochs_end_exactly():
    n = 777
    order = SampleOrder([n], [3.0], seed=5)
    for epoch in range(3):
        drawn = [order[epoch * n + k] for k in range(n)]
        assert {source for source, _ in drawn} == {0}
        expected = shuffled("source 0", 5, n, epoch * n + np.arange(n))
        assert [sequence for _, sequence in drawn] == expected.tolist()


def test_a_source_of_one_sequence_is_drawn_at_every_number():
    assert SampleOrder([1], [1.0], seed=5).drawn([0, 1, BLOCK, 3 * BLOCK + 1]) == [(0, 0)] * 4


@pytest.mark.parametrize("start", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_a_range_computes_its_own_blocks_only(start: int, monkeypatch: pytest.MonkeyPatch):
    order = SampleOrder([77, 50], [1.0, 2.0], seed=5)
    computed: list[int] = []
    compute = order._compute_block
    monkeypatch.setattr(order, "_compute_block", lambda block: computed.append(block) or compute(block))
    sources, sequences = order.samples(start, start + 2)
    assert computed == list(range(start // BLOCK, (start + 1) // BLOCK + 1))
    assert list(zip(sources.tolist(), sequences.tolist(), strict=True)) == [order[start], order[start + 1]]


def test_seeds_and_epochs_are_unlike():
    n = 5000
    numbers = np.arange(n)
    orders = [shuffled("source 0", 0, n, numbers), shuffled("source 0", 1, n, numbers)]
    orders += [shuffled("source 0", 0, n, numbers + n), shuffled("source 1", 0, n, numbers), numbers]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert (first == second).sum() < 12  # one is expected
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    steps = np.diff(orders[0])
    assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 0.08
    assert len(np.unique(steps)) > n / 3


@pytest.mark.parametrize("n", [2, 3, 5, 6, 100])
def test_every_place_goes_everywhere_equally_often(n: int):
    """Chi-square over 4000 epochs, for the first place and pairwise for the first two of the smallest n."""
    epochs = 4000
    first = shuffled("source 0", 3, n, np.arange(epochs) * n)
    counts = np.bincount(first, minlength=n)
    statistic = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    degrees = n - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 6


def test_a_number_far_out_costs_no_more():
    numbers = np.array([0, 10**10 - 1, 10**15, 2**62])
    drawn = shuffled("source 0", 0, 10**10, numbers)
    assert ((drawn >= 0) & (drawn < 10**10)).all()
    order = SampleOrder([10**10, 10**9], [1.0, 1.0], seed=0)
    started = time.process_time()
    for number in range(10**12, 10**12 + 4 * BLOCK):
        order[number]
    assert (time.process_time() - started) / (4 * BLOCK) < 20e-6


def test_a_mixture_keeps_its_quotas_in_every_block():
    order = SampleOrder([50, 5000, 300], [0.2, 0.5, 0.3], seed=1)
    quotas = order.segments[0].quotas
    assert sum(quotas) == BLOCK
    for block in range(3):
        drawn = [order[block * BLOCK + k][0] for k in range(BLOCK)]
        assert np.bincount(drawn).tolist() == quotas
    assert quotas == pytest.approx([0.2 * BLOCK, 0.5 * BLOCK, 0.3 * BLOCK], abs=1)


def test_a_source_of_a_mixture_is_read_epoch_by_epoch():
    order = SampleOrder([70, 90], [1.0, 2.0], seed=1)
    drawn = [order[number] for number in range(3 * BLOCK)]
    for source, length in enumerate([70, 90]):
        sequences = [sequence for k, sequence in drawn if k == source]
        for epoch in range(len(sequences) // length):
            assert sorted(sequences[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_a_source_too_light_or_empty_is_refused_by_name():
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.weight.*1/1024"):
        SampleOrder([10, 10], [1.0, 1e-5], seed=0)
    with pytest.raises(DataError, match=r"data\.sources\[1\]"):
        SampleOrder([10, 0], [1.0, 1.0], seed=0)
