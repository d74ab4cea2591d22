"""Evaluation on the validation split (loss, perplexity, bits per byte) and generated samples.

The batches and the order in which their sums are added do not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import Module

from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import EvaluationBatches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.data.tokenizers import Tokenizer, open_tokenizer
from llm_pretrain.distributed.collectives import Ranks, any_rank
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.errors import OutputError
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.model.kernels import autocast
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.rows import MetricsWriter
from llm_pretrain.tracking.trackers import Console
from llm_pretrain.training.engine import dummy_batch, own_part
from llm_pretrain.training.model_setup import eagerly


class Evaluator:
    """Evaluates a model on a fixed sequence of batches.

    Args:
        ranks: The ranks of the run, or a single process.
        place: Place of this rank; each of D data-parallel groups evaluates every D-th batch.
        forward: The model's forward pass in the configured precision.
        batches: The validation batches, the same on every rank.
        store: Has the number of UTF-8 bytes of each token.
        stop_requested: Checked between batches; the evaluation ends without a result if it is true.
        labels: Names of the sources; with more than one, each has its own metrics.
        is_collective: Whether a forward pass is a collective. A rank without a batch then computes a dummy
            batch, and all ranks stop at the same batch.
    """

    def __init__(
        self,
        ranks: Ranks,
        place: Place,
        forward: Callable[[Batch], DecoderOutput],
        batches: Sequence[Batch],
        store: TokenStore,
        stop_requested: Callable[[], bool],
        labels: Sequence[str] = (),
        is_collective: bool = False,
    ):
        self.ranks, self.place, self.forward = ranks, place, forward
        self.batches, self.stop_requested = batches, stop_requested
        self.is_collective = is_collective
        self.labels = list(labels) if len(labels) > 1 else []
        self.token_bytes = torch.from_numpy(np.asarray(store.token_bytes()))
        self.tokens = self.text_bytes = 0
        """Targets of the last evaluation, and their UTF-8 bytes."""

    @torch.no_grad()
    def __call__(
        self, model: Module, show: Callable[[int, int], object] = lambda done, total: None
    ) -> dict[str, float | None] | None:
        """The `eval/*` metrics, empty without validation tokens; None if any rank was asked to stop.

        Metrics of a source without validation tokens are None. `show` gets the numbers of batches, done and
        in all.
        """
        place = self.place
        was_training = model.training
        model.eval()
        sums: list[tuple[int, torch.Tensor]] | None = []
        with eagerly(model):
            for first in range(0, len(self.batches), place.sizes.data):
                stopping = self.stop_requested()
                if any_rank(self.ranks, stopping)[0] if self.is_collective else stopping:
                    sums = None
                    break
                heartbeat()
                show(first, len(self.batches))
                index = first + place.data
                if index < len(self.batches):
                    values = self._batch_sums(own_part(self.batches[index], place))
                    sums += [] if values is None else [(index, values)]
                elif self.is_collective:
                    self.forward(dummy_batch(self.ranks.device, place))
        model.train(was_training)
        gathered = self.ranks.gather_objects(
            None if sums is None else [(index, values.tolist()) for index, values in sums]
        )
        if any(part is None for part in gathered):
            return None
        rows = [values for _, values in sorted(pair for part in gathered for pair in part)]
        if not rows:
            return {}
        totals = [math.fsum(column) for column in zip(*rows, strict=True)]
        self.tokens, self.text_bytes = int(totals[1]), int(totals[3])
        return self._metrics(totals)

    def unseen_sources(self) -> list[str]:
        """Warnings before training: one if nothing is evaluated, else one for each source left out."""
        batches = self.batches
        if not isinstance(batches, EvaluationBatches):
            return []
        if not len(batches):
            return [
                "nothing is evaluated and no weights/best kept, since no store has a validation document; "
                "prepare one with a larger --validation_fraction, or from more documents"
            ]
        lines = []
        for label, used, available in zip(self.labels, batches.sequences, batches.available, strict=False):
            if not used:
                reason = (
                    f"none of its {available} validation sequences is among the {sum(batches.sequences)} of "
                    "evaluation.max_batches; raise it"
                    if available
                    else "its store has no validation split; prepare it with a --validation_fraction"
                )
                lines.append(f"no sequence of source {label} is evaluated: {reason}")
        return lines

    def _batch_sums(self, batch: Batch) -> torch.Tensor | None:
        """Sums of a batch, float64 [4], or [4 + 4K] for K > 1 sources; None if another stage has the losses.

        The four sums are the loss of all loss tokens, the number of loss tokens, the loss of the text's
        tokens, and the text's UTF-8 bytes. With K > 1 sources, the four sums of each source follow.
        """
        losses = self.forward(batch.to(self.ranks.device)).token_losses
        if losses is None:
            return None
        bytes_of_labels = self.token_bytes[batch.labels.clamp(min=0)] * batch.loss_mask
        is_text = (bytes_of_labels > 0).to(losses.device)
        losses = losses.double()
        text_losses = losses * is_text
        counts = torch.tensor([batch.num_loss_tokens, int(bytes_of_labels.sum())], dtype=torch.float64)
        sums = torch.stack([losses.sum(), text_losses.sum()]).cpu()
        whole = torch.stack([sums[0], counts[0], sums[1], counts[1]])
        if not self.labels:
            return whole
        assert batch.sources is not None, "the batch of a mixture has no sources"
        parts = (losses, batch.loss_mask, text_losses, bytes_of_labels)
        rows = torch.stack([part.sum(1).double().cpu() for part in parts], dim=1)
        by_source = torch.zeros((len(self.labels), 4), dtype=torch.float64)
        return torch.cat([whole, by_source.index_add_(0, batch.sources, rows).flatten()])

    def _metrics(self, sums: list[float]) -> dict[str, float | None]:
        """The metrics of all sources together, then of each, from the sums of `_batch_sums`."""
        metrics: dict[str, float | None] = dict(_metrics_of_sums(sums[:4]))
        for number, label in enumerate(self.labels, start=1):
            own = _metrics_of_sums(sums[4 * number : 4 * number + 4])
            for name in ("loss", "bits_per_byte"):
                metrics[f"eval/source/{label}/{name}"] = own.get(f"eval/{name}")
        return metrics


def zlib_bits_per_byte(stores: Sequence[TokenStore]) -> float | None:
    """Bits per byte of the stores' validation text compressed by zlib level 9; None without text."""
    measured = [
        (store.zlib_bits_per_byte, store.split("validation").text_bytes)
        for store in stores
        if store.zlib_bits_per_byte is not None
    ]
    total = sum(size for _, size in measured)
    return sum(bits * size for bits, size in measured) / total if total else None


def _metrics_of_sums(sums: list[float]) -> dict[str, float]:
    """Loss, perplexity and bits per byte from sums of `_batch_sums`; without tokens a metric is left out."""
    loss_sum, tokens, text_loss_sum, text_bytes = sums
    if not tokens:
        return {}
    loss = loss_sum / tokens
    metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    if text_bytes:
        metrics["eval/bits_per_byte"] = text_loss_sum / (math.log(2) * text_bytes)
    return metrics


class PredictedCurve:
    """Compares evaluations with the configuration's prediction."""

    def __init__(self, config: Config):
        self.config, self._side = config, "inside"

    def metrics(self, step: int, loss: float | None, console: Console) -> dict[str, float]:
        """`eval/predicted_…` after a step; prints a warning when the loss leaves the predicted interval.

        Empty outside the prediction's steps, and without a loss.
        """
        expected = self.config.evaluation.predicted(step)
        if expected is None or loss is None:
            return {}
        low, high = expected.low, expected.high
        side = "inside" if low <= loss <= high else "below" if loss < low else "above"  # NaN: above
        if side not in ("inside", self._side):
            console.warning(
                f"step {step}: evaluation loss {loss:.4f} is {side} the predicted {low:.4f} to {high:.4f}"
            )
        self._side = side
        names = ("eval/predicted_loss", "eval/predicted_low", "eval/predicted_high")
        return dict(zip(names, expected.losses, strict=True))


TEMPERATURE, TOP_K = 0.8, 50
"""Sampling options of generated samples."""
_SHOWN = 100
"""Characters of a prompt or sample that the console shows."""


class Samples:
    """Writes samples.jsonl: rows of `step`, `prompt` and `text`, the continuation without the prompt.

    A resumed run writes the rows of a repeated step again; the later rows are the valid ones.

    Args:
        config: Has the prompts and the number of tokens.
        folder: The run's folder.
        store: Has the tokenizer.
        is_collective: Whether a forward pass is a collective; all ranks then make the same number of passes.

    Raises:
        DataError: there are prompts, and the tokenizer cannot be opened.
    """

    def __init__(self, config: Config, folder: RunFolder, store: TokenStore, *, is_collective: bool = False):
        self.is_collective = is_collective
        self.config, self.folder = config, folder
        self.prompts = config.evaluation.sample_prompts
        self.tokenizer = open_tokenizer(store.tokenizer_folder) if self.prompts else None

    def write(self, model: Decoder, step: int, console: Console, *, rank: int = 0) -> None:
        """Continue every prompt; rank 0 appends the rows and prints the first one.

        A file that cannot be written is a warning and does not end the training.
        """
        if self.tokenizer is None:
            return
        texts = self._continuations(model, self.tokenizer)
        if rank:
            return
        try:
            self.folder.check()
            with MetricsWriter(self.folder.samples) as writer:
                for prompt, text in zip(self.prompts, texts, strict=True):
                    writer.append({"step": step, "prompt": prompt, "text": text})
        except (OSError, OutputError) as error:
            console.warning(str(error))
        console.info(f"sample: {_shown(self.prompts[0])} -> {_shown(texts[0])}")

    def _continuations(self, model: Decoder, tokenizer: Tokenizer) -> list[str]:
        from llm_pretrain.model import generation  # most runs print no samples

        texts, was_training = [""] * len(self.prompts), model.training
        # a sharded strategy that gathers parameters in low precision also multiplies in low precision
        precision = self.config.training.precision if self.is_collective else "fp32"
        low = autocast(next(model.parameters()).device.type, precision)
        model.eval()
        try:
            with torch.no_grad(), eagerly(model), low:
                for row, text, _ in generation.generate_texts(
                    model,
                    self._prompt_ids(model, tokenizer),
                    tokenizer.token_pieces(),
                    max_new_tokens=self.config.evaluation.sample_tokens,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    seed=self.config.run.seed,
                    stop_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
                    lockstep=self.is_collective,
                ):
                    heartbeat()
                    texts[row] += text
        finally:
            model.train(was_training)
        return texts

    def _prompt_ids(self, model: Decoder, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each prompt, after the token that starts a document; long prompts are truncated on the
        left."""
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        first = [] if start is None else [start]
        room = model.config.longest_sequence - self.config.evaluation.sample_tokens - len(first)
        return [first + ids[max(0, len(ids) - room) :] for ids in tokenizer.encode(self.prompts)]


def _shown(text: str) -> str:
    """The text on one line, shortened."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
