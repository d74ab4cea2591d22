"""What `inspect` says of a store is what its documents say when they are counted one by one."""

from __future__ import annotations

import json
import shutil
import statistics
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from support.corpora import make_store, make_tokenizer, write_jsonl

from llm_pretrain.__main__ import main
from llm_pretrain.audit.step_samples import sequences_of_step
from llm_pretrain.config.loading import load_config
from llm_pretrain.data import store as token_store
from llm_pretrain.data.inspection import inspect_store, sample_documents
from llm_pretrain.data.loader import train_samples
from llm_pretrain.data.preparation import Preparation, prepare_store
from llm_pretrain.data.store import TokenStore


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("inspect") / "store", masked=True, longest=150)


def lengths_and_masks(store: TokenStore, name: str) -> tuple[list[int], int, int]:
    """(lengths, tokens to predict, those of them that are masked), counted document by document."""
    lengths, places, masked = [], 0, 0
    for ids, mask in store.split(name).iterate():
        lengths.append(len(ids))
        places += len(ids) - 1
        masked += sum(not target for target in mask.tolist()[1:])
    return lengths, places, masked


def test_counts_lengths_and_masks_are_the_documents_own(store):
    facts = inspect_store(store, 100)
    for name in ("train", "validation"):
        lengths, places, masked = lengths_and_masks(store, name)
        split = facts["splits"][name]
        assert (split["documents"], split["tokens"]) == (len(lengths), sum(lengths))
        assert split["masked_share"] == pytest.approx(masked / places)
        assert masked
        found = split["lengths"]
        assert (found["min"], found["max"]) == (min(lengths), max(lengths))
        assert found["median"] == statistics.median(lengths)
        assert found["mean"] == pytest.approx(statistics.fmean(lengths))
        assert sum(length <= found["p95"] for length in lengths) / len(lengths) == pytest.approx(
            0.95, abs=0.05
        )
        for row in split["histogram"]:
            assert row["documents"] == sum(row["from"] <= length <= row["to"] for length in lengths)
        assert sum(row["documents"] for row in split["histogram"]) == len(lengths)


def test_efficiency_is_what_the_packings_leave(tmp_path, capsys):
    """Four documents of 31 targets in sequences of 40: 4 x 31 places, in 4, ceil(124 / 40) or 4 sequences."""
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": f"{i}" + "x" * 29} for i in range(4)])
    tokenizer = make_tokenizer(tmp_path / "t")
    store = prepare_store(
        Preparation([str(corpus)], tokenizer, tmp_path / "s", workers=1, validation_fraction=0)
    )
    for length, expected in (
        (40, {"best_fit": (4, 124 / 160), "concat": (4, 124 / 160), "pad": (4, 124 / 160)}),
        (62, {"best_fit": (2, 1.0), "concat": (2, 1.0), "pad": (4, 0.5)}),
    ):
        packing = inspect_store(store, length)["splits"]["train"]["packing"]
        found = {name: (facts["sequences"], facts["efficiency"]) for name, facts in packing.items()}
        assert found == {name: pytest.approx(value) for name, value in expected.items()}
    assert main(["inspect", str(store.path), "--samples", "1", "--split", "validation"]) == 0
    assert "validation 0 documents, 0 tokens\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> TokenStore:
    """Prompts of 你 and their completions, with a character that would steer a terminal."""
    folder = tmp_path_factory.mktemp("prompts")
    records = [{"prompt": f"{i} 你\x1b[2J", "completion": f"好 {i}\n"} for i in range(20)]
    corpus = write_jsonl(folder / "c.jsonl", [*records, {"text": ""}])
    return prepare_store(Preparation([str(corpus)], make_tokenizer(folder / "t"), folder / "s", workers=1))


def test_samples_show_masked_tokens_and_no_control_characters(prompts, capsys):
    assert main(["inspect", str(prompts.path), "--samples", "3", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("⟦") == 3
    assert printed.count("你␛[2J⟧好 ") == 3
    assert "\x1b" not in printed
    assert "left out   1 × empty document" in printed


def test_samples_are_chosen_by_their_seed_and_say_what_is_stored(prompts):
    first, again, other = (list(sample_documents(prompts, 5, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    for sample in first:
        ids, mask = prompts.split("train").document(sample.document)
        assert sample.tokens == len(ids)
        masked = "".join(part.text for part in sample.parts if part.masked)
        assert len(masked.encode()) == int((~mask).sum())  # one token per byte
        text = "".join(part.text for part in sample.parts)
        assert text == "<s>" + prompts.tokenizer().decode(ids.tolist()) + "</s>"
    every = [sample.document for sample in sample_documents(prompts, 1000, 0, "train")]
    assert sorted(every) == list(range(prompts.split("train").documents)), "each once"


def test_json_is_for_programs(store, capsys):
    command = ["inspect", str(store.path), "--json", "--samples", "2", "--verify", "--sequence_length", "100"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["splits"] == json.loads(json.dumps(inspect_store(store, 100)["splits"]))
    assert found["hash"] == store.hash
    assert found["verified"] is True
    assert [sample["split"] for sample in found["samples"]] == ["train", "train"]
    assert found["tokenizer"]["special_tokens"] == {"<s>": 256, "</s>": 257, "<pad>": 258}
    assert found["inputs"] == ["store-corpus.jsonl"]


def test_verify_finds_what_opening_a_large_store_does_not(store, tmp_path, capsys, monkeypatch):
    """The store is too large to be read whole when it is opened, and the damage is in no sampled block."""
    monkeypatch.setattr(token_store, "VERIFY_LIMIT", 0)
    check = token_store.check_files
    monkeypatch.setattr(
        token_store, "check_files", lambda *of, whole: check(*of, whole=True) if whole else None
    )
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    tokens = np.fromfile(copy / "train" / "tokens-00000.bin", dtype="<u2")
    tokens[7] ^= 1
    tokens.tofile(copy / "train" / "tokens-00000.bin")
    assert main(["inspect", str(copy)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(copy), "--verify"]) == 65
    error = capsys.readouterr().err
    assert "tokens-00000.bin: expected unaltered contents" in error
    assert error.count("\n") == 1


def test_a_step_shows_the_sequences_that_the_run_read(trained_run, capsys, tmp_path):
    config = load_config(["--config", str(trained_run.folder / "config.yaml")])
    samples, size = train_samples(config), config.training.global_batch_size
    stores = {source.label: TokenStore(source.store).split("train") for source in config.data.sources}
    for step in (1, 3):
        batch = samples.__getitems__(range((step - 1) * size, step * size))
        sequences = sequences_of_step(trained_run.folder, step, with_loss=step == 3)
        assert {sequence.source for sequence in sequences} == stores.keys()
        for sequence, ids, is_target in zip(sequences, batch.input_ids, batch.loss_mask, strict=True):
            read = [
                stores[sequence.source]
                .document(piece.document)[0][piece.start :][: piece.tokens - 1]
                .tolist()
                for piece in sequence.pieces
            ]
            joined = list(chain.from_iterable(read))
            assert ids[: len(joined)].tolist() == joined
            assert not is_target[len(joined) :].any()
    targets = batch.loss_mask.sum(1).tolist()
    total = sum(sequence.loss * count for sequence, count in zip(sequences, targets, strict=True))
    assert total / sum(targets) == pytest.approx(trained_run.rows[3]["train/loss"], rel=1e-5)
    assert {sequence.loss_step for sequence in sequences} == {2}

    assert main(["inspect", str(trained_run.folder), "--step", "3", "--loss"]) == 0
    output = capsys.readouterr().out
    assert output.count("=== sequence ") == size
    assert f"of {sequences[0].source}, loss {sequences[0].loss:.4f} at step 2" in output
    assert main(["inspect", str(trained_run.folder), "--step", "99"]) == 2
    assert "--step: expected a step from 1 to 4, found 99" in capsys.readouterr().err

    copy = shutil.copytree(trained_run.folder, tmp_path / "run")
    rows = (copy / "metrics.jsonl").read_text().replace(trained_run.rows[3]["data/batch_sha256"], "0" * 64)
    (copy / "metrics.jsonl").write_text(rows)
    assert main(["inspect", str(copy), "--step", "3"]) == 74
    assert "step 3: expected data/batch_sha256 " in capsys.readouterr().err


def test_a_run_without_a_step_is_told_what_is_missing(trained_run, capsys):
    assert main(["inspect", str(trained_run.folder)]) == 2
    assert capsys.readouterr().err.endswith(
        f"--step: expected a step of the run {trained_run.folder}, found none\n"
    )
