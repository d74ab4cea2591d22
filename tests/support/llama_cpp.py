"""llama.cpp on a GGUF file, by the package xllamacpp: token ids, greedy text, log-probabilities."""

from __future__ import annotations

import json
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCpp:
    """One model, one thread, plain sampling. Import xllamacpp first, or skip the test."""

    def __init__(self, path: Path, *, context: int = 256):
        xllamacpp: Any = import_module("xllamacpp")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.warmup = parameters.fit_params = False
        parameters.verbosity = 0
        # Its defaults on a CPU, fp16 keys and values and a flash kernel in fp16, cost up to 5e-3 of
        # log-probability by themselves.
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(parameters)
        # Its destructor waits for ever if the server's loop has not begun; an answer shows that it has.
        self.server.handle_completions({"prompt": [0], "n_predict": 1})

    def tokenize(self, text: str, *, special: bool = True, special_text: bool = False) -> list[int]:
        """Ids of a text; `special` with what the tokenizer puts in front.

        Special tokens in the text are text, or, with `special_text`, special tokens.
        """
        body = {"content": text, "add_special": special, "parse_special": special_text}
        return self._post("/tokenize", body)["tokens"]

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The prompt that its chat template makes."""
        return self._post("/apply-template", {"messages": messages})["prompt"]

    def greedy(
        self, ids: list[int], count: int, vocab_size: int, banned: list[int]
    ) -> tuple[list[int], np.ndarray]:
        """The next `count` ids at temperature 0, and the log-probabilities [count, vocab_size] of each.

        `banned` ids are never chosen, but have their probability. All that are no whole characters must
        be banned: the server keeps back a token, and loses its probabilities, until its text is whole.
        """
        answer: Any = self.server.handle_completions(
            {
                "prompt": ids,
                "n_predict": count,
                "temperature": 0,
                "n_probs": vocab_size,
                "cache_prompt": False,
                "logit_bias": [[index, False] for index in banned],
            }
        )
        steps = answer["choices"][0]["logprobs"]["content"]
        logprobs = np.full((len(steps), vocab_size), np.nan)
        for row, step in zip(logprobs, steps, strict=True):
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
        return [step["id"] for step in steps], logprobs

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())
