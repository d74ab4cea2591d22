"""Evaluation on the validation split: loss, perplexity, bits per byte.

The same batches are evaluated whatever the world size, and their sums are added in one order, so the
result does not depend on how many processes shared the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from llm_pretrain.data import Batch, EvaluationBatches, TokenStore
from llm_pretrain.training.agreement import on_any_rank
from llm_pretrain.training.compiling import eagerly
from llm_pretrain.training.engine import Engine, empty_batch
from llm_pretrain.training.watchdog import beat


class Evaluator:
    """Evaluates the engine's model on a fixed sequence of batches.

    Args:
        engine: Whose `forward` is used, each rank taking every W-th batch.
        batches: The validation batches, the same on every rank.
        store: Whose tokenizer says how many UTF-8 bytes each token stands for.
        stop_requested: Checked between batches; a rank that was asked to stop gives up.
        labels: Names of the sources; with more than one, each gets metrics of its own.
        together: A forward pass is a collective: a rank that has no batch left computes an empty one, and
            ranks give up together.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Sequence[Batch],
        store: TokenStore,
        stop_requested: Callable[[], bool],
        labels: Sequence[str] = (),
        together: bool = False,
    ):
        self.engine, self.batches, self.stop_requested = engine, batches, stop_requested
        self.together = together
        self.labels = list(labels) if len(labels) > 1 else []
        self.token_bytes = torch.from_numpy(np.asarray(store.token_bytes()))

    @torch.no_grad()
    def __call__(self) -> dict[str, float | None] | None:
        """The `eval/*` metrics, none without validation tokens; None when a rank gave up.

        Those of a source without validation tokens are None.
        """
        model, _ = self.engine.model_and_optimizer()
        was_training = model.training
        model.eval()
        sums: list[tuple[int, torch.Tensor]] | None = []
        with eagerly(model):
            for first in range(0, len(self.batches), self.engine.world_size):
                if self._gives_up():
                    sums = None
                    break
                beat()
                index = first + self.engine.rank
                if index < len(self.batches):
                    sums.append((index, self._batch_sums(self.batches[index])))
                elif self.together:
                    self.engine.forward(empty_batch(self.engine.device))
        model.train(was_training)
        gathered = self.engine.gather_objects(
            None if sums is None else [(index, values.tolist()) for index, values in sums]
        )
        if any(part is None for part in gathered):
            return None
        rows = [values for _, values in sorted(pair for part in gathered for pair in part)]
        return self._metrics([math.fsum(column) for column in zip(*rows, strict=True)]) if rows else {}

    def unseen_sources(self) -> list[str]:
        """One line for each source of which the evaluation sees nothing, or one for all."""
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
                lines.append(f"evaluation sees nothing of source {label}: {reason}")
        return lines

    def _gives_up(self) -> bool:
        if not self.together:
            return self.stop_requested()
        return on_any_rank(self.engine, self.stop_requested())[0]

    def _batch_sums(self, batch: Batch) -> torch.Tensor:
        """float64 [4]: loss over loss tokens, their number, loss over the text's tokens, its bytes.

        With several sources [4 + 4K], the same four of each source after those of all.
        """
        losses = self.engine.forward(batch.to(self.engine.device)).token_losses
        assert losses is not None, "a batch has labels"
        bytes_of_labels = self.token_bytes[batch.labels.clamp(min=0)] * batch.loss_mask
        is_text = (bytes_of_labels > 0).to(losses.device)
        losses = losses.double()
        text_losses = losses * is_text
        counts = torch.tensor([batch.num_loss_tokens, int(bytes_of_labels.sum())], dtype=torch.float64)
        sums = torch.stack([losses.sum(), text_losses.sum()]).cpu()
        whole = torch.stack([sums[0], counts[0], sums[1], counts[1]])
        if not self.labels:
            return whole
        assert batch.sources is not None, "a mixture's batch says where its sequences come from"
        parts = (losses, batch.loss_mask, text_losses, bytes_of_labels)
        rows = torch.stack([part.sum(1).double().cpu() for part in parts], dim=1)
        by_source = torch.zeros((len(self.labels), 4), dtype=torch.float64)
        return torch.cat([whole, by_source.index_add_(0, batch.sources, rows).flatten()])

    def _metrics(self, sums: list[float]) -> dict[str, float | None]:
        metrics: dict[str, float | None] = dict(_metrics(sums[:4]))
        for number, label in enumerate(self.labels, start=1):
            own = _metrics(sums[4 * number : 4 * number + 4])
            for name in ("loss", "bits_per_byte"):
                metrics[f"eval/source/{label}/{name}"] = own.get(f"eval/{name}")
        return metrics


def zlib_bits_per_byte(stores: Sequence[TokenStore]) -> float | None:
    """What zlib at level 9 needs for the validation text of all stores; None where there is no text."""
    measured = [
        (store.zlib_bits_per_byte, store.split("validation").text_bytes)
        for store in stores
        if store.zlib_bits_per_byte is not None
    ]
    total = sum(size for _, size in measured)
    return sum(bits * size for bits, size in measured) / total if total else None


def _metrics(sums: list[float]) -> dict[str, float]:
    loss_sum, tokens, text_loss_sum, text_bytes = sums
    if not tokens:
        return {}
    loss = loss_sum / tokens
    metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    if text_bytes:
        metrics["eval/bits_per_byte"] = text_loss_sum / (math.log(2) * text_bytes)
    return metrics
