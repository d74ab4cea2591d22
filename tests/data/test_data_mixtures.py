"""The sample order: a bijection per epoch; of a mixture quotas, also with weights that change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.corpora import make_config, make_store
from support.fuzzing import fuzzed

from llm_pretrain.config.tree import Config, WeightChange
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import (
    evaluation_batches,
    global_batches,
    shard,
    weight_changes_fingerprint,
)
from llm_pretrain.data.sample_order import BLOCK, SampleOrder, shuffled
from llm_pretrain.data.store import TokenStore
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


@pytest.mark.parametrize("n", [2, 3, 100])
def test_every_place_goes_everywhere_equally_often(n: int):
    """Chi-square over 4000 epochs."""
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
    assert SampleOrder([10**10, 10**9], [1.0, 1.0], seed=0)[10**12][1] < 10**10


def test_a_source_too_light_or_empty_is_refused_by_name():
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.weight.*1/1024"):
        SampleOrder([10, 10], [1.0, 1e-5], seed=0)
    with pytest.raises(DataError, match=r"data\.sources\[1\]"):
        SampleOrder([10, 0], [1.0, 1.0], seed=0)
    with pytest.raises(DataError, match=r"data\.weight_changes\[1\]\.weights\[0\]: .*1/1024"):
        SampleOrder([9, 9], [1, 1], 0, [(1, [1, 0]), (2, [1e-5, 1])])


LENGTHS = [70, 900, 333]
CHANGES: list[tuple[int, Sequence[float]]] = [(2, [0, 1, 1]), (3, [5, 1, 0]), (6, [1, 1, 1])]


@fuzzed(15)
@example(CHANGES)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.lists(st.sampled_from([0, 0.5, 1, 3]), min_size=3, max_size=3).filter(any),
        ),
        max_size=4,
    )
)
def test_any_changes_keep_every_source_in_its_order(changes: list[tuple[int, list[float]]]):
    """What a source gives, over all blocks, is its own permuted order from the start, epoch after epoch."""
    changes = sorted(changes, key=lambda change: change[0])
    order = SampleOrder(LENGTHS, [1, 1, 2], 5, changes)
    everything = [order[number] for number in range(7 * BLOCK)]
    for k, length in enumerate(LENGTHS):
        sequences = [sequence for source, sequence in everything if source == k]
        assert sequences == shuffled(f"source {k}", 5, length, np.arange(len(sequences))).tolist(), k
        for epoch in range(len(sequences) // length):
            assert sorted(sequences[epoch * length : (epoch + 1) * length]) == list(range(length))
    for block in range(7):
        weights = [[1, 1, 2], *(weights for start, weights in changes if start <= block)][-1]
        drawn = np.bincount([k for k, _ in everything[block * BLOCK :][:BLOCK]], minlength=3)
        assert drawn == pytest.approx(BLOCK * np.array(weights) / sum(weights), abs=1)
        assert not drawn[np.array(weights) == 0].any()


@pytest.mark.parametrize("stop", [0, 700, BLOCK, 2 * BLOCK + 9])
def test_the_samples_of_each_source_are_counted_without_drawing_them(stop: int):
    order = SampleOrder(LENGTHS, [2, 1, 1], 5, CHANGES)
    sources, _ = order.samples(0, stop)
    assert order.counts(stop) == np.bincount(sources, minlength=len(LENGTHS)).tolist()


def test_only_the_ratio_of_weights_counts():
    huge, plain = (SampleOrder(LENGTHS, [scale, scale, 2 * scale], 5) for scale in (1e306, 1.0))
    assert [huge[g] for g in range(BLOCK)] == [plain[g] for g in range(BLOCK)]


def mixture(store: TokenStore, other: TokenStore, *changes: WeightChange, **options: object) -> Config:
    """Steps of 128 samples: eight of them are a block."""
    arguments = {"micro_batch_size": 64, "global_batch_size": 128, "max_steps": 24} | options
    return make_config(store, other, weights=[3, 1], weight_changes=list(changes), **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def other_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("other") / "other", documents=50, seed=9)


def sources_by_step(batches: list[Batch]) -> dict[int, int]:
    """Step to the number of its samples that come from the second source."""
    found: dict[int, int] = {}
    for batch in batches:
        assert batch.sources is not None
        found[batch.step] = found.get(batch.step, 0) + int(batch.sources.sum())
    return found


def test_a_change_begins_with_the_first_block_at_or_after_its_step(
    store: TokenStore, other_store: TokenStore
):
    changes = WeightChange(8, [0.0, 1.0]), WeightChange(11, [1.0, 0.0])
    found = sources_by_step(list(global_batches(mixture(store, other_store, *changes), start_step=0)))
    assert sum(found[step] for step in range(8)) == BLOCK // 4
    assert [found[step] for step in range(8, 16)] == [128] * 8
    assert [found[step] for step in range(16, 24)] == [0] * 8


def test_the_same_samples_at_any_split_and_from_any_step(store: TokenStore, other_store: TokenStore):
    change = WeightChange(8, [1.0, 3.0])

    def samples(start_step: int, world_size: int, **options: object) -> torch.Tensor:
        config = mixture(store, other_store, change, **options)
        loader = global_batches(config, start_step=start_step)
        found = sorted(
            (batch for rank in range(world_size) for batch in shard(loader, rank, world_size)),
            key=lambda batch: (batch.step, batch.micro_batch),
        )
        sources = torch.cat([batch.sources for batch in found if batch.sources is not None])
        return torch.cat([sources[:, None], torch.cat([batch.input_ids for batch in found])], dim=1)

    reference = samples(0, 1, max_steps=12)
    assert torch.equal(samples(0, 2, micro_batch_size=16, max_steps=12), reference)
    for step in (7, 9):
        assert torch.equal(samples(step, 2, micro_batch_size=32, max_steps=12), reference[128 * step :])


def test_a_batch_has_the_source_of_each_sequence(store: TokenStore, other_store: TokenStore):
    config = mixture(store, other_store, max_steps=1)
    (batch, *_) = global_batches(config, start_step=0)
    order = SampleOrder([len(part.index) for part in _sources(config)], [3, 1], 0)
    assert batch.sources is not None
    assert batch.sources.tolist() == [order[g][0] for g in range(64)]
    assert batch.to("meta").sources.device.type == "meta"  # type: ignore[union-attr]
    alone = next(iter(global_batches(make_config(store), start_step=0)))
    assert alone.sources is None
    assert list(alone.model_inputs()) == list(batch.model_inputs())


def _sources(config: Config) -> list:
    return global_batches(config, start_step=0).dataset.assembler.sources  # type: ignore[attr-defined]


def test_equal_fingerprints_at_a_step_mean_the_same_samples_before_it(
    store: TokenStore, other_store: TokenStore
):
    """For pairs of configurations, at every step; and unequal ones that some sample differs."""
    lists = [[], [(3, [1.0, 1.0])], [(8, [1.0, 1.0])], [(9, [0.0, 1.0])], [(8, [1.0, 3.0])]]
    lists.append([(8, [1.0, 1.0]), (16, [1.0, 0.0])])
    configs = [
        mixture(store, other_store, *(WeightChange(step, weights) for step, weights in each))
        for each in lists
    ]
    orders = [global_batches(each, start_step=0).dataset.order for each in configs]  # type: ignore[attr-defined]
    drawn = [[order[g] for g in range(24 * 128)] for order in orders]
    allowed = refused = 0
    for a in range(len(lists)):
        for b in range(a):
            for step in range(1, 25):
                if weight_changes_fingerprint(configs[a], step) == weight_changes_fingerprint(
                    configs[b], step
                ):
                    assert drawn[a][: step * 128] == drawn[b][: step * 128]
                    allowed += 1
                else:
                    assert drawn[a][: step * 128] != drawn[b][: step * 128]
                    refused += 1
    assert min(allowed, refused) > 50


def test_evaluation_counts_the_sequences_of_each_source(
    store: TokenStore, other_store: TokenStore, tmp_path: Path
):
    config = mixture(store, other_store)
    batches = evaluation_batches(config)
    assert batches.sequences == batches.available
    sources = torch.cat([batch.sources for batch in batches if batch.sources is not None])
    assert torch.bincount(sources, minlength=2).tolist() == batches.available
    assert min(batches.available) > 0
    few = evaluation_batches(
        mixture(store, other_store, micro_batch_size=1, global_batch_size=1, max_batches=1)
    )
    assert sum(few.sequences) == 1
    only_train = make_store(tmp_path / "train", documents=5, validation_fraction=0.0)
    assert evaluation_batches(mixture(store, only_train)).available[1] == 0
