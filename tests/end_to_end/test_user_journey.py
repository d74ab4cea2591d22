"""From jsonl to weights that open elsewhere, by the public commands alone, and what the weights must be.

Every step is the command that a user types; only the results are looked at from inside.
"""

from __future__ import annotations

import math
import random
import zlib
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path

import pytest
import torch
from support.corpora import make_texts, write_jsonl
from support.launching import Finished, checkpoint_tensors, launch, run_options

from llm_pretrain.__main__ import main
from llm_pretrain.data.store import TokenStore
from llm_pretrain.model.kernels.loss import IGNORE_INDEX

AWKWARD = ["</s> is text <s>", "  two spaces\n\n\tand a tab ", "αβγ 𝔘𝔫𝔦 \u3000", " ", "<pad>\r\n\x00end", "🜁"]
"""Texts that a careless tokenizer changes or takes for special tokens."""
STEPS = {"tiny-moe": 12, "tiny-dense": 100}
SEQUENCE_LENGTH = 128


def command(*arguments: str | Path) -> str:
    """Output of `llm-pretrain …`, which must succeed."""
    with redirect_stdout(StringIO()) as printed:
        assert main([*map(str, arguments)]) == 0
    return printed.getvalue()


def segments(record: dict) -> list[tuple[str, bool]]:
    """(text, whether it is trained on) of a record."""
    if "text" in record:
        return [(record["text"], True)]
    return [(record["prompt"], False), (record["completion"], True)]


@dataclass
class Corpus:
    """Records by their text, what the two commands made of them, and what they printed."""

    records: dict[str, dict]
    store: TokenStore
    output: str

    def validation_records(self) -> list[dict]:
        """Records of the validation split, in the store's order."""
        tokenizer = self.store.tokenizer()
        documents = self.store.split("validation").iterate()
        return [self.records[tokenizer.decode(ids.tolist())] for ids, _ in documents]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A jsonl file of texts and of prompts with completions, tokenized by the two commands."""
    folder = tmp_path_factory.mktemp("journey")
    generator = random.Random(3)
    records = [{"text": text} for text in AWKWARD]
    for index, text in enumerate(make_texts(300, longest=30)):
        cut = generator.randint(1, len(text))
        records.append(
            {"text": text} if index % 4 else {"prompt": text[:cut], "completion": text[cut:] + " so"}
        )
    file, tokenizer, store = folder / "corpus.jsonl", folder / "tokenizer", folder / "store"
    write_jsonl(file, records)
    command("tokenizer", "--input", file, "--vocab_size", "370", "--output", tokenizer)
    inputs = ("--input", file, "--validation_fraction", "0.15")
    output = command("prepare", *inputs, "--tokenizer", tokenizer, "--output", store)
    by_text = {"".join(text for text, _ in segments(record)): record for record in records}
    assert len(by_text) == len(records)
    return Corpus(by_text, TokenStore(store), output)


@dataclass
class Run:
    """A finished run and the corpus it was trained on."""

    name: str
    corpus: Corpus
    options: list[str]
    finished: Finished

    @property
    def steps(self) -> int:
        return self.finished.status["step"]

    @property
    def weights(self) -> Path:
        return self.finished.folder / "weights" / f"step-{self.steps:08d}"

    def transformers(self):
        """The exported weights as transformers opens them, in fp32."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.weights, dtype=torch.float32).eval()

    @cached_property
    def documents(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(input ids, transformers' labels) [1, tokens] of each validation document, none of them packed."""
        pairs = []
        for ids, mask in self.corpus.store.split("validation").iterate():
            assert len(ids) <= SEQUENCE_LENGTH + 1, "a document that fits is one piece, with all its context"
            input_ids = torch.from_numpy(ids.astype("int64"))[None]
            pairs.append((input_ids, input_ids.where(torch.tensor(mask.tolist()), IGNORE_INDEX)))
        return pairs


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in STEPS])
def run(request: pytest.FixtureRequest, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name = request.param
    options = run_options(
        name,
        corpus.store.path,
        f"training.sequence_length={SEQUENCE_LENGTH} training.micro_batch_size=2 "
        "training.global_batch_size=4 checkpoint.save_steps=0 evaluation.eval_steps=100 "
        "evaluation.max_batches=null",
        "--training.max_steps",
        str(STEPS[name]),
    )
    folder = tmp_path_factory.mktemp(name) / "run"
    return Run(name, corpus, options, launch("torchrun", 1, folder, options))


def test_every_text_is_stored_whole_with_the_ids_of_autotokenizer(corpus: Corpus):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.store.tokenizer_folder)
    found = []
    for split in ("train", "validation"):
        for ids, mask in corpus.store.split(split).iterate():
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            expected, trained_on = [tokenizer.bos_token_id], [True]
            for part, loss in segments(corpus.records[text]):
                options = {"add_special_tokens": False, "split_special_tokens": True}
                expected += tokenizer(part, **options).input_ids
                trained_on += [loss] * (len(expected) - len(trained_on))
            assert ids.tolist() == [*expected, tokenizer.eos_token_id]
            assert mask.tolist() == [*trained_on, True]
            found.append(text)
    assert sorted(found) == sorted(corpus.records)


def test_the_run_is_said_on_the_console(run: Run):
    output, last = run.finished.output, run.finished.rows[run.steps]
    text = b"".join(
        part.encode() for record in run.corpus.validation_records() for part, _ in segments(record)
    )
    zlib_bits = 8 * len(zlib.compress(text, 9)) / len(text)
    assert f"zlib level 9 needs {zlib_bits:.4f} bits per byte" in output
    assert f"bits/byte {last['eval/bits_per_byte']:.4f}" in output
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/loss"]))
    assert last["eval/loss"] < run.finished.rows[0]["eval/loss"]


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_text(run: Run):
    """Recomputed from transformers' log-probabilities and the records' own UTF-8 bytes."""
    model = run.transformers()
    # The checkpoint's full precision: what the run itself evaluated.
    state = checkpoint_tensors(run.finished.folder, run.steps)
    parameters = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer.")}
    parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]  # tied
    model.load_state_dict(parameters)
    special = torch.tensor(sorted(run.corpus.store.special_ids))
    nats = 0.0
    for input_ids, labels in run.documents:
        log_probs = model(input_ids).logits.double().log_softmax(-1)[0, :-1]
        targets = labels[0, 1:]
        is_text = (targets != IGNORE_INDEX) & ~torch.isin(targets, special)
        nats -= log_probs[is_text].gather(-1, targets[is_text, None]).sum().item()
    text_bytes = sum(
        len(part.encode())
        for record in run.corpus.validation_records()
        for part, trained_on in segments(record)
        if trained_on
    )
    expected = run.finished.rows[run.steps]["eval/bits_per_byte"]
    assert nats / (math.log(2) * text_bytes) == pytest.approx(expected, rel=1e-4)
