"""One optimizer step: its objective, its sums, and everything else that is known of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.distributed.collectives import Ranks
from llm_pretrain.model.decoder import DecoderOutput


class Objective:
    """The objective of one micro batch, or of this rank's part of one.

    With W ranks, A micro batches per rank and step, and N loss tokens in the global batch, it is

        (W*A/N) * [ sum m*(CE + c_z*lse^2) + c_aux * sum_i n_i * mean_l bal(i,l)
                    + c_rz * mean_l sum m*lse(router)^2 ]

    The factor W*A cancels DDP's mean over W ranks and the engine's division by A. So the micro batches of a
    step add up to exactly the objective over N tokens. FSDP here adds the ranks' gradients, and W is then 1.

    Args:
        config: Has the coefficients.
        world_size: Ranks of the run.
    """

    def __init__(self, config: Config, world_size: int):
        ranks_averaged = world_size if config.distributed.strategy != "fsdp" else 1
        # the engine divides by A, as Accelerate does by itself
        self.factor = ranks_averaged * config.gradient_accumulation_steps(world_size)
        self.z_loss_coef = config.training.z_loss_coef
        self.router_aux_loss_coef = config.model.router_aux_loss_coef
        self.router_z_loss_coef = config.model.router_z_loss_coef
        self.is_moe = bool(config.model.moe_layers)

    def __call__(self, output: DecoderOutput, num_loss_tokens: int) -> Tensor:
        """The scaled objective of a micro batch, 0-dim; `num_loss_tokens` is N, over all ranks."""
        total, z_loss, aux_loss, router_z_loss = loss_sums(output)
        if self.z_loss_coef:
            total = total + self.z_loss_coef * z_loss
        if self.is_moe and self.router_aux_loss_coef:
            total = total + self.router_aux_loss_coef * aux_loss
        if self.is_moe and self.router_z_loss_coef:
            total = total + self.router_z_loss_coef * router_z_loss
        return total * (self.factor / num_loss_tokens)


_LOSSES = 4
"""Cross-entropy, z-loss, auxiliary loss, router z-loss."""


class StepSums:
    """Sums over a step's micro batches, and over ranks after `reduce`.

    Args:
        config: The run's: L layers of E experts, K data sources.
        device: Device of the vector.
    """

    def __init__(self, config: Config, device: torch.device):
        self.layers, self.experts = len(config.model.moe_layers), config.model.num_experts
        self.sources, self.device = len(config.data.sources), device
        self.vector: Tensor | None = None
        """float64 [4 + L + L*E + 2K]: losses, router entropies, expert counts and, for K > 1, losses and loss
        tokens of the sources; None before the first micro batch."""

    def add(self, output: DecoderOutput, batch: Batch) -> None:
        """Add one micro batch's sums, on the device."""
        parts = [torch.stack(loss_sums(output)).detach().double()]
        if output.expert_counts.numel():
            parts += [output.router_entropy_sum.double(), output.expert_counts.double().flatten()]
        if self.sources > 1:
            parts.append(source_sums(output, batch, self.sources).flatten())
        sums = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.vector = sums if self.vector is None else self.vector + sums

    def reduce(self, ranks: Ranks) -> Tensor:
        """The vector summed over ranks, in one all-reduce; a rank without the last stage adds zeros."""
        if self.vector is None:
            size = _LOSSES + self.layers * (1 + self.experts) + (2 * self.sources if self.sources > 1 else 0)
            self.vector = torch.zeros(size, dtype=torch.float64, device=self.device)
        self.vector = ranks.reduce_sum(self.vector)
        return self.vector

    @property
    def losses(self) -> Tensor:
        """Cross-entropy, z-loss, auxiliary loss and router z-loss [4], without their coefficients."""
        return self._part(0, _LOSSES)

    @property
    def router_entropies(self) -> Tensor:
        """Entropy of each layer's routing [L]."""
        return self._part(_LOSSES, self.layers)

    @property
    def expert_counts(self) -> Tensor:
        """Tokens of each expert, int64 [L, E]."""
        counts = self._part(_LOSSES + self.layers, self.layers * self.experts)
        return counts.reshape(self.layers, self.experts).round().long()

    @property
    def by_source(self) -> Tensor:
        """Cross-entropy and loss tokens of each source [2, K], for K > 1."""
        assert self.vector is not None
        return self.vector[-2 * self.sources :].reshape(2, self.sources)

    def _part(self, first: int, size: int) -> Tensor:
        assert self.vector is not None, "no micro batch was added"
        return self.vector[first : first + size]


def loss_sums(output: DecoderOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over loss tokens of cross-entropy, z-loss, auxiliary loss and router z-loss, each 0-dim."""
    assert output.loss_sum is not None, "the forward pass had no labels"
    sums = output.loss_sum, output.z_loss_sum, output.aux_loss_sum, output.router_z_loss_sum
    return sums  # type: ignore[return-value]  # either all four are None or none is


def source_sums(output: DecoderOutput, batch: Batch, num_sources: int) -> Tensor:
    """Cross-entropy sum and number of loss tokens of each source's sequences, float64 [2, K].

    `where` instead of a product keeps a non-finite loss of one source out of the others; a sum instead of
    `index_add` has a fixed order on a GPU.
    """
    assert output.token_losses is not None, "the forward pass had no labels"
    assert batch.sources is not None, "the batch of a mixture has no sources"
    numbers = torch.arange(num_sources, device=batch.sources.device)
    is_of_source = (batch.sources[:, None] == numbers).to(output.token_losses.device)
    per_sequence = torch.stack([output.token_losses.double().sum(1), batch.loss_mask.double().sum(1)])
    return torch.where(is_of_source, per_sequence[:, :, None], 0.0).sum(1)


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above those of the steps before.

    Args:
        kind: `loss`, `grad_norm` or `loss+grad_norm`; the row's `train/spike`.
        text: The numbers, for a warning.
        skipped: The row's `train/skipped`; None if the spike is only logged.
    """

    kind: str
    text: str
    skipped: str | None


class StepEngine(Ranks, Protocol):
    """What a step asks of its engine."""

    config: Config
    objective: Objective

    def forward(self, batch: Batch) -> DecoderOutput:
        """Run the wrapped model in the configured precision, with dropout seeded by the batch's position."""
        ...


@dataclass(eq=False)
class Step:
    """One optimizer step, the same on every rank once `may_update` has decided.

    Args:
        micro_batches: This rank's; emptied after the computation, since a step may wait to be recorded.
        num_loss_tokens: N, loss tokens of the global batch.
        digest: Sums of each of the eight 32-bit words of the global batch's sample digests.
        sums: Over micro batches, then over ranks.
        engine: The engine that computes the step.
        decide: Whether to apply the step, the same on every rank; called with global sums and gradient norm.
        before_clipping: Called before gradients are clipped.
        grad_norm: Global gradient norm before clipping; None if it is not finite.
        loss: Cross-entropy per loss token, the row's `train/loss`; None if the step's numbers are not finite.
        skipped: Why the parameters were not updated: `no_loss_tokens`, `overflow` (fp16),
            `nonfinite_gradient`, `nonfinite_loss`, `spike` or `rollback`; None if the step was applied.
        spike: The detected spike; None without one.
        check: Result of computing the step twice: `passed`, or `transient` if something differed only once.
        found_inf: float32, 0-dim, on the device: 1 if the step must be skipped, else 0. Set only while the
            decision stays on the device: then `grad_norm` is a tensor, and `loss`, `skipped` and `spike` are
            undecided.
        number: Steps of the run, this one included.
        tokens_seen: Loss tokens of the run, this step's included.
        learning_rate: Rate of this step.
        seconds: Wall time of this step in the loop.
    """

    micro_batches: Sequence[Batch]
    num_loss_tokens: int
    digest: list[int]
    sums: StepSums
    engine: StepEngine
    decide: Callable[[Step], bool]
    before_clipping: Callable[[Step], None] | None = None
    grad_norm: Tensor | float | None = None
    loss: float | None = None
    skipped: str | None = None
    spike: Spike | None = None
    check: str | None = None
    found_inf: Tensor | None = None
    number: int = 0
    tokens_seen: int = 0
    learning_rate: float = 0.0
    seconds: float = 0.0

    @classmethod
    def begin(
        cls,
        micro_batches: Sequence[Batch],
        engine: StepEngine,
        decide: Callable[[Step], bool],
        before_clipping: Callable[[Step], None] | None = None,
    ) -> Step:
        """Count the global batch: its loss tokens, its sample digests and, if the balance loss covers the
        global batch, the tokens of each expert. Without loss tokens the step is skipped."""
        counts = [[batch.num_loss_tokens, *batch.digest.tolist()] for batch in micro_batches]
        num_loss_tokens, *digest = engine.sum_integers([sum(column) for column in zip(*counts, strict=True)])
        sums = StepSums(engine.config, engine.device)
        step = cls(micro_batches, num_loss_tokens, digest, sums, engine, decide, before_clipping)
        if num_loss_tokens == 0:
            step.skipped = "no_loss_tokens"
        else:
            step.micro_batches = attach_global_expert_counts(engine, micro_batches)
        return step

    def add(self, output: DecoderOutput, batch: Batch) -> Tensor:
        """Add one micro batch's sums; returns its part of the objective, 0-dim."""
        self.sums.add(output, batch)
        return self.engine.objective(output, self.num_loss_tokens)

    def clip(self, clip_grad_norm: Callable[..., Any], parameters: Sequence[Tensor], max_norm: float) -> Any:
        """Clip the gradients; returns their norm before clipping, under FSDP a DTensor with partial sums."""
        if self.before_clipping is not None:
            self.before_clipping(self)
        return clip_grad_norm(parameters, max_norm)

    def may_update(self, grad_norm: Tensor | float) -> bool:
        """Whether the optimizer may step, the same on every rank; call it after `add` of every micro batch.

        Collective: adds the sums over the ranks. Fills in the gradient norm; `decide` fills in loss and skip
        reason. Returns True if the decision stays on the device; the optimizer then reads `found_inf`.
        """
        full_tensor = getattr(grad_norm, "full_tensor", None)
        norm: Any = full_tensor() if full_tensor else grad_norm
        sums = self.sums.reduce(self.engine)
        self.grad_norm = torch.as_tensor(norm, dtype=sums.dtype, device=sums.device)
        return self.decide(self)

    def numbers(self) -> Tensor:
        """The gradient norm, then the sums, as one float64 vector on their device."""
        assert self.sums.vector is not None
        assert isinstance(self.grad_norm, Tensor)
        return torch.cat([self.grad_norm.reshape(1), self.sums.vector])


def attach_global_expert_counts(engine: StepEngine, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    """The step's micro batches, with the global batch's expert counts if the balance loss needs them.

    Only `router_aux_loss_scope: global_batch` needs them. A counting pass without gradients has the dropout,
    precision and mode of the training pass, so that it routes every token as training will. One integer
    all-reduce follows. If one micro batch is the whole global batch, its own forward pass counts, without a
    counting pass. Every rank makes the same number of forward passes, as sharded strategies require.
    """
    model = engine.config.model
    is_needed = (
        model.router_aux_loss_scope == "global_batch"
        and model.router_aux_loss_coef > 0
        and bool(model.moe_layers)
    )
    if not is_needed or engine.world_size * len(micro_batches) == 1:
        return micro_batches
    counts = torch.zeros((), dtype=torch.int64, device=engine.device)
    with torch.no_grad():
        for batch in micro_batches:
            counts = counts + engine.forward(batch).expert_counts
    total = engine.reduce_sum(counts)
    return [replace(batch, global_expert_counts=total) for batch in micro_batches]
