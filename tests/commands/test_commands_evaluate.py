"""`llm-pretrain evaluate`: the run's own figures to the last bit; on files, what a plain loop recomputes."""

import json
import math
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from support.corpora import make_texts, write_jsonl
from support.launching import ROOT, Finished, environment

from llm_pretrain.__main__ import main
from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.config.loading import load_config
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.model.decoder import Decoder


def evaluate(capsys, *argv: str | Path) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *map(str, argv), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def texts(tmp_path) -> tuple[Path, list[str]]:
    """A jsonl file of short and long documents, and their texts."""
    texts = [*make_texts(6, seed=3), " ".join(make_texts(8, seed=4))]
    return write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts]), texts


def document_nats(
    model: Decoder, text_ids: list[int], start: int, end: int | None, length: int
) -> list[float]:
    """Cross-entropy of each target of one document, its pieces overlapping by one token, one by one."""
    ids = [start, *text_ids] + ([] if end is None else [end])
    nats = []
    for first in range(0, len(ids) - 1, length):
        piece = torch.tensor(ids[first : first + length + 1])
        with torch.inference_mode():
            logits = model(piece[None, :-1]).logits[0].double()
        nats += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none").tolist()
    return nats


def assert_own_row(figures: dict, run: Finished) -> None:
    assert figures["kind"] == "checkpoint"
    row = run.rows[figures["step"]]
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert figures[name] == row[f"eval/{name}"], name


@pytest.mark.parametrize(
    ("named", "step"), [("", 4), ("checkpoints/step-00000004", 4), ("checkpoints/step-00000002", 2)]
)
def test_a_checkpoint_gives_the_runs_own_row_to_the_last_bit(trained_run, capsys, named, step):
    figures = evaluate(capsys, trained_run.folder / named)
    assert figures["step"] == step
    assert_own_row(figures, trained_run)


def test_the_row_is_met_with_the_store_named_and_missed_with_other_settings(trained_run, plain_store, capsys):
    loss = trained_run.rows[4]["eval/loss"]
    assert evaluate(capsys, trained_run.folder, "--store", plain_store)["loss"] == loss
    whole = evaluate(capsys, trained_run.folder, "--max_batches", "0")
    assert whole["loss"] != loss
    assert whole["tokens"] == TokenStore(plain_store).facts["splits"]["validation"]["targets"]
    assert whole["bytes"] == TokenStore(plain_store).split("validation").text_bytes
    assert whole["zlib_bits_per_byte"] == TokenStore(plain_store).zlib_bits_per_byte


def test_what_was_evaluated_is_said_in_sequences_at_any_micro_batch(trained_run, capsys):
    """The option counts global batches, so that micro batches would look like another number of them."""
    size = load_config(["--config", str(trained_run.folder / "config.yaml")]).training.global_batch_size
    one = (trained_run.folder, "--max_batches", "1")
    found = [evaluate(capsys, *one, "--micro_batch_size", str(micro)) for micro in (1, 3)]
    assert [figures["sequences"] for figures in found] == [size, size]
    assert found[0]["available"] > size
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    train = evaluate(capsys, *one, "--split", "train")
    assert train["available"] > 2 * found[0]["available"]
    assert train["loss"] != found[0]["loss"]


def test_half_precision_weights_and_autocast_are_near(trained_run, capsys):
    loss = trained_run.rows[4]["eval/loss"]
    weights = evaluate(capsys, trained_run.folder / "weights")
    assert (weights["kind"], weights["step"]) == ("weights", 4)
    assert 0 < abs(weights["loss"] - loss) < 1e-2
    low = evaluate(capsys, trained_run.folder, "--precision", "bf16")
    assert 0 < abs(low["loss"] - loss) < 2e-2


def test_files_are_evaluated_as_documented(trained_run, texts, capsys):
    """Against a loop over documents and pieces that knows nothing of packing or batches."""
    file, contents = texts
    figures = evaluate(capsys, trained_run.folder, "--input", file, "--sequence_length", "64")
    opened = open_model(trained_run.folder)
    tokenizer = open_tokenizer(opened.tokenizer_folder)
    encoded = tokenizer.encode(contents)
    size = sum(len(text.encode()) for text in contents)
    assert figures["bytes"] == size
    assert max(map(len, encoded)) > 3 * 64, "a document is split"
    per_document = [
        document_nats(opened.model, ids, tokenizer.bos_token_id, tokenizer.eos_token_id, 64)
        for ids in encoded
    ]
    text_nats = math.fsum(value for nats in per_document for value in nats[:-1])
    assert figures["tokens"] == sum(len(ids) + 1 for ids in encoded)
    loss = math.fsum(map(math.fsum, per_document)) / figures["tokens"]
    assert figures["loss"] == pytest.approx(loss, rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(text_nats / size / math.log(2), rel=1e-6)
    joined = "".join(contents).encode()
    assert figures["zlib_bits_per_byte"] == 8 * len(zlib.compress(joined, 9)) / len(joined)


def test_special_tokens_are_no_bytes_of_the_text(trained_run, plain_store, tmp_path, capsys):
    """An EOS inside a document is a target, and no part of the text."""
    tokenizer = open_tokenizer(plain_store / "tokenizer")
    first, second = tokenizer.encode(["one two", "three"])
    ids = [tokenizer.bos_token_id, *first, tokenizer.eos_token_id, *second]
    file = write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": ids}])
    figures = evaluate(capsys, trained_run.folder, "--input", file)
    assert figures["bytes"] == len("one twothree")
    model = open_model(trained_run.folder).model
    nats = document_nats(model, ids[1:], ids[0], None, len(ids))
    text_nats = math.fsum(nats) - nats[len(first)]
    assert figures["tokens"] == len(nats)
    assert figures["bits_per_byte"] == pytest.approx(text_nats / figures["bytes"] / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_lm_evals_command_gives_the_bits_per_byte_of_evaluate(trained_run, tmp_path):
    """On a run's weights, by a task file of its own, without a network."""
    pytest.importorskip("lm_eval", reason="needs the package lm-eval")
    weights, reference = trained_run.folder / "weights" / "step-00000004", tmp_path / "reference.json"
    for script in ("reference.py", "check_lm_eval.py"):
        command = [sys.executable, str(ROOT / "examples" / "readers" / script), str(weights), str(reference)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok  lm_eval ")


def test_several_stores_each_have_their_figures(trained_run, plain_store, changed_store, capsys):
    stores = ("--store", plain_store, changed_store, "--max_batches", "0")
    both = evaluate(capsys, trained_run.folder, *stores)
    alone = [
        evaluate(capsys, trained_run.folder, "--store", store, "--max_batches", "0") for store in stores[1:3]
    ]
    assert both["tokens"] == sum(each["tokens"] for each in alone)
    assert list(both["sources"]) == [str(plain_store), str(changed_store)], "both are called `store`"
    for found, expected in zip(both["sources"].values(), alone, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)
    mean = sum(each["loss"] * each["tokens"] for each in alone) / both["tokens"]
    assert both["loss"] == pytest.approx(mean, rel=1e-6)
