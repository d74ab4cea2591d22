"""The sequences that a run read at one step: their documents, and their losses before the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from llm_pretrain.audit.checks import Check
from llm_pretrain.audit.data_checks import AttemptSamples, compare_row, intervals
from llm_pretrain.audit.history_checks import RunFiles, read_config, read_history
from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.data.assembly import PackedSource
from llm_pretrain.data.inspection import SamplePart, decoded_parts
from llm_pretrain.data.loader import MicroBatches
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.runs.attempts import owner_of
from llm_pretrain.runs.record import check_run_folder

OUTLYING = 6.0
"""A sequence stands out if its loss exceeds the median by so many median absolute deviations."""


@dataclass(frozen=True)
class SequencePiece:
    """Tokens `start` to `start + tokens` of a training document, in masked and unmasked parts."""

    document: int
    start: int
    tokens: int
    parts: tuple[SamplePart, ...]


@dataclass(frozen=True)
class StepSequence:
    """A sequence of a step's global batch: `slot` from 0, label of its `source`, and its documents.

    `loss` is the mean cross-entropy of its targets under the newest checkpoint before the step, `loss_step`
    that checkpoint's step; both are None where no loss was asked for, and `loss` also without a target.
    """

    slot: int
    source: str
    pieces: tuple[SequencePiece, ...]
    loss: float | None = None
    loss_step: int | None = None
    stands_out: bool = False


def sequences_of_step(folder: Path, step: int, *, with_loss: bool = False) -> list[StepSequence]:
    """The sequences of a step, in the order of the global batch, which the row's digest confirms.

    Args:
        folder: The run's folder; its stores must be where they were.
        step: From 1 to the run's last row.
        with_loss: Whether to compute the losses, on the CPU.

    Raises:
        ConfigError: There is no such step, no run, or no checkpoint before the step.
        CheckpointError: The stores do not give the batches that the run has trained on.
    """
    check_run_folder(folder)
    run, check = RunFiles(folder), Check("samples")
    read_config(check, run)
    read_history(check, run)
    rows = [each for each in intervals(run) if each[1] is not None and each[1] < step <= each[3]["step"]]
    if not rows:
        raise ConfigError(f"--step: expected a step from 1 to {max(run.rows, default=0)}, found {step}")
    samples, check = AttemptSamples(run.config), Check("samples")
    attempt, first, before, row = rows[0]
    assert first is not None
    compare_row(check, samples, attempt, first, before, row)
    if check.problems:
        raise CheckpointError(check.problems[0])
    data = samples.of(owner_of(step, run.attempts))
    size = run.config.training.global_batch_size
    numbers = range((step - 1) * size, step * size)
    labels, sources = [source.label for source in run.config.data.sources], data.assembler.sources
    sequences = [
        StepSequence(slot, labels[source], tuple(_pieces(sources[source], sequence)))
        for slot, (source, sequence) in enumerate(data.order.drawn(numbers))
    ]
    return _with_losses(run, data, numbers, sequences) if with_loss else sequences


def _pieces(source: PackedSource, sequence: int) -> Iterator[SequencePiece]:
    split, index, tokenizer = source.store.split(source.split), source.index, source.store.tokenizer()
    for place in range(int(index.sequence_offsets[sequence]), int(index.sequence_offsets[sequence + 1])):
        start, length = (
            int(index.piece_start[place]),
            int(index.piece_length[place]) + 1,
        )  # with its last label
        document = int(np.searchsorted(split.offsets, start, side="right")) - 1
        parts = decoded_parts(
            tokenizer, split.tokens_at(start, start + length), split.mask_at(start, start + length)
        )
        yield SequencePiece(document, start - int(split.offsets[document]), length, tuple(parts))


def _with_losses(
    run: RunFiles, data: MicroBatches, numbers: range, sequences: list[StepSequence]
) -> list[StepSequence]:
    import torch

    from llm_pretrain.checkpoints.opening import open_model
    from llm_pretrain.model.kernels import autocast

    training, step = run.config.training, numbers.stop // len(sequences)
    saved = committed_folders(run.folder / "weights") | committed_folders(run.folder / "checkpoints")
    steps = [each for each in sorted(saved) if each < step]
    if not steps:
        found = ", ".join(map(str, sorted(saved))) or "none"
        raise ConfigError(
            f"--loss: expected a checkpoint or weights before step {step}, found {found}; keep more of them "
            "(checkpoint.keep_last)"
        )
    model, losses = open_model(saved[steps[-1]], average=False).model.eval(), list[float | None]()
    for start in range(0, len(numbers), training.micro_batch_size):
        batch = data.__getitems__(numbers[start : start + training.micro_batch_size])
        with torch.no_grad(), autocast("cpu", training.precision):
            token_losses = model(**batch.model_inputs()).token_losses
        targets = batch.loss_mask.sum(1)
        sums = token_losses.double().sum(1) / targets.clamp(min=1)
        losses += [
            mean if count else None for mean, count in zip(sums.tolist(), targets.tolist(), strict=True)
        ]
    known = [loss for loss in losses if loss is not None]
    middle = median(known) if known else 0.0
    spread = median(abs(loss - middle) for loss in known) if known else 0.0
    return [
        replace(
            sequence,
            loss=loss,
            loss_step=steps[-1],
            stands_out=loss is not None and loss > middle + OUTLYING * spread > middle,
        )
        for sequence, loss in zip(sequences, losses, strict=True)
    ]
