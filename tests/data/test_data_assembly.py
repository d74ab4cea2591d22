"""Assembled batches equal a slow reference that reads the stores token by token."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import make_tokenizer
from support.fuzzing import fuzzed

from llm_pretrain.data.assembly import IGNORE_INDEX, Assembler, Batch, PackedSource
from llm_pretrain.data.packing import PackedIndex, pack
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.errors import DataError

NAMES = ("input_ids", "labels", "loss_mask", "position_ids", "document_ids", "digest", "document_offsets")


def write_store(folder: Path, *, masked: bool, shard_bytes: int, seed: int) -> TokenStore:
    """80 documents of 2 to 40 random tokens, with a random mask or none, in shards of `shard_bytes`."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 41, 80)
    tokenizer = open_tokenizer(make_tokenizer(folder.with_name(f"{folder.name}-tokenizer")))
    with StoreWriter(folder, tokenizer, shard_bytes=shard_bytes) as writer:
        ids = generator.integers(0, 250, lengths.sum())
        mask = generator.random(len(ids)) < 0.5 if masked else np.ones(len(ids), dtype=np.bool_)
        writer.splits["train"].append(ids, lengths, mask, len(ids), np.arange(80))
        writer.commit({"zlib_bits_per_byte": None})
    return TokenStore(folder)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """Masked in one shard, masked in many, plain in many."""
    folder = tmp_path_factory.mktemp("assembly")
    kinds = [(True, 1 << 20), (True, 200), (False, 300)]
    found = [
        write_store(folder / f"{k}", masked=masked, shard_bytes=size, seed=k)
        for k, (masked, size) in enumerate(kinds)
    ]
    assert len(found[0].split("train").shards) == 1
    assert min(len(store.split("train").shards) for store in found[1:]) > 5
    return found


def plain_assembly(
    sources: list[PackedSource], samples: list[tuple[int, int]], length: int, *, isolate: bool, slot: int
) -> dict[str, torch.Tensor]:
    """A slow reference of a batch: every token is looked up individually."""
    rows: dict[str, list[list[int]]] = {name: [] for name in NAMES[:5]}
    total, offsets = np.zeros(8, dtype=np.int64), []
    for row, (k, sequence) in enumerate(samples):
        source = sources[k]
        store, index = source.store, source.index
        documents = list(store.split(source.split).iterate())
        ids = np.concatenate([document for document, _ in documents])
        mask = np.concatenate([targets for _, targets in documents])
        row_of: dict[str, list[int]] = {name: [] for name in rows}
        first, last = index.sequence_offsets[sequence : sequence + 2].tolist()
        for number, piece in enumerate(range(first, last)):
            start = int(index.piece_start[piece])
            if isolate or not number:
                offsets.append(row * length + len(row_of["labels"]))
            for place in range(int(index.piece_length[piece])):
                target = bool(mask[start + place + 1])
                row_of["position_ids"].append(place if isolate else len(row_of["labels"]))
                row_of["input_ids"].append(int(ids[start + place]))
                row_of["labels"].append(int(ids[start + place + 1]) if target else IGNORE_INDEX)
                row_of["loss_mask"].append(target)
                row_of["document_ids"].append(number if isolate else 0)
        rest = length - len(row_of["labels"])
        if rest:
            offsets.append(row * length + len(row_of["labels"]))
        row_of["position_ids"] += range(rest) if isolate else range(length - rest, length)
        row_of["input_ids"] += [store.pad_token_id or 0] * rest
        row_of["labels"] += [IGNORE_INDEX] * rest
        row_of["loss_mask"] += [False] * rest
        row_of["document_ids"] += [last - first if isolate else 1] * rest
        content = f"{slot + row}/{store.hash}/{sequence}/".encode()
        content += np.array([*row_of["input_ids"], *row_of["labels"]], dtype="<i4").tobytes()
        content += np.packbits(np.array(row_of["loss_mask"], dtype=np.bool_)).tobytes()
        total += np.frombuffer(hashlib.sha256(content).digest(), dtype=">u4").astype(np.int64)
        for name, values in row_of.items():
            rows[name].append(values)
    size = 64
    while size < len(offsets) + 1:
        size *= 2
    offsets += [len(samples) * length] * (size - len(offsets))
    expected = {name: torch.tensor(values) for name, values in rows.items()}
    expected["loss_mask"] = expected["loss_mask"].bool()
    return expected | {
        "digest": torch.from_numpy(total),
        "document_offsets": torch.tensor(offsets, dtype=torch.int32),
    }


def check(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    for name in NAMES:
        found = getattr(batch, name)
        assert found.dtype == expected[name].dtype, name
        assert torch.equal(found, expected[name]), name
        assert found.is_contiguous(), name
    assert batch.num_loss_tokens == int(expected["loss_mask"].sum())


@fuzzed(50)
@given(data=st.data())
def test_every_batch_equals_a_slow_reference(stores: list[TokenStore], data: st.DataObject):
    """Random packings, lengths, mixtures and orders of rows; the masked and the sharded among them."""
    length = data.draw(st.integers(1, 70), label="sequence_length")
    packing = data.draw(st.sampled_from(["best_fit", "concat", "pad"]))
    isolate = data.draw(st.booleans(), label="isolate")
    chosen = data.draw(st.lists(st.sampled_from(stores), min_size=1, max_size=3, unique_by=id))
    sources = [
        PackedSource(store, "train", pack(store.split("train").offsets, length, packing)) for store in chosen
    ]
    sample = st.integers(0, len(sources) - 1).flatmap(
        lambda k: st.tuples(st.just(k), st.integers(0, len(sources[k].index) - 1))
    )
    samples = data.draw(st.lists(sample, min_size=1, max_size=9))
    assembler = Assembler(sources, length, isolate_documents=isolate)
    expected = plain_assembly(sources, samples, length, isolate=isolate, slot=3)
    check(assembler.assemble(samples, step=0, micro_batch=0, slot=3), expected)


@pytest.mark.parametrize(
    ("starts", "lengths"), [([10**9], [30]), ([0], [31]), ([0, 5], [20, 20])], ids=["far", "long", "many"]
)
def test_an_index_of_other_documents_is_named(
    stores: list[TokenStore], starts: list[int], lengths: list[int]
):
    index = PackedIndex(np.array(starts), np.array(lengths, dtype=np.int32), np.array([0, len(starts)]))
    assembler = Assembler([PackedSource(stores[0], "train", index)], 30, isolate_documents=True)
    with pytest.raises(DataError, match=r"index: expected pieces of the store's documents"):
        assembler.assemble([(0, 0)], step=0, micro_batch=0, slot=0)
