"""Mixtures with changing weights: quotas per segment, every source continues its own order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
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
from llm_pretrain.data.sample_order import BLOCK, MixtureSegment, SampleOrder, shuffled
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError

LENGTHS = [70, 900, 333]
CHANGES: list[tuple[int, Sequence[float]]] = [(2, [0, 1, 1]), (3, [5, 1, 0]), (6, [1, 1, 1])]


def check_each_source_is_read_in_its_own_order(order: SampleOrder, lengths: list[int], blocks: int) -> None:
    """What a source gives, over all blocks, is its own permuted order from the start, epoch after epoch."""
    drawn = [order[number] for number in range(blocks * BLOCK)]
    for k, length in enumerate(lengths):
        sequences = [sequence for source, sequence in drawn if source == k]
        expected = shuffled(f"source {k}", 5, length, np.arange(blocks * BLOCK))[: len(sequences)]
        assert sequences == expected.tolist(), f"source {k}"
        for epoch in range(len(sequences) // length):
            assert sorted(sequences[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_no_sequence_is_skipped_or_repeated_across_changes():
    order = SampleOrder(LENGTHS, [2, 1, 1], 5, CHANGES)
    check_each_source_is_read_in_its_own_order(order, LENGTHS, 9)


Counts = Callable[[MixtureSegment, MixtureSegment], list[int]]
"""Samples drawn from each source before a segment, from the segment before it and itself."""


def times(segment: MixtureSegment, blocks: int) -> list[int]:
    return [blocks * quota for quota in segment.quotas]


@pytest.mark.parametrize(
    "drawn",
    [
        lambda before, segment: times(segment, segment.start),
        lambda before, segment: [0] * len(LENGTHS),
        lambda before, segment: times(before, segment.start - before.start),
        lambda before, segment: np.add(before.drawn, times(before, segment.start)).tolist(),
    ],
    ids=["as without changes", "each segment anew", "one segment back only", "blocks from the beginning"],
)
def test_the_check_above_detects_wrong_counts(drawn: Counts):
    order = SampleOrder(LENGTHS, [2, 1, 1], 5, CHANGES)
    for j in range(1, len(order.segments)):
        segment = order.segments[j]
        order.segments[j] = replace(segment, drawn=drawn(order.segments[j - 1], segment))
    with pytest.raises(AssertionError):
        check_each_source_is_read_in_its_own_order(order, LENGTHS, 9)


@fuzzed(25)
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
    changes = sorted(changes, key=lambda change: change[0])
    order = SampleOrder(LENGTHS, [1, 1, 2], 5, changes)
    check_each_source_is_read_in_its_own_order(order, LENGTHS, 7)
    for block in range(7):
        weights = [[1, 1, 2], *(weights for start, weights in changes if start <= block)][-1]
        drawn = np.bincount([order[block * BLOCK + place][0] for place in range(BLOCK)], minlength=3)
        assert drawn == pytest.approx(BLOCK * np.array(weights) / sum(weights), abs=1)
        assert not drawn[np.array(weights) == 0].any()


@pytest.mark.parametrize("stop", [0, 1, 700, BLOCK, 2 * BLOCK + 9, 7 * BLOCK - 1])
def test_the_samples_of_each_source_are_counted_without_drawing_them(stop: int):
    order = SampleOrder(LENGTHS, [2, 1, 1], 5, CHANGES)
    sources, _ = order.samples(0, stop)
    assert order.counts(stop) == np.bincount(sources, minlength=len(LENGTHS)).tolist()


def test_changes_leave_the_blocks_before_them_as_they_were():
    plain, changed = SampleOrder(LENGTHS, [2, 1, 1], 5), SampleOrder(LENGTHS, [2, 1, 1], 5, CHANGES)
    assert [plain[g] for g in range(2 * BLOCK)] == [changed[g] for g in range(2 * BLOCK)]
    assert [plain[g] for g in range(2 * BLOCK, 3 * BLOCK)] != [
        changed[g] for g in range(2 * BLOCK, 3 * BLOCK)
    ]
    again = pickle.loads(pickle.dumps(changed))
    assert [again[g] for g in range(0, 8 * BLOCK, 7)] == [changed[g] for g in range(0, 8 * BLOCK, 7)]


def test_only_the_ratio_of_weights_counts():
    huge, plain = (SampleOrder(LENGTHS, [scale, scale, 2 * scale], 5) for scale in (1e306, 1.0))
    assert [huge[g] for g in range(BLOCK)] == [plain[g] for g in range(BLOCK)]


def test_a_share_too_small_for_a_block_is_refused_by_the_name_of_the_change():
    with pytest.raises(DataError, match=r"data\.weight_changes\[1\]\.weights\[0\]: .*1/1024"):
        SampleOrder([9, 9], [1, 1], 0, [(1, [1, 0]), (2, [1e-5, 1])])


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
    for step in (7, 8, 9):
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


def test_only_changes_that_a_step_has_drawn_with_are_in_the_fingerprint(
    store: TokenStore, other_store: TokenStore
):
    plain = mixture(store, other_store)
    changed = mixture(store, other_store, WeightChange(3, [1.0, 1.0]), WeightChange(8, [1.0, 2.0]))
    moved = mixture(store, other_store, WeightChange(8, [1.0, 2.0]))
    for step in range(1, 9):  # block 0 is samples 0 … 1023, that is steps 0 … 7
        assert weight_changes_fingerprint(changed, step) == weight_changes_fingerprint(plain, step), step
    assert weight_changes_fingerprint(changed, 9) != weight_changes_fingerprint(plain, 9)
    assert weight_changes_fingerprint(changed, 9) == weight_changes_fingerprint(moved, 9), (
        "both begin with the second block"
    )
    later = mixture(store, other_store, WeightChange(8, [1.0, 2.0]), WeightChange(16, [1.0, 0.0]))
    assert weight_changes_fingerprint(later, 16) == weight_changes_fingerprint(moved, 16)
    assert weight_changes_fingerprint(later, 17) != weight_changes_fingerprint(moved, 17)
    heavier = mixture(store, other_store, WeightChange(8, [1.0, 3.0]))
    assert weight_changes_fingerprint(heavier, 9) != weight_changes_fingerprint(moved, 9)


def test_equal_fingerprints_at_a_step_mean_the_same_samples_before_it(
    store: TokenStore, other_store: TokenStore
):
    """For pairs of configurations, at every step; and unequal ones that some sample differs."""
    lists = [[], [(3, [1.0, 1.0])], [(8, [1.0, 1.0])], [(9, [0.0, 1.0])], [(8, [1.0, 1.0]), (16, [1.0, 0.0])]]
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
