"""A store that is not what `prepare` wrote is refused with the file's name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import edit_facts, make_config, make_store, make_tokenizer

from llm_pretrain.data.loader import data_fingerprint, global_batches, open_stores
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError


@pytest.fixture
def copy(masked_store: TokenStore, tmp_path: Path) -> Path:
    return Path(shutil.copytree(masked_store.path, tmp_path / "copy"))


def edit(**changes: object) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        facts = json.loads((path / "store.json").read_text())
        (path / "store.json").write_text(json.dumps(facts | changes))

    return apply


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def flip_a_bit(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)

    return apply


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-2])


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def swap_tokenizer(path: Path) -> None:
    other = make_tokenizer(path.parent / "other", bos=False)
    shutil.copy(other / "tokenizer.json", path / "tokenizer" / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("store.json"), "llm-pretrain prepare"),
        (cut("store.json"), r"store\.json: expected JSON"),
        (edit(format="another"), "expected format"),
        (edit(format_version=99), "expected format_version 1, found 99"),
        (edit(vocab_size=17), r"store\.json: expected unaltered contents"),
        (edit(splits={}), r"store\.json: expected unaltered contents"),
        (edit(sha256=None), r"store\.json: expected unaltered contents \(SHA-256 None"),
        (write("store.json", b"[" * 100_000), "expected JSON"),
        (remove("train/offsets.bin"), r"train/offsets\.bin: expected a file"),
        (cut("train/tokens-00000.bin"), r"tokens-00000\.bin: expected \d+ bytes, found \d+"),
        (flip_a_bit("train/tokens-00000.bin"), r"train/tokens-00000\.bin: expected unaltered"),
        (flip_a_bit("validation/loss_mask.bin"), r"validation/loss_mask\.bin: expected unaltered"),
        (swap_tokenizer, r"tokenizer/tokenizer\.json: expected"),
        (remove("tokenizer/tokenizer.json"), r"tokenizer/tokenizer\.json: expected a file"),
    ],
)
def test_damage_is_named_in_one_line(copy: Path, damage: Callable[[Path], None], message: str):
    TokenStore(copy)  # sound, and already verified once in this process
    damage(copy)
    with pytest.raises(DataError, match=message) as caught:
        TokenStore(copy)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_of_the_same_size_does_not_match_the_store(copy: Path):
    """Sizes agree, hashes do not: as when a tokenizer was trained again."""
    file = copy / "tokenizer" / "tokenizer.json"
    size = file.stat().st_size
    content = file.read_text()
    file.write_text(content.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'))
    assert file.stat().st_size == size
    with pytest.raises(DataError, match="expected the tokenizer that wrote the store"):
        TokenStore(copy)


def test_mixed_sources_share_one_tokenizer(store: TokenStore, tmp_path: Path):
    other = make_store(tmp_path / "other", documents=5)
    assert len(open_stores(make_config(store, other))) == 2
    edit_facts(other.path, lambda facts: facts.update(tokenizer_hash="0" * 64))
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.store: expected the tokenizer of"):
        open_stores(make_config(store, TokenStore(other.path)))


def test_no_source_is_an_error(store: TokenStore):
    with pytest.raises(DataError, match=r"data\.sources"):
        open_stores(make_config())


def test_the_fingerprint_changes_with_all_that_decides_the_order(store: TokenStore, masked_store: TokenStore):
    base = data_fingerprint(make_config(store))
    others = [
        make_config(masked_store),
        make_config(store, packing="concat"),
        make_config(store, isolate_documents=False),
        make_config(store, seed=1),
        make_config(store, sequence_length=32),
        make_config(store, weights=[2.0]),
    ]
    for config in others:
        assert data_fingerprint(config) != base
    assert data_fingerprint(make_config(store, micro_batch_size=1, num_workers=2)) == base


def test_a_store_goes_to_another_process_by_its_path(masked_store: TokenStore):
    again = pickle.loads(pickle.dumps(masked_store))
    assert again.hash == masked_store.hash
    ours, theirs = masked_store.split("train"), again.split("train")
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(ours.iterate(), theirs.iterate(), strict=True))
    assert len(pickle.dumps(masked_store)) < 1000


def test_a_store_that_was_replaced_after_its_opening_is_not_mixed_in(tmp_path: Path):
    opened = make_store(tmp_path / "store", documents=20)
    config = make_config(opened, max_steps=2)

    def digests(**stores: Any) -> list[bytes]:
        loader = global_batches(config, start_step=0, **stores)
        return [batch.input_ids.numpy().tobytes() for batch in loader]

    before, fingerprint = digests(), data_fingerprint(config)
    (tmp_path / "store").rename(tmp_path / "earlier")
    make_store(tmp_path / "store", documents=30)
    assert digests() != before
    assert digests(stores=[opened]) == before
    assert data_fingerprint(config, [opened]) == fingerprint != data_fingerprint(config)
    with pytest.raises(DataError, match=r"store: expected the store that the run has opened"):
        pickle.loads(pickle.dumps(opened))
