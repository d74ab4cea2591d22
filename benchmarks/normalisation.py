"""What other ways of normalising do to gradients, against the float64 gradient of the whole global batch.

First the cross-entropy: the mean of micro-batch means and the mean of per-rank token means, against the mean
over all loss tokens that training computes. Then the balance loss of a mixture of experts: shares per micro
batch, synchronised per micro batch, accumulated over the window so far, against those of the whole global
batch. Last, what these cost: a step with scope `global_batch` over one with `sequence`, by CPU time.

The ranks and micro batches of one step are computed one after the other in this process; what data
parallelism and accumulation add up is written out. Text is synthetic: sequences of several topics, each a
Markov chain of its own, on which a model is trained for a few steps, so that there is something to balance.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Spread, goal
from benchmarks.normalisation_batches import (
    LENGTH,
    SEQUENCES,
    SETTINGS,
    VOCABULARY,
    loss_mask,
    micro_batches,
    text,
)
from llm_pretrain.config import Config, ModelConfig, OptimizerConfig, TrainingConfig
from llm_pretrain.data import Batch
from llm_pretrain.model import Decoder, DecoderOutput
from llm_pretrain.optim.param_groups import build_optimizer
from llm_pretrain.training import Objective, attach_global_expert_counts, initialize_weights

GOAL_ERROR = 1e-6
LAYOUTS = ((1, 2), (2, 4), (4, 4))
"""(W, A) of one global batch of 16 sequences; the first table's is (2, 4)."""

MEAN_OF_MEANS, RANK_MEANS = "mean of micro-batch means", "mean of per-rank token means"
OURS, OURS_EXACT = "mean over all loss tokens (ours), fp32", "the same in fp64"
PER_MICRO_BATCH, SYNCED = "shares of the micro batch", "shares of the ranks' micro batches"
RUNNING, GLOBAL = "shares of the window so far", "shares of the global batch (ours), fp32"
GLOBAL_EXACT, PER_SEQUENCE = "the same in fp64", "per sequence (the default: another loss)"

Gradients = dict[str, Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--training_steps", type=int, default=40, help="of the model, at first")
    parser.add_argument("--pairs", type=int, default=5, help="of steps whose time is compared")


def config_of(world_size: int, accumulation: int) -> Config:
    """A small mixture of experts, and 16 sequences per step split over W ranks and A micro batches."""
    model = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        router_aux_loss_coef=0.01,
        router_aux_loss_scope="global_batch",
        initializer_range=0.05,
    )
    training = TrainingConfig(
        sequence_length=LENGTH,
        micro_batch_size=SEQUENCES // (world_size * accumulation),
        global_batch_size=SEQUENCES,
    )
    return Config(model=model, training=training, optimizer=OptimizerConfig(learning_rate=3e-3))


class AllRanks:
    """Stands for the engines of all ranks: their micro batches go through one model, one after the other."""

    def __init__(self, model: Decoder, config: Config, world_size: int):
        self.model, self.config, self.world_size = model, config, world_size
        self.device = torch.device("cpu")

    def forward(self, batch: Batch) -> DecoderOutput:
        """The model in the precision of its parameters."""
        return self.model(**batch.model_inputs())

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks has already been taken: all micro batches were seen."""
        return tensor


def trained_model(steps: int) -> Decoder:
    """A model after a few steps on full sequences, without any balance loss."""
    config = config_of(1, 1)
    model = Decoder(config.model)
    initialize_weights(model, seed=0)
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    full = torch.ones((SEQUENCES, LENGTH), dtype=torch.bool)
    for step in range(steps):
        (batch,) = micro_batches(text(SEQUENCES, seed=1000 + step), full, SEQUENCES)
        output = model(**batch.model_inputs())
        (output.loss_sum / batch.num_loss_tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def gradients(model: Decoder, losses: Callable[[], Sequence[Tensor]], part: str = "") -> Gradients:
    """Gradients of a sum of losses, of parameters whose name contains `part`."""
    for loss in losses():
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if part in name and p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference over the expected norm."""
    difference, whole = (
        torch.cat([each.double().flatten() for each in vectors]).norm()
        for vectors in ([found[name] - expected[name] for name in expected], list(expected.values()))
    )
    return float(difference / whole)


def token_mean_errors(model: Decoder, setting: str, seed: int = 1) -> dict[str, float]:
    """Each formula's error of the cross-entropy's gradient, for W = 2 and A = 4."""
    world_size, accumulation = LAYOUTS[1]
    tokens, mask = text(SEQUENCES, seed), loss_mask(setting, seed)
    double = copy.deepcopy(model).double()
    (whole,) = micro_batches(tokens, mask, SEQUENCES)
    expected = gradients(double, lambda: [loss_sum(double, whole) / whole.num_loss_tokens])
    batches = micro_batches(tokens, mask, SEQUENCES // (world_size * accumulation))
    of_rank = [
        sum(batch.num_loss_tokens for batch in batches[rank::world_size]) for rank in range(world_size)
    ]

    def mean_of_means() -> list[Tensor]:
        means = (loss_sum(model, batch) / max(batch.num_loss_tokens, 1) for batch in batches)
        return [mean / accumulation / world_size for mean in means]

    def rank_means() -> list[Tensor]:
        sums = (loss_sum(model, batch) for batch in batches)
        return [each / of_rank[number % world_size] / world_size for number, each in enumerate(sums)]

    def ours(model: Decoder) -> list[Tensor]:
        config = config_of(world_size, accumulation)
        config = replace(config, model=replace(config.model, router_aux_loss_coef=0.0))
        objective = Objective(config, world_size)
        total = sum(batch.num_loss_tokens for batch in batches)
        terms = (objective(model(**batch.model_inputs()), total) for batch in batches)
        return [term / accumulation / world_size for term in terms]

    return {
        MEAN_OF_MEANS: error(gradients(model, mean_of_means), expected),
        RANK_MEANS: error(gradients(model, rank_means), expected),
        OURS: error(gradients(model, lambda: ours(model)), expected),
        OURS_EXACT: error(gradients(double, lambda: ours(double)), expected),
    }


def router_errors(
    model: Decoder, setting: str, world_size: int, accumulation: int, seed: int = 1
) -> dict[str, float]:
    """Each formula's error of the balance loss's gradient on the routers, against the global batch's."""
    config = config_of(world_size, accumulation)
    tokens, mask = text(SEQUENCES, seed), loss_mask(setting, seed)
    double = copy.deepcopy(model).double()
    (whole,) = micro_batches(tokens, mask, SEQUENCES)
    total = whole.num_loss_tokens
    expected = gradients(double, lambda: [balance(double, whole) / total], "gate.weight")
    batches = micro_batches(tokens, mask, config.training.micro_batch_size)
    with torch.no_grad():
        counts = [model(**batch.model_inputs()).expert_counts for batch in batches]

    def window(number: int) -> slice:
        """The micro batches that the ranks work on together with this one."""
        first = number // world_size * world_size
        return slice(first, first + world_size)

    def shares_of(chosen: Callable[[int], slice]) -> list[Tensor]:
        """Each micro batch's loss with its own mean probabilities and the counts of chosen micro batches."""
        losses = []
        for number, batch in enumerate(batches):
            seen = torch.stack(counts[chosen(number)]).sum(0)
            own = balance(model, replace(batch, global_expert_counts=seen))
            losses.append(own / max(batch.num_loss_tokens, 1) / len(batches))
        return losses

    def ours(model: Decoder) -> list[Tensor]:
        engine: Any = AllRanks(model, config, world_size)
        counted = attach_global_expert_counts(engine, batches)
        return [balance(model, batch) / total for batch in counted]

    def per_sequence() -> list[Tensor]:
        singles = micro_batches(tokens, mask, 1)  # scope `sequence` at any layout: n_i · bal(i) / N
        return [balance(model, batch) / total for batch in singles]

    losses = {
        PER_MICRO_BATCH: lambda: shares_of(lambda number: slice(number, number + 1)),
        SYNCED: lambda: shares_of(window),
        RUNNING: lambda: shares_of(lambda number: slice(0, window(number).stop)),
        PER_SEQUENCE: per_sequence,
        GLOBAL: lambda: ours(model),
    }
    found = {name: error(gradients(model, each, "gate.weight"), expected) for name, each in losses.items()}
    found[GLOBAL_EXACT] = error(gradients(double, lambda: ours(double), "gate.weight"), expected)
    return found


def loss_sum(model: Decoder, batch: Batch) -> Tensor:
    """Σ m · CE of a micro batch."""
    return model(**batch.model_inputs()).loss_sum


def balance(model: Decoder, batch: Batch) -> Tensor:
    """The balance loss's sum over a micro batch: with its own shares where it carries no others."""
    return model(**batch.model_inputs()).aux_loss_sum


def cost(pairs: int) -> tuple[Spread, Spread]:
    """Ratio of a step with scope `global_batch` to one with `sequence`, and the latter's seconds.

    Two micro batches of the shape of `quickstart`'s model.
    """
    base = Config(
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_experts=8,
            moe_intermediate_size=256,
        ),
        training=TrainingConfig(sequence_length=LENGTH, micro_batch_size=16, global_batch_size=32),
    )
    sides: list[tuple[Config, AllRanks, torch.optim.Optimizer]] = []
    for scope in ("sequence", "global_batch"):
        config = replace(base, model=replace(base.model, router_aux_loss_scope=scope))
        model = Decoder(config.model)
        initialize_weights(model, seed=0)
        sides.append(
            (
                config,
                AllRanks(model, config, 1),
                build_optimizer(model, config.optimizer, config.training.precision),
            )
        )
    full = torch.ones((2 * SEQUENCES, LENGTH), dtype=torch.bool)
    batches = micro_batches(text(2 * SEQUENCES, seed=1), full, SEQUENCES)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for side in (0, 1) if pair % 2 else (1, 0):
            config, engine, optimizer = sides[side]
            seconds = timed_step(config, engine, optimizer, batches)
            if pair:
                times[side].append(seconds)
    return Spread.of(one / other for other, one in zip(*times, strict=True)), Spread.of(times[0])


def timed_step(
    config: Config, engine: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> float:
    """CPU seconds of one optimizer step."""
    start = time.process_time()
    objective, total = Objective(config, 1), sum(batch.num_loss_tokens for batch in batches)
    for batch in attach_global_expert_counts(engine, batches):
        (objective(engine.forward(batch), total) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.process_time() - start


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    model = trained_model(arguments.training_steps)
    columns = {setting: token_mean_errors(model, setting) for setting in SETTINGS}
    _table("relative error of the gradient, cross-entropy; W=2, A=4, B=2", columns)
    worst = max(column[OURS] for column in columns.values())
    for setting in SETTINGS:
        columns = {
            f"W={world_size}, A={accumulation}": router_errors(model, setting, world_size, accumulation)
            for world_size, accumulation in LAYOUTS
        }
        _table(f"relative error of the routers' gradient, balance loss; {setting}", columns)
        worst = max(worst, *(column[GLOBAL] for column in columns.values()))
    print(goal(f"ours at most {GOAL_ERROR:g} from float64 in every column", worst <= GOAL_ERROR))
    ratio, seconds = cost(arguments.pairs)
    print(f"a step with scope global_batch / sequence  {ratio.text()} of {seconds.text('s')}")


def _table(title: str, columns: dict[str, dict[str, float]]) -> None:
    """Print one line per formula and one column per setting."""
    rows = list(next(iter(columns.values())))
    print(f"\n{title}\n{'':<44}" + "".join(f"{name:>22}" for name in columns))
    for row in rows:
        print(f"  {row:<42}" + "".join(f"{_figure(column[row]):>22}" for column in columns.values()))


def _figure(value: float) -> str:
    return f"{value:.1%}" if value > 1e-3 else f"{value:.1e}"
