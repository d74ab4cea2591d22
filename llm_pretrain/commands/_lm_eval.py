"""lm-eval's tasks on a `Decoder`, also of checkpoints and architectures that transformers cannot load."""

from __future__ import annotations

import argparse
import difflib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_pretrain.commands.evaluate import autocast, rolling_windows, score_windows
from llm_pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from llm_pretrain.commands._source import Source
    from llm_pretrain.config import Config

_NEW_TOKENS = 256
"""Of a generated answer if the task does not set it, as in lm-eval."""


def require_lm_eval() -> None:
    """Raise ConfigError where the package is not installed."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "--tasks: expected the package lm-eval, found none; pip install 'llm_pretrain[eval]'"
        )


def evaluate_tasks(
    source: Source, config: Config, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Run the tasks of `arguments`; returns task → metric → value.

    Raises:
        ConfigError: A task or a folder does not exist.
        DataError: The file or the data of a task cannot be loaded.
    """
    folder = arguments.include_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--include_path: expected a folder with task files, found none at {folder}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports] (the extra `eval`)
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports] (the extra `eval`)

    manager = TaskManager(include_path=folder)
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks: expected names of tasks, found {arguments.tasks!r}")
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "--include_path names a folder of your own"
            raise ConfigError(f"--tasks: expected a task that lm-eval knows, found {name}; {hint}")
    try:
        manager.load(names)
    except Exception as error:  # task files and the libraries that load their data raise any type
        reason = " ".join(str(error).split())
        raise DataError(
            f"--tasks {','.join(names)}: expected task files and data that load, found: "
            f"{type(error).__name__}: {reason}"
        ) from error
    results = simple_evaluate(
        model=adapter(source, config),
        tasks=list(names),
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    assert results is not None, "one process: rank 0"
    return {task: _metrics(row) for task, row in results["results"].items()}


def adapter(source: Source, config: Config) -> Any:
    """An `lm_eval.api.model.LM` of the source, with sequence length, batch size and precision of `config`."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports] (the extra `eval`)

    model = type("DecoderLM", (DecoderScores, TemplateLM), {})()
    model.prepare(source, config)
    return model


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    """`{"acc,none": 0.5, "alias": …}` → `{"acc": 0.5}`; the name of another filter than `none` is kept."""
    metrics = {}
    for key, value in row.items():
        name, _, filtered = key.partition(",")
        if filtered and not (name.endswith("_stderr") and not isinstance(value, int | float)):
            metrics[name if filtered == "none" else key] = value
    return metrics


class DecoderScores:
    """The methods of a language model that lm-eval calls; `adapter` adds lm-eval's base class.

    Contexts, and texts of `loglikelihood_rolling`, begin with BOS (or else EOS), as documents do in training.
    A context that is too long for `max_length` is cut at its beginning.
    """

    def prepare(self, source: Source, config: Config) -> None:
        """Set the model and its settings; the constructor is lm-eval's."""
        if source.start_id is None:
            raise ConfigError(
                f"{source.tokenizer.folder}: expected a tokenizer with a BOS or EOS token, found neither"
            )
        self.source = source
        self.max_length = config.training.sequence_length
        self.batch_size = config.training.micro_batch_size
        self.precision = config.training.precision

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return min(self.source.stop_ids, default=self.prefix_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The beginning of a text."""
        assert self.source.start_id is not None
        return self.source.start_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's caches."""
        return self.source.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of the text, without special tokens."""
        return self.source.tokenizer.encode([string])[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for _, context, continuation in requests:
            begun = context[:1] == [self.prefix_token_id]
            whole = ([] if begun else [self.prefix_token_id]) + context + continuation
            whole = whole[-(self.max_length + 1) :]
            cut = max(1, len(whole) - len(continuation))
            windows.append((whole[:cut], whole[cut:]))
        return self._scores(windows)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length`."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = list(rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length))
            totals.append(sum(score for score, _ in self._scores(windows)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, which ends before the first of its `until` texts."""
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for indices in groups.values():
            for first in range(0, len(indices), self.batch_size):
                chosen = indices[first : first + self.batch_size]
                contexts = [requests[index].args[0] for index in chosen]
                texts = self._continue(contexts, requests[chosen[0]].args[1])
                answers |= dict(zip(chosen, texts, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _scores(self, windows: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        return score_windows(
            self.source.model,
            windows,
            batch_size=self.batch_size,
            precision=self.precision,
            vocab_size=self.source.tokenizer.vocab_size,
        )

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Continuations of contexts with the same generation settings, in lm-eval's names."""
        from llm_pretrain.generation import TextStream, generate

        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        count = min(int(settings.get("max_gen_toks") or _NEW_TOKENS), self.max_length - 1)
        kept = self.max_length - count
        prompts = [([self.prefix_token_id, *self.tok_encode(text)])[-kept:] for text in contexts]
        pieces = self.source.tokenizer.token_pieces()
        streams, texts = [TextStream(pieces) for _ in prompts], [""] * len(prompts)
        open_rows = set(range(len(prompts)))
        with autocast(self.source.device, self.precision):
            for column in generate(
                self.source.model,
                prompts,
                vocab_size=self.source.tokenizer.vocab_size,
                max_new_tokens=count,
                temperature=float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0,
                top_k=int(settings.get("top_k") or 0),
                top_p=float(settings.get("top_p") or 1),
                stop_ids=self.source.stop_ids,
            ):
                for row in list(open_rows):
                    token = column[row]
                    if token is not None and token not in self.source.stop_ids:
                        texts[row] += streams[row].push(token)
                    if token is None or any(stop and stop in texts[row] for stop in until):
                        open_rows.discard(row)
                if not open_rows:
                    break
        return [_before_any(text, until) for text in texts]


def _before_any(text: str, until: Sequence[str]) -> str:
    for stop in until:
        if stop:
            text = text.partition(stop)[0]
    return text
