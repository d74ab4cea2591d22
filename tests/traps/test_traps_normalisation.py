"""Traps of normalising and balancing: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

import pytest
from support import faults
from support.engines import accelerate_loader, run_engine
from support.faults import Fault
from support.rank_cases import WORLD_SIZE, Outcome
from support.stepping import Driven, masked, micro_batches_of, reference_gradients, relative_error

from llm_pretrain.config.tree import Config
from llm_pretrain.optim.schedule import learning_rate
from llm_pretrain.training.engine import DIGEST_WORDS


def check_gradients(launcher: str, config: Config, *mistakes: Fault, mask_one: bool = False) -> float:
    """The first step's gradients are those of the mean over all of its loss tokens; returns the error."""
    window = list(micro_batches_of(config, 0))
    if mask_one:
        window[1] = masked(window[1])
    expected = reference_gradients(config, window)
    driven = run_engine(launcher, config, *mistakes, windows=[window])
    assert driven.updates == [1], driven.skipped
    for part in ("", "mlp.gate"):
        error = relative_error(driven.gradients[0], expected, part)
        assert error < 1e-5, f"gradients of parameters {part!r} are off by {error:.1%}"
    return error


def check_one_update_per_window(driven: Driven, steps: int) -> None:
    """Every window of micro batches moves the parameters exactly once."""
    assert driven.updates == [1] * steps
    assert len(set(driven.hashes)) == steps


@pytest.fixture
def unclipped(config) -> Config:
    return config(training={"max_grad_norm": 0.0})


@pytest.mark.parametrize("mask_one", [False, True], ids=["ragged", "one micro batch without loss tokens"])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_objective_is_the_mean_over_tokens(launcher, unclipped, mask_one):
    tokens = [batch.num_loss_tokens for batch in micro_batches_of(unclipped, 0)]
    assert max(tokens) > 1.2 * min(tokens), "the corpus is too even to tell one mean from another"
    check_gradients(launcher, unclipped, mask_one=mask_one)
    with pytest.raises(AssertionError, match="are off by" if not mask_one else "nonfinite_gradient"):
        check_gradients(launcher, unclipped, faults.MEAN_OF_MEANS, mask_one=mask_one)


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        ("torchrun", faults.UNDIVIDED),
        ("accelerate", faults.DIVIDED_TWICE),
        ("torchrun", faults.LATE_AUX_LOSS),
        ("accelerate", faults.LATE_AUX_LOSS),
    ],
    ids=["undivided", "divided twice", "late auxiliary loss", "late auxiliary loss, accelerate"],
)
def test_other_objectives_are_seen(launcher, fault, unclipped):
    with pytest.raises(AssertionError, match="are off by"):
        check_gradients(launcher, unclipped, fault)


@pytest.mark.parametrize(
    "fault", [faults.COUNTS_APART, faults.COUNTS_SO_FAR], ids=["of each micro batch", "so far"]
)
def test_other_counts_are_seen(fault, config):
    """Of a balance loss over the whole global batch, which one process accumulates."""
    model = {"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0}
    balanced = config(model=model, training={"max_grad_norm": 0.0})
    check_gradients("torchrun", balanced)
    with pytest.raises(AssertionError, match="are off by"):
        check_gradients("torchrun", balanced, fault)


def test_one_window_is_one_update(config):
    steps = config().training.max_steps
    for launcher in ("torchrun", "accelerate"):
        check_one_update_per_window(run_engine(launcher, config()), steps)


@pytest.mark.parametrize(
    "fault",
    [faults.OWN_GATE, faults.NO_ACCUMULATE, faults.SYNC_WITH_LOADER],
    ids=["own gate", "no accumulate", "sync at the loader's end"],
)
def test_other_numbers_of_updates_are_seen(fault, config):
    driven = run_engine("accelerate", config(), fault)
    with pytest.raises(AssertionError):
        check_one_update_per_window(driven, config().training.max_steps)


def check_own_gradients(launcher: str, config: Config, *mistakes: Fault, tail: int = 0) -> None:
    """An update has the gradients of its own window, and nothing of the one before (nor of its tail)."""
    before, window = (list(micro_batches_of(config, step)) for step in (0, 1))
    windows = [before, before[:tail], window] if tail else [before, window]
    driven = run_engine(launcher, config, *mistakes, windows=windows)
    error = relative_error(driven.gradients[1], reference_gradients(config, window))
    assert error < 1e-5, f"gradients are off by {error:.1%}"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_an_update_has_its_own_window_s_gradients(launcher, config):
    still = config(training={"max_grad_norm": 0.0}, optimizer={"learning_rate": 0.0})
    check_own_gradients(launcher, still)
    with pytest.raises(AssertionError, match="are off by"):
        check_own_gradients(launcher, still, faults.KEPT_GRADIENTS)


def test_the_tail_of_an_unfinished_window_would_leak_into_the_next(config):
    """Hence whole windows only, which `check_samples` sees to."""
    still = config(training={"max_grad_norm": 0.0}, optimizer={"learning_rate": 0.0})
    with pytest.raises(AssertionError, match="are off by"):
        check_own_gradients("accelerate", still, tail=3)


def check_reductions(outcomes: list[Outcome], config: Config) -> None:
    """Gradients are reduced over ranks once per step, with the last micro batch."""
    per_step = config.gradient_accumulation_steps(WORLD_SIZE)
    for outcome in outcomes:
        assert outcome.error is None
        window = [False] * (per_step - 1) + [True]
        assert outcome.reductions == [True] + window * config.training.max_steps


def test_gradients_are_reduced_once_per_step(ranks, rank_config):
    for case in ("torchrun fp32", "accelerate fp32"):
        check_reductions(ranks[case], rank_config(case))
    for case in ("every micro batch reduced", "no accumulate"):
        with pytest.raises(AssertionError):
            check_reductions(ranks[case], rank_config(case))


def check_sums(outcomes: list[Outcome], config: Config) -> None:
    """A step sums over ranks its counts, every gradient once, its losses; the empty first one gradients."""
    for outcome in outcomes:
        assert outcome.error is None
        gradients = sum(parameter.numel() for parameter in outcome.driven.parameters.values())
        assert outcome.sums[:1] == [gradients]
        steps = [outcome.sums[first : first + 3] for first in range(1, len(outcome.sums), 3)]
        assert len(steps) == config.training.max_steps
        assert all(step[:2] == [1 + DIGEST_WORDS, gradients] for step in steps)


def test_every_gradient_crosses_the_wire_once_per_step(ranks, rank_config):
    for launcher in ("torchrun", "accelerate"):
        for case in (f"{launcher} counted", f"{launcher} counted, one micro batch"):
            check_sums(ranks[case], rank_config(case))
    assert rank_config("torchrun counted").gradient_accumulation_steps(WORLD_SIZE) == 3
    assert rank_config("torchrun counted, one micro batch").gradient_accumulation_steps(WORLD_SIZE) == 1
    with pytest.raises(AssertionError):
        check_sums(ranks["every micro batch reduced"], rank_config("torchrun counted"))


def test_every_rank_reads_its_own_share(config):
    def check(*mistakes: Fault) -> None:
        assert "Dispatcher" not in accelerate_loader(config(), *mistakes)

    check()
    with pytest.raises(AssertionError):
        check(faults.ITERABLE_DATA)


def check_rank_gradients(outcomes: list[Outcome], config: Config) -> None:
    """Every rank's first update has the gradients of one forward pass of the whole global batch."""
    expected = reference_gradients(config, list(micro_batches_of(config, 0)))
    for outcome in outcomes:
        assert outcome.error is None
        for part in ("", "mlp.gate"):
            error = relative_error(outcome.driven.gradients[0], expected, part)
            assert error < 1e-6, f"gradients of parameters {part!r} are off by {error:.1%}"


@pytest.mark.parametrize(
    ("right", "wrong"), [("unclipped", "mean per rank"), ("global balance", "counts of one rank")]
)
def test_ranks_weigh_over_the_whole_batch(right, wrong, ranks, rank_config):
    for case in (f"torchrun {right}", f"accelerate {right}"):
        check_rank_gradients(ranks[case], rank_config(case))
    assert ranks[wrong][0].error is None, "the trap is silent"
    with pytest.raises(AssertionError, match="are off by"):
        check_rank_gradients(ranks[wrong], rank_config(wrong))


def check_samples(outcomes: list[Outcome], config: Config) -> None:
    """Together the ranks train on every micro batch of every step, once, and know it."""
    per_step, steps = config.gradient_accumulation_steps(1), config.training.max_steps
    for step in range(steps):
        together = [pair for outcome in outcomes for pair in outcome.driven.micro_batches[step : step + 1]]
        expected = [(step, number) for number in range(per_step)]
        assert sorted(pair for window in together for pair in window) == expected
        words = sum(batch.digest for batch in micro_batches_of(config, step))
        assert all(o.driven.digests[step] == [int(word) % 2**32 for word in words] for o in outcomes)
    assert all(len(outcome.driven.micro_batches) == steps for outcome in outcomes)


def test_every_sample_is_seen_once(ranks, rank_config):
    for case in ("torchrun fp32", "accelerate fp32"):
        check_samples(ranks[case], rank_config(case))


@pytest.mark.parametrize("case", ["sharded twice", "filled up", "not sharded"])
def test_other_ways_of_sharding_are_seen(case, ranks, rank_config):
    assert all(outcome.error is None for outcome in ranks[case]), "the trap is silent"
    with pytest.raises(AssertionError):
        check_samples(ranks[case], rank_config(case))


def check_learning_rates(outcomes: list[Outcome], config: Config) -> None:
    """Each update has the learning rate of its step."""
    expected = [learning_rate(config, step) for step in range(config.training.max_steps)]
    assert len(set(expected)) > 1 or expected[-1] != learning_rate(config, len(expected)), "a flat schedule"
    for outcome in outcomes:
        assert outcome.driven.rates == expected


def test_the_learning_rate_follows_the_step(ranks, rank_config):
    for case in ("torchrun fp32", "accelerate fp32"):
        check_learning_rates(ranks[case], rank_config(case))
    assert ranks["prepared schedule"][0].error is None
    with pytest.raises(AssertionError):
        check_learning_rates(ranks["prepared schedule"], rank_config("prepared schedule"))
