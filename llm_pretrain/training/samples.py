"""Continuations of fixed prompts at every evaluation, for a look at what the model has learnt so far.

By every rank, so that none waits in silence for another, and written by the first; without a collective,
except where parameters are sharded. Training's random numbers and the model's mode stay as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from llm_pretrain import generation
from llm_pretrain.config import Config
from llm_pretrain.data import Tokenizer, TokenStore, open_tokenizer
from llm_pretrain.errors import OutputError
from llm_pretrain.model import Decoder
from llm_pretrain.tracking import Console, MetricsWriter
from llm_pretrain.training.compiling import eagerly
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.watchdog import beat

TEMPERATURE, TOP_K = 0.8, 50
_SHOWN = 100


class Samples:
    """Writes samples.jsonl: rows of `step`, `prompt` and `text`, the continuation alone.

    Where a resumed run comes past a step again, its rows stand twice and the later ones count.

    Args:
        config: Says which prompts, and how many tokens.
        folder: The run's.
        store: Whose tokenizer is used.
        together: A forward pass is a collective: all ranks make the same number of them.

    Raises:
        DataError: there are prompts, and the tokenizer cannot be opened.
    """

    def __init__(self, config: Config, folder: RunFolder, store: TokenStore, *, together: bool = False):
        self.together = together
        self.config, self.path = config, folder.samples
        self.prompts = config.evaluation.sample_prompts
        self.tokenizer = open_tokenizer(store.tokenizer_folder) if self.prompts else None

    def write(self, model: Decoder, step: int, console: Console, *, rank: int = 0) -> None:
        """Continue every prompt; on rank 0, append the rows and show the first.

        A file that cannot be written is a warning: samples are no reason to stop training.
        """
        if self.tokenizer is None:
            return
        texts = self._continuations(model, self.tokenizer)
        if rank:
            return
        try:
            with MetricsWriter(self.path) as writer:
                for prompt, text in zip(self.prompts, texts, strict=True):
                    writer.append({"step": step, "prompt": prompt, "text": text})
        except OutputError as error:
            console.warning(str(error))
        console.info(f"sample: {_shown(self.prompts[0])} -> {_shown(texts[0])}")

    def _continuations(self, model: Decoder, tokenizer: Tokenizer) -> list[str]:
        prompts = self._prompt_ids(model, tokenizer)
        new_ids: list[list[int]] = [[] for _ in prompts]
        end, was_training = tokenizer.eos_token_id, model.training
        # Together, every rank makes the same number of forward passes, whatever it draws: a text that has
        # ended is cut off afterwards.
        stop_ids = () if end is None or self.together else (end,)
        model.eval()
        try:
            with torch.no_grad(), eagerly(model), self._precision(model):
                for tokens in generation.generate(
                    model,
                    prompts,
                    vocab_size=tokenizer.vocab_size,
                    max_new_tokens=self.config.evaluation.sample_tokens,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    seed=self.config.run.seed,
                    stop_ids=stop_ids,
                ):
                    beat()
                    for ids, token in zip(new_ids, tokens, strict=True):
                        if token is not None:
                            ids.append(token)
        finally:
            model.train(was_training)
        ended = [ids[: ids.index(end) + 1] if end in ids else ids for ids in new_ids]
        return [_continuation(tokenizer, ids, new) for ids, new in zip(prompts, ended, strict=True)]

    def _precision(self, model: Decoder) -> torch.autocast:
        """Full, except where parameters are gathered in low precision."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.training.precision)
        device = next(model.parameters()).device.type
        return torch.autocast(device, dtype, enabled=self.together and dtype is not None)

    def _prompt_ids(self, model: Decoder, tokenizer: Tokenizer) -> list[list[int]]:
        """As documents begin; of a prompt too long to be continued, its end."""
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        first = [] if start is None else [start]
        room = model.config.max_position_embeddings - self.config.evaluation.sample_tokens - len(first)
        return [first + ids[max(0, len(ids) - room) :] for ids in tokenizer.encode(self.prompts)]


def _continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """What the new tokens add to the prompt's text; a tokenizer may write a space before the first of any."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def _shown(text: str) -> str:
    """On one line, shortened, in characters that the terminal has."""
    line = repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return line.encode(encoding, "backslashreplace").decode(encoding)
