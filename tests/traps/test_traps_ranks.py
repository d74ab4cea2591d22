"""Traps of several ranks: each check passes on three connected processes and fails with a mistake put in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engines import run_engine
from support.launching import assert_same_tensors
from support.rank_cases import WORLD_SIZE, Outcome, case_config, has_slow, run_ranks
from support.rank_plan import CASES
from support.stepping import micro_batches_of, reference_gradients, relative_error

from llm_pretrain.config.tree import Config
from llm_pretrain.optim.schedule import learning_rate
from llm_pretrain.training.engine import DIGEST_WORDS

Ranks = dict[str, list[Outcome]]
"""What the processes did, by case and rank."""
Check = Callable[[Ranks, str, Config], None]


def no_errors(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.error is None, outcome.error


def agree(outcomes: list[Outcome]) -> None:
    """All ranks finish every step with the same parameters."""
    no_errors(outcomes)
    for outcome in outcomes:
        assert outcome.driven.hashes == outcomes[0].driven.hashes


def same_bits(ranks: Ranks, case: str, config: Config) -> None:
    """Both paths have the same parameters after every step, and the same losses and norms."""
    kind = case.removeprefix("torchrun ")
    outcomes = [*ranks[case], *ranks.get(f"accelerate {kind}", ranks["accelerate fp32"])]
    agree(outcomes)
    one = outcomes[0].driven
    assert one.hashes
    for outcome in outcomes:
        assert (outcome.driven.losses, outcome.driven.grad_norms) == (one.losses, one.grad_norms)


def dropout(ranks: Ranks, case: str, config: Config) -> None:
    """Three ranks drop the same units as one rank does with three times the micro batches."""
    alone = run_engine("torchrun", config)
    torch.testing.assert_close(ranks[case][0].driven.losses[0], alone.losses[0], rtol=1e-6, atol=0.0)


def skipping(ranks: Ranks, case: str, config: Config) -> None:
    """Where one rank's loss is NaN, all ranks skip the step and keep the same parameters."""
    agree(ranks[case])
    for outcome in ranks[case]:
        assert outcome.driven.skipped == ["nonfinite_gradient"] * 2
        assert outcome.driven.updates == [0, 0]


def reading_late(ranks: Ranks, case: str, config: Config) -> None:
    """Figures that are read after the optimizer's step, as on a GPU, change no bits."""
    for one, other in zip(ranks[case], ranks[case.replace("read late", "buffers")], strict=True):
        agree([one, other])
        assert_same_tensors(one.driven.buffers, other.driven.buffers)


def skipping_late(ranks: Ranks, case: str, config: Config) -> None:
    """The same of a step that is skipped: the optimizer is called and does nothing, the bias stays."""
    agree([*ranks[case], *ranks["torchrun one rank NaN"]])
    for outcome in ranks[case]:
        assert outcome.driven.skipped == ["nonfinite_gradient"] * 2
        assert outcome.driven.updates == [1, 1]
        assert not any(buffer.any() for buffer in outcome.driven.buffers.values())


def together(ranks: Ranks, case: str, config: Config) -> None:
    """Ranks whose tokens choose other experts agree."""
    agree(ranks[case])


def buffers(ranks: Ranks, case: str, config: Config) -> None:
    """Buffers that stood at the rank's number when training began have moved alike on every rank."""
    no_errors(ranks[case])
    for rank, outcome in enumerate(ranks[case]):
        assert outcome.driven.buffers
        for name, buffer in outcome.driven.buffers.items():
            assert torch.equal(buffer - rank, ranks[case][0].driven.buffers[name])


def leaving(ranks: Ranks, case: str, config: Config) -> None:
    """Ranks wait for each other, and only then leave, the wrapped model being gone by then."""
    for outcome in ranks[case]:
        assert outcome.events[-2:] == ["barrier", "leave"]


def reductions(ranks: Ranks, case: str, config: Config) -> None:
    """Gradients are reduced over ranks once per step, with the last micro batch."""
    window = [False] * (config.gradient_accumulation_steps(WORLD_SIZE) - 1) + [True]
    assert len(window) == 3
    for outcome in ranks[case]:
        assert outcome.reductions == [True] + window * config.training.max_steps


def sums(ranks: Ranks, case: str, config: Config) -> None:
    """A step sums over ranks its counts, every gradient once, its losses; the empty first one gradients."""
    for outcome in ranks[case]:
        gradients = sum(parameter.numel() for parameter in outcome.driven.parameters.values())
        assert outcome.sums[:1] == [gradients]
        steps = [outcome.sums[first : first + 3] for first in range(1, len(outcome.sums), 3)]
        assert len(steps) == config.training.max_steps
        assert all(step[:2] == [1 + DIGEST_WORDS, gradients] for step in steps)


def gradients(ranks: Ranks, case: str, config: Config) -> None:
    """Every rank's first update has the gradients of one forward pass of the whole global batch."""
    expected = reference_gradients(config, list(micro_batches_of(config, 0)))
    for outcome in ranks[case]:
        for part in ("", "mlp.gate"):
            error = relative_error(outcome.driven.gradients[0], expected, part)
            assert error < 1e-6, f"gradients of parameters {part!r} are off by {error:.1%}"


def samples(ranks: Ranks, case: str, config: Config) -> None:
    """Together the ranks train on every micro batch of every step, once, and know it."""
    outcomes, per_step = ranks[case], config.gradient_accumulation_steps(1)
    for step in range(config.training.max_steps):
        together = [pair for outcome in outcomes for pair in outcome.driven.micro_batches[step : step + 1]]
        expected = [(step, number) for number in range(per_step)]
        assert sorted(pair for window in together for pair in window) == expected
        words = sum(batch.digest for batch in micro_batches_of(config, step))
        assert all(o.driven.digests[step] == [int(word) % 2**32 for word in words] for o in outcomes)
    assert all(len(outcome.driven.micro_batches) == config.training.max_steps for outcome in outcomes)


def rates(ranks: Ranks, case: str, config: Config) -> None:
    """Each update has the learning rate of its step."""
    expected = [learning_rate(config, step) for step in range(config.training.max_steps)]
    assert len(set(expected)) > 1 or expected[-1] != learning_rate(config, len(expected)), "a flat schedule"
    assert all(outcome.driven.rates == expected for outcome in ranks[case])


BOTH: dict[Check, tuple[str, ...]] = {
    dropout: ("dropout",),
    skipping: ("one rank NaN",),
    reading_late: ("read late",),
    buffers: ("buffers",),
    leaving: ("fp32",),
    reductions: ("fp32",),
    sums: ("counted",),
    gradients: ("unclipped", "global balance"),
    samples: ("fp32",),
    rates: ("fp32",),
}
"""Check -> the kinds of cases in which it passes on both paths."""
PROMISES: list[tuple[Check, str]] = [
    *((same_bits, f"torchrun {kind}") for kind in ("fp32", "bf16", "dropout", "global balance")),
    (together, "few tokens per expert"),
    (skipping_late, "torchrun read late, NaN"),
    *(
        (check, f"{path} {kind}")
        for check, kinds in BOTH.items()
        for kind in kinds
        for path in ("torchrun", "accelerate")
    ),
]
MISTAKES: dict[Check, tuple[str, ...]] = {
    same_bits: (
        *("another optimizer", "another bucket size", "divided elsewhere"),
        *("every micro batch reduced", "static graph"),
    ),
    dropout: ("dropout by rank",),
    skipping: ("skip by own loss",),
    buffers: ("broadcast buffers",),
    leaving: ("no_sync kept", "no wait"),
    reductions: ("every micro batch reduced", "no accumulate"),
    sums: ("every micro batch counted",),
    gradients: ("mean per rank", "counts of one rank"),
    samples: ("sharded twice", "filled up", "not sharded"),
    rates: ("prepared schedule",),
}
"""Check -> silent mistakes that it finds."""
LOUD = {
    "experts in a list": "finished reduction",
    "static graph, first pass unreduced": "INTERNAL ASSERT FAILED",
}
"""Mistake -> what torch says of it."""


@pytest.fixture(scope="module")
def ranks(store_folder: Path, tmp_path_factory: pytest.TempPathFactory, request) -> Ranks:
    """Runs the cases; fails where a process hangs or crashes. Those with a mistake are for slow tests."""
    right = {case for _, case in PROMISES} | {"accelerate bf16"}
    names = None if has_slow(request) else right
    return run_ranks(store_folder, tmp_path_factory.mktemp("ranks"), names=names)


@pytest.mark.parametrize(("check", "case"), PROMISES)
def test_the_ranks_keep_a_promise(check: Check, case: str, ranks: Ranks, store_folder: Path):
    no_errors(ranks[case])
    check(ranks, case, case_config(store_folder, CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "case"), [(check, case) for check, cases in MISTAKES.items() for case in cases]
)
def test_a_mistake_on_the_ranks_is_seen(check: Check, case: str, ranks: Ranks, store_folder: Path):
    no_errors(ranks[case])
    with pytest.raises(AssertionError):
        check(ranks, case, case_config(store_folder, CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", LOUD)
def test_a_mistake_that_torch_refuses_is_an_error(case: str, ranks: Ranks):
    with pytest.raises(AssertionError, match=LOUD[case]):
        no_errors(ranks[case])
