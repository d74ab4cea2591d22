"""Compares a reader's tokens and log-probabilities with a reference; needs nothing but Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


class Comparison:
    """Counts agreement text by text. `finish` prints it and ends the process: 0 where all agree."""

    def __init__(self, reader: str, bound: float = 1e-3):
        self.reader, self.bound = reader, bound
        self.prompts = json.loads(Path(sys.argv[2]).read_text("utf-8"))["prompts"]
        self.same_ids = self.same_tokens = self.tokens = self.checked_ids = 0
        self.largest = 0.0

    def ids(self, encode: Callable[[str], Sequence[int]]) -> None:
        """The reader's tokenizer gives the same ids, without special tokens."""
        for row in self.prompts:
            self.checked_ids += 1
            self.same_ids += list(encode(row["text"])) == row["text_ids"]

    def greedy(self, row: dict, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """The reader's greedy continuation of `row["ids"]`, and its log-probability of each token of it.

        After a first difference, which a tie within rounding may make, the texts are no longer the same.
        """
        for index, (ours, theirs) in enumerate(zip(row["greedy"], tokens, strict=False)):
            self.tokens += 1
            if logprobs is not None:
                self.largest = max(self.largest, abs(row["logprobs"][index] - logprobs[index]))
            if ours != theirs:
                break
            self.same_tokens += 1

    def finish(self) -> None:
        agree = self.same_ids == self.checked_ids and self.same_tokens == self.tokens > 0
        agree = agree and self.largest <= self.bound
        verdict = "ok" if agree else "DIFFERS"
        print(
            f"{verdict}  {self.reader}: ids of {self.same_ids}/{self.checked_ids} texts, "
            f"{self.same_tokens}/{self.tokens} greedy tokens, log-probabilities within {self.largest:.1e}"
        )
        sys.exit(0 if agree else 1)
