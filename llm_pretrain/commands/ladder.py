"""`llm-pretrain ladder`: train small models of one family within a budget, and table their losses."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llm_pretrain.commands._launch_options import (
    add_settings,
    find_scripts,
    given_options,
    say,
)
from llm_pretrain.commands._launching import LaunchContext, Machine, exit_on_signals, this_machine
from llm_pretrain.config import Config, load_config, resolve_model, to_dict
from llm_pretrain.errors import (
    EXIT_PREEMPTED,
    ConfigError,
    DataError,
    DivergedError,
    OutputError,
)
from llm_pretrain.files import make_folder, remove_leftovers

if TYPE_CHECKING:
    from llm_pretrain.commands._ladder_runs import Runner
    from llm_pretrain.ladder import Ladder, Rung, Sizes, Speed

EXAMPLES = """\
Every other option is a setting, --section.field VALUE, of the family's base. The same command continues a
ladder that was stopped; runs that have ended are kept, and the table has the same bits.

examples:
  llm-pretrain ladder --input data/stores/stdlib --budget 1h
  llm-pretrain ladder --input data/stores/mine --budget 2h --config minimind-26m --output ladders/mine
  llm-pretrain ladder --input data/stores/mine --budget 1e16 --sizes 4 --training.global_batch_size 32
  llm-pretrain ladder --compare ladders/stdlib ladders/stdlib-other-recipe
"""

GUESSED_FLOPS = {"core": 4e10, "gpu": 1e14}
"""Per second, for the sizes at which the speed is measured first."""
MEASURE_AGAIN = 2.0
"""Ratio in FLOPs per token beyond the measured sizes from which the speed is measured again."""
MEASUREMENTS = 2
"""At most, so that a noisy machine is not measured for ever."""
_CHOSEN = {
    "data.sources": "; use --input",
    "data.weight_changes": "; use --input",
    "run.output_dir": "; use --output",
    "training.max_steps": "; use --budget",
    "schedule.name": "",
    "schedule.decay_steps": "",
    "checkpoint.save_steps": "",
    "checkpoint.keep_last": "",
    "checkpoint.keep_best": "",
    "checkpoint.resume": "",
    "evaluation.eval_steps": "",
    "evaluation.sample_prompts": "",
    "evaluation.prediction": "",
    "logging.wandb_mode": "",
    "logging.tensorboard": "",
    "logging.report": "",
    "logging.parameters_sha256": "",
}
"""Settings that a ladder decides by itself, and the option to give instead, if any; it decides all of
`distributed` too, but for the time limit."""
_NOT_COMPARED = {"data.sources", "run.name", "run.output_dir"}
"""Settings that may differ when a ladder is continued; the store has a hash."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    parser.usage = (
        "llm-pretrain ladder --input STORE --budget BUDGET [options] [--section.field VALUE ...]\n"
        "       llm-pretrain ladder --compare FOLDER FOLDER"
    )
    parser.description = (
        "Trains small models of one family, each at several numbers of tokens, within a budget; writes their "
        "losses\nto points.jsonl, from which `llm-pretrain plan` predicts larger runs."
    )
    add = parser.add_argument
    add("--input", metavar="STORE", help="token store, written by `llm-pretrain prepare`")
    add("--budget", metavar="BUDGET",
        help="of all runs: a time on this machine (90s, 20m, 2h, 1d), or FLOPs (1e16)")  # fmt: skip
    add("--config", action="append", metavar="FILE",
        help="base of the family; of several the later wins (default: the preset ladder)")  # fmt: skip
    add("--output", metavar="FOLDER", help="folder of the ladder (default: ladders/NAME of the store)")
    add("--sizes", type=int, metavar="K",
        help="number of sizes, 3 or more (default: 3 to 5, by the budget)")  # fmt: skip
    add("--compare", nargs=2, metavar="FOLDER",
        help="print the compute that a second ladder needs for the losses of a first")  # fmt: skip
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, or continue, a ladder and train it; 75 when a signal stopped it."""
    from llm_pretrain.ladder import read_budget

    if arguments.compare:
        return compare(arguments)
    for name in ("input", "budget"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--{name}: expected a value, found none; --help has examples")
    read_budget(arguments.budget)
    if arguments.sizes is not None and not 3 <= arguments.sizes <= 16:
        raise ConfigError(f"--sizes: expected 3 to 16, found {arguments.sizes}")
    machine = this_machine()
    base, store, unique_tokens = open_base(arguments, machine)
    folder = (
        Path(arguments.output) if arguments.output else Path("ladders") / Path(arguments.input).resolve().name
    )
    context = LaunchContext(find_scripts(None, ["torchrun"]), machine, math.inf)
    with locked(folder), exit_on_signals():
        try:
            ladder = continued(arguments, folder, base, store)
            if ladder is None:
                ladder = new_ladder(arguments, folder, base, store, unique_tokens, context)
            return train(ladder, context)
        except (KeyboardInterrupt, SystemExit):
            say(f"stopped; the same command continues {folder}")
            return EXIT_PREEMPTED


def compare(arguments: argparse.Namespace) -> int:
    """Print the compute that two ladders need for the same losses."""
    from llm_pretrain.ladder import compare_ladders, read_ladder, shortcomings

    names = ("input", "budget", "config", "output", "sizes")
    given = [f"--{name}" for name in names if getattr(arguments, name) is not None] + arguments.settings[::2]
    if given:
        raise ConfigError(f"--compare: expected two folders and no other option, found {given[0]}")
    first, second = (read_ladder(folder) for folder in arguments.compare)
    rows = compare_ladders(first, second)
    print(f"compute to equal loss, {second.folder} relative to {first.folder}")
    for row in rows:
        needed = "not reached"
        if row.second is not None:
            needed = f"{'< ' if row.second.is_bound else ''}{row.second.flops:.3g} FLOPs"
        print(
            f"  loss {row.loss:.4f}  {row.flops:>8.3g} FLOPs  {needed:>14}  "
            + (f"{row.ratio:.3f}" if row.ratio else "")
        )
    for ladder in (first, second):
        for line in shortcomings(ladder):
            print(f"warning: {ladder.folder}: {line}")
    ratios = [row.ratio for row in rows if row.ratio]
    if not ratios:
        reason = "no loss of the first lies within the second's"
        if all(row.second is not None for row in rows):
            reason = "the second's cheapest run is better already"
        print(f"no ratio: {reason}; give one of them another budget")
        return 1
    print(
        f"ratios from {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}; "
        "below 1 the second needs less"
    )
    return 0


def open_base(arguments: argparse.Namespace, machine: Machine) -> tuple[Config, str, int]:
    """(the base configuration, the store's hash, its training tokens).

    The base is resolved, with the store as its data; it evaluates on all of its validation split unless
    told otherwise, and is deterministic on GPUs, so that a continued ladder has the same table.
    """
    from llm_pretrain.data import TokenStore, sequences_per_epoch
    from llm_pretrain.ladder import member, with_store

    given = [word.removeprefix("--") for word in arguments.settings[::2]]
    if problems := [
        f"{name}: expected none, a ladder chooses it{_CHOSEN.get(name, '')}"
        for name in given
        if name in _CHOSEN or (name.startswith("distributed.") and name != "distributed.timeout_seconds")
    ]:
        raise ConfigError(*problems)
    arguments.config = arguments.config or ["ladder"]
    config = load_config(given_options(arguments), needs_data=False, world_size=1)
    store = TokenStore(Path(arguments.input))
    if not store.facts["splits"]["validation"]["targets"]:
        raise DataError(
            f"--input {arguments.input}: expected a validation split to measure losses on, found none; "
            "prepare it with a larger --validation_fraction, or from more documents"
        )
    base = with_store(resolve_model(config, store.vocab_size), store.path)
    training, evaluation = base.training, base.evaluation
    if "evaluation.max_batches" not in given:  # a preset's few batches are too noisy for a fit
        evaluation = dataclasses.replace(evaluation, max_batches=None)
    training = dataclasses.replace(training, deterministic=training.deterministic or machine.gpus > 0)
    checkpoint = dataclasses.replace(base.checkpoint, resume="auto")  # no size continues another run
    base = dataclasses.replace(base, training=training, evaluation=evaluation, checkpoint=checkpoint)
    member(base, base.model.hidden_size)  # raises for a base without a family
    return base, store.hash, sequences_per_epoch(base) * base.training.sequence_length


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, created if missing, so that no other ladder runs in it."""
    from filelock import FileLock, Timeout

    from llm_pretrain.commands._ladder_runs import LOCK, MEASURING
    from llm_pretrain.ladder import LADDER_FILE, POINTS_FILE

    if (was_there := folder.exists()) and not folder.is_dir():
        raise OutputError(f"--output {folder}: expected a folder, found a file")
    try:
        make_folder(folder)
        with FileLock(folder / LOCK, timeout=0):
            try:
                remove_leftovers(folder, (LADDER_FILE, POINTS_FILE))
                others = sorted(set(os.listdir(folder)) - {LOCK, MEASURING})
                if others and LADDER_FILE not in others:
                    raise OutputError(
                        f"--output {folder}: expected a ladder's folder, or a new or empty one, found "
                        f"{others[0]} in it; choose another"
                    )
                yield
            finally:
                if not (folder / LADDER_FILE).exists():  # nothing was planned: leave no trace
                    (folder / LOCK).unlink(missing_ok=True)
                    if not was_there:
                        with suppress(OSError):
                            folder.rmdir()
    except Timeout:
        raise OutputError(
            f"--output {folder}: expected a folder of its own, found another command that runs in it"
        ) from None


def continued(arguments: argparse.Namespace, folder: Path, base: Config, store: str) -> Ladder | None:
    """The ladder in a folder, None if there is none yet.

    Raises:
        ConfigError: it has another base, budget, store or number of sizes; with a line for each difference.
    """
    from llm_pretrain.ladder import LADDER_FILE, read_budget, read_unmeasured

    ladder = read_unmeasured(folder)
    if ladder is None:
        return None
    own, new = (
        {
            f"{section}.{name}": value
            for section, each in to_dict(config).items()
            for name, value in each.items()
        }
        for config in (ladder.base, base)
    )
    found = [
        (name, own[name], new[name]) for name in new if name not in _NOT_COMPARED and own[name] != new[name]
    ]
    if ladder.store_hash != store:
        found.append(("--input", f"the store {ladder.store_hash[:12]}", f"{store[:12]} in {arguments.input}"))
    if read_budget(ladder.budget.text, f"{folder / LADDER_FILE}: budget") != read_budget(arguments.budget):
        found.append(("--budget", ladder.budget.text, arguments.budget))
    if arguments.sizes is not None and arguments.sizes != len(ladder.rungs):
        found.append(("--sizes", len(ladder.rungs), arguments.sizes))
    if found:
        raise ConfigError(
            *(
                f"{name}: expected {expected}, as the ladder in {folder} has, found {value}; choose another "
                "--output for another ladder"
                for name, expected, value in found
            )
        )
    say(f"continuing {folder}, planned for {ladder.budget.text}")
    say_rungs(ladder)
    ladder = dataclasses.replace(ladder, base=base)
    ladder.write()  # the store may have moved
    return ladder


def new_ladder(
    arguments: argparse.Namespace,
    folder: Path,
    base: Config,
    store: str,
    unique_tokens: int,
    context: LaunchContext,
) -> Ladder:
    """Choose the rungs for the budget, measuring the speed for a time, and write ladder.json."""
    from llm_pretrain.commands._ladder_runs import MEASURING, slots_of, threads_of
    from llm_pretrain.ladder import (
        SIZE_COUNTS,
        Budget,
        Ladder,
        Sizes,
        choose_rungs,
        ladder_flops,
        ladder_seconds,
        read_budget,
    )
    from llm_pretrain.tracking import time_text

    threads, sizes = threads_of(context.machine, arguments.sizes or SIZE_COUNTS[0]), Sizes(base)
    (flops, seconds), started, expected = read_budget(arguments.budget), time.monotonic(), ""
    if seconds is None:
        assert flops is not None
        rungs = choose_rungs(sizes, flops, unique_tokens, arguments.sizes)
        budget = Budget(arguments.budget, flops)
    else:
        rungs, flops, speed = rungs_within(
            seconds, sizes, unique_tokens, arguments.sizes, folder / MEASURING, context, threads
        )
        measuring = time.monotonic() - started
        budget = Budget(arguments.budget, flops, seconds, measuring, speed.start_up)
        expected = f", about {time_text(ladder_seconds(sizes, rungs, speed))}"
    ladder = Ladder(folder, base, store, unique_tokens, rungs, budget, None, threads)
    ladder.write()
    say(
        f"{len(rungs)} sizes of {base.run.name} in {ladder_flops(sizes, rungs):.2g} FLOPs{expected}, "
        f"{slots_of(context.machine, threads)} side by side with {threads} thread{'s' * (threads > 1)} each, "
        f"in {folder}"
    )
    say_rungs(ladder)
    return ladder


def say_rungs(ladder: Ladder) -> None:
    """Print the sizes of a ladder and the tokens that each is trained on."""
    from llm_pretrain.ladder import Sizes, tokens_per_step
    from llm_pretrain.tracking import quantity

    sizes = Sizes(ladder.base)
    for rung in ladder.rungs:
        parameters = quantity(sizes.of(rung.hidden_size).active_parameters)
        tokens = ", ".join(quantity(steps * tokens_per_step(ladder.base)) for steps in rung.steps)
        say(f"  hidden size {rung.hidden_size}, {parameters} active parameters: {tokens} tokens")


def rungs_within(
    seconds: float,
    sizes: Sizes,
    unique_tokens: int,
    count: int | None,
    folder: Path,
    context: LaunchContext,
    threads: int,
) -> tuple[tuple[Rung, ...], float, Speed]:
    """(rungs that this machine trains in a time, less what measuring takes; their FLOPs; measured speed).

    Raises:
        ConfigError: by the measured speed, the time is too short or too long for any ladder.
    """
    from llm_pretrain.commands._ladder_runs import measure_speed, slots_of
    from llm_pretrain.ladder import (
        Speed,
        choose_rungs,
        flops_within,
        ladder_seconds,
        least_flops,
        most_ladder_flops,
    )
    from llm_pretrain.tracking import time_text

    started, machine = time.monotonic(), context.machine
    slots, most = slots_of(machine, threads), most_ladder_flops(unique_tokens, count)
    guess = GUESSED_FLOPS["gpu"] * slots if machine.gpus else GUESSED_FLOPS["core"] * machine.cores
    speed = Speed(0.0, slots / guess, 0.0, slots)
    flops = flops_within(sizes, seconds, unique_tokens, speed, count)
    if flops == most:  # perhaps too much: small sizes tell it sooner
        flops = least_flops(sizes, unique_tokens, count)
    rungs = choose_rungs(sizes, flops, unique_tokens, count)
    for _ in range(MEASUREMENTS):
        ends = [rung.hidden_size for rung in (rungs[0], rungs[-1])]
        say(f"measuring the speed of hidden sizes {ends[0]} and {ends[1]}")
        speed = measure_speed(sizes.base, ends, folder, context, slots=slots, threads=threads)
        spent = time.monotonic() - started
        flops = flops_within(sizes, seconds - spent, unique_tokens, speed, count)
        rungs = choose_rungs(sizes, flops, unique_tokens, count)
        expected = spent + ladder_seconds(sizes, rungs, speed)
        if expected > seconds or flops == most:
            bound, advice, margin = "least", "raise it", 1.05  # the next measurement differs a little
            if expected <= seconds:
                bound, advice, margin = "most", "lower it, or bring more text", 0.95
            raise ConfigError(
                f"--budget: expected at {bound} {time_text(margin * expected)} for {len(rungs)} sizes of "
                f"this family on this machine, found {time_text(seconds)}; {advice}"
            )
        fast, slow = (sizes.of(size).flops_per_token for size in ends)
        low, high = (sizes.of(rung.hidden_size).flops_per_token for rung in (rungs[0], rungs[-1]))
        if low * MEASURE_AGAIN >= fast and high <= slow * MEASURE_AGAIN:
            break
    return rungs, flops, speed


def train(ladder: Ladder, context: LaunchContext) -> int:
    """Check the rate, run all that has not ended yet, and print the table."""
    from llm_pretrain.commands._ladder_runs import MEASURING, Runner, end_orphans, slots_of
    from llm_pretrain.ladder import (
        LEAST_SIZES,
        POINTS_FILE,
        RUNS_FOLDER,
        check_runs,
        diverged_sizes,
        ladder_runs,
        measured_points,
        shortcomings,
        tried_factors,
        used_by,
        write_ladder_report,
        write_points,
    )
    from llm_pretrain.tracking import time_text

    started, folder = time.monotonic(), ladder.folder.resolve()
    files = [file for name in (RUNS_FOLDER, MEASURING) for file in (folder / name).glob("*.yaml")]
    end_orphans(file.with_suffix("") for file in files)  # a run's folder comes after its file
    runner = Runner(ladder, context, slots_of(context.machine, ladder.threads))
    if ladder.rate_factor is None:
        ladder = check_rate(runner)
    factor = ladder.rate_factor
    assert factor is not None
    others, rest = set(tried_factors(ladder)) - {factor}, ladder_runs(ladder.rungs, factor)
    runner.clean(check_runs(ladder.rungs[0], others))
    runner.run_all(rest)
    runner.clean(rest)
    points = measured_points(ladder)
    write_points(ladder.folder, points)
    say(f"report: {write_ladder_report(ladder.folder)}")
    for line in shortcomings(dataclasses.replace(ladder, points=tuple(points))):
        say(line)
    if (left := len(ladder.rungs) - len(diverged_sizes(ladder))) < LEAST_SIZES:
        raise DivergedError(
            f"{ladder.folder}: expected {LEAST_SIZES} sizes or more that do not diverge, found {left}"
        )
    used = used_by(ladder)
    say(
        f"{len(points)} points in {ladder.folder / POINTS_FILE}; {runner.used_text(used)}: "
        f"{used.flops:.3g} FLOPs, {time_text(used.seconds)} of runs; this call "
        f"{time_text(time.monotonic() - started)}"
    )
    return 0


def check_rate(runner: Runner) -> Ladder:
    """Train the smallest size at several rates, and write the best factor into ladder.json.

    Other rates than the base's must be better by the ratio 1 + `RATE_GAIN` for each factor 2 between them.
    """
    from llm_pretrain.ladder import RATE_FACTORS, RATE_GAIN, RATE_LIMITS, check_runs, rate_loss

    ladder, tried = runner.ladder, list(RATE_FACTORS)
    rung = ladder.rungs[0]

    def loss(factor: float) -> float:
        return rate_loss(ladder, factor)

    while True:
        runner.run_all(check_runs(rung, tried))
        best = min(tried, key=lambda factor: loss(factor) * (1 + RATE_GAIN) ** abs(math.log2(factor)))
        if loss(best) == math.inf:
            best = min(tried)
        further = best / 2 if best == min(tried) else best * 2 if best == max(tried) else None
        if further is None or not RATE_LIMITS[0] <= further <= RATE_LIMITS[1]:
            break
        tried.append(further)
    if loss(best) == math.inf:
        raise DivergedError(
            f"{ladder.folder}: the smallest size diverges at every rate; lower the base's rates"
        )
    found = ", ".join(f"{loss(factor):.4f} at {factor:g}" for factor in sorted(tried))
    say(f"learning rates {best:g} times the base's: loss of the smallest size {found}")
    runner.ladder = dataclasses.replace(ladder, rate_factor=best)
    runner.ladder.write()
    return runner.ladder
