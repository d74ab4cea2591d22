"""`llm-pretrain plan`: by a ladder, chooses the configuration with the least predicted loss for a budget."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import dump_yaml, validate
from llm_pretrain.config.optimizers import declaration
from llm_pretrain.config.tree import Config
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import ConfigError, DataError, OutputError, printable
from llm_pretrain.files import check_replaceable, file_name, make_folder, replace_text
from llm_pretrain.hardware import CLUSTERS, DEFAULT_MFU, GPU_GB, device_peak_flops
from llm_pretrain.launch.jobs import LaunchContext, exit_on_signals, this_machine
from llm_pretrain.launch.options import find_scripts, say
from llm_pretrain.text import duration, size_text

if TYPE_CHECKING:
    from llm_pretrain.forecast.planning import Choice, Forecast
    from llm_pretrain.forecast.points import Ladder

EXAMPLES = """\
The budget is one of --time and --flops. Without --gpu it is spent on this machine: some steps of the planned
run turn a time into FLOPs.

examples:
  llm-pretrain plan --ladder ladders/stdlib --time 1h
  llm-pretrain plan --ladder ladders/mine --flops 1e18 --max-parameters 1e8
  llm-pretrain plan --ladder ladders/mine --time 5h --gpu h100 --world-size 8 --output night.yaml
"""

SHOWN = 4.0
"""The printed sizes have at most so many times more or fewer parameters than the best size."""
_MARK = "# Written by `llm-pretrain plan`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ladder", required=True, metavar="FOLDER", help="written by `llm-pretrain ladder`")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--time", metavar="T", help="budget of the run: 90s, 20m, 8h, 2d")
    budget.add_argument("--flops", type=float, metavar="F", help="or its FLOPs, such as 1e18")
    add("--gpu", type=str.lower, choices=CLUSTERS, metavar="NAME",
        help=f"another machine: {', '.join(CLUSTERS)} (default: this one)")  # fmt: skip
    add("--world-size", "--world_size", type=int, metavar="W",
        help="processes (default: by the cores or GPUs here, dividing a step; 1 with --gpu)")  # fmt: skip
    add("--mfu", type=float, help=f"share of a GPU's peak that is reached (default: {DEFAULT_MFU})")
    add("--max-parameters", type=float, default=math.inf, metavar="N", help="largest number, all counted")
    add("--output", default="plan.yaml", metavar="FILE", help="configuration to write (default: plan.yaml)")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and write its configuration."""
    from llm_pretrain.forecast.budget import EVALUATION_COST, read_budget
    from llm_pretrain.forecast.ladder_training import evaluated_tokens
    from llm_pretrain.forecast.measurements import read_ladder
    from llm_pretrain.forecast.planning import EVALUATIONS, Forecast, best_of

    _check(arguments)
    output = Path(arguments.output)
    check_replaceable(output, _MARK.encode())
    ladder = read_ladder(arguments.ladder)
    if arguments.world_size is None:
        arguments.world_size = _usual_world_size(ladder.base, arguments)
    _micro_batch(ladder.base, arguments.world_size)  # raises if --world-size does not divide the batch
    _check_store(ladder)
    forecast, limit, seconds = Forecast(ladder), arguments.max_parameters, None
    if arguments.time is not None:
        _, seconds = read_budget(arguments.time, "--time", only_time=True)
    evaluated = EVALUATION_COST * (EVALUATIONS + 1) * evaluated_tokens(ladder.base)  # in trained tokens
    rate = None
    if arguments.gpu and (peak := device_peak_flops(arguments.gpu)):
        rate = peak * (arguments.mfu or DEFAULT_MFU) * arguments.world_size  # of all GPUs
    if seconds is None:
        choices = forecast.choices(arguments.flops, limit)
    else:
        if rate is None:
            rate = _measured_flops(forecast, seconds, evaluated, arguments)
        choices = forecast.choices(seconds * rate, limit, evaluated)
    best = best_of(choices)
    config = _config(forecast, best, arguments)
    evaluation = dataclasses.replace(config.evaluation, prediction=forecast.curve(config))
    config = dataclasses.replace(config, evaluation=evaluation)
    if problems := validate(config, world_size=arguments.world_size):
        raise ConfigError(*problems)
    expected = (best.training.tokens + evaluated) * best.size.flops_per_token / rate if rate else None
    lines = [
        *_lines(forecast, choices, config, expected, arguments),
        *_warnings(forecast, best, config, arguments),
    ]
    print(*lines, sep="\n")
    command = ""
    if not arguments.gpu:  # with --gpu there may be several machines
        command = f"; llm-pretrain train --nproc {arguments.world_size} --config {shlex.quote(str(output))}"
    head = "".join(f"# {printable(line)}\n" for line in lines)
    make_folder(output.parent)
    replace_text(output, f"{_MARK}{printable(command)}\n{head}{dump_yaml(config)}")
    print(printable(f"wrote {output}{command}"))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from llm_pretrain.forecast.budget import FLOPS_LIMIT

    problems = []
    if arguments.mfu is not None and not arguments.gpu:
        problems.append("--mfu: expected together with --gpu; this machine's speed is measured")
    for name in ("flops", "max_parameters"):
        value, most = getattr(arguments, name), math.inf if name == "max_parameters" else FLOPS_LIMIT
        if value is not None and not 0 < value <= most:
            up_to = f" up to {most:g}" if most < math.inf else ""
            problems.append(f"--{name.replace('_', '-')}: expected a number above 0{up_to}, found {value:g}")
    if arguments.mfu is not None and not 0.001 <= arguments.mfu <= 1:
        problems.append(f"--mfu: expected a share from 0.001 to 1, found {arguments.mfu:g}")
    if arguments.world_size is not None and arguments.world_size < 1:
        problems.append(f"--world-size: expected 1 or more, found {arguments.world_size}")
    if problems:
        raise ConfigError(*problems)


def _check_store(ladder: Ladder) -> None:
    """Raise DataError if the ladder's store is missing or has changed: another text has another law."""
    store = ladder.base.data.sources[0].store
    if not Path(store).exists():
        raise DataError(
            f"{store}: expected the store of the ladder in {ladder.folder}, found none; run this where the "
            "ladder was run, or move the store there"
        )
    if (found := TokenStore(Path(store)).hash) != ladder.store_hash:
        raise DataError(
            f"{store}: expected the store {ladder.store_hash[:12]} of the ladder in {ladder.folder}, found "
            f"{found[:12]}; another text needs another ladder"
        )


def _usual_world_size(base: Config, arguments: argparse.Namespace) -> int:
    """The largest divisor of a step's sequences up to the number of GPUs or cores here; 1 with --gpu."""
    machine, total = this_machine(), base.training.global_batch_size
    most = 1 if arguments.gpu else machine.gpus or machine.cores
    return next(size for size in range(min(most, total), 0, -1) if total % size == 0)


def _micro_batch(config: Config, world_size: int) -> int:
    """The largest micro batch size up to the configured one that divides a rank's sequences of a step."""
    total = config.training.global_batch_size
    if total % world_size:
        raise ConfigError(
            f"--world-size: expected a divisor of the ladder's training.global_batch_size {total}, "
            f"found {world_size}"
        )
    own = total // world_size
    return next(size for size in range(min(own, config.training.micro_batch_size), 0, -1) if own % size == 0)


def _config(forecast: Forecast, choice: Choice, arguments: argparse.Namespace) -> Config:
    """The configuration of a choice's run, for this machine or for --gpu: DDP in bf16, like GPUs' peaks."""
    machine, world_size = this_machine(), arguments.world_size
    threads = None if arguments.gpu or machine.gpus else max(1, machine.cores // world_size)
    micro_batch = _micro_batch(choice.size.config, world_size)
    name = file_name(Path(arguments.output).stem, "plan")  # shortened to what run.name allows
    config = forecast.config(choice, DistributedConfig(cpu_threads=threads), micro_batch, name)
    if arguments.gpu:
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, precision="bf16"))
    return config


def _measured_flops(
    forecast: Forecast, seconds: float, evaluated: float, arguments: argparse.Namespace
) -> float:
    """FLOPs per second here, measured on the run that the budget would allow at the ladder's speed."""
    from llm_pretrain.forecast.ladder_training import (
        LOCK,
        MEASURING,
        measure_steps,
        measured_config,
        slots_of,
    )
    from llm_pretrain.forecast.measurements import flops_per_second
    from llm_pretrain.forecast.planning import best_of

    ladder, machine, world_size = forecast.ladder, this_machine(), arguments.world_size
    if (rate := flops_per_second(ladder)) is None:
        raise ConfigError(f"{ladder.folder}: expected runs with measured steps, found none")
    rate *= min(world_size, slots_of(machine, ladder.threads))  # as if processes did not wait for each other
    best = best_of(forecast.choices(seconds * rate, arguments.max_parameters, evaluated))
    config = measured_config(_config(forecast, best, arguments), max(1, machine.cores // world_size))
    context = LaunchContext(find_scripts(["torchrun"]), machine, math.inf)
    try:  # in the ladder's folder, where the next command cleans up after a killed one
        with FileLock(ladder.folder / LOCK, timeout=0), exit_on_signals():
            say(f"measuring steps of hidden size {best.size.hidden_size} on {world_size} processes")
            ((step, _),) = measure_steps([config], ladder.folder / MEASURING, context, world_size)
    except Timeout:
        raise OutputError(
            f"--ladder {ladder.folder}: expected no other command that runs in it, found one; wait for "
            "its end"
        ) from None
    return best.size.step_flops / step


def _lines(
    forecast: Forecast,
    choices: list[Choice],
    config: Config,
    seconds: float | None,
    arguments: argparse.Namespace,
) -> list[str]:
    """The plan in words; `seconds` is the expected time of its run, None if unknown."""
    from llm_pretrain.forecast.planning import best_of
    from llm_pretrain.forecast.scaling_law import INTERVAL_LEVEL
    from llm_pretrain.memory import estimate_memory

    ladder, best = forecast.ladder, best_of(choices)
    model, training, rate = config.model, config.training, config.optimizer.matrix_rate
    low, high = best.prediction.low, best.prediction.high
    bits = [forecast.bits_per_byte(each) for each in (best.prediction.loss, low, high)]
    world_size = arguments.world_size
    here = f"{world_size} process{'es' * (world_size > 1)} here"
    machine = f"{world_size} x {arguments.gpu}" if arguments.gpu else here
    budget = arguments.time or f"{arguments.flops:.3g} FLOPs"
    sizes = {point.hidden_size for point in forecast.decayed.points}
    memory = estimate_memory(config, world_size, on_gpu=arguments.gpu is not None)
    time = f", {duration(seconds)}" if seconds else ""
    if arguments.gpu:
        time += f" at {arguments.mfu or DEFAULT_MFU:.0%} of the peak, which small models do not reach"
    lines = [
        f"plan for {budget} on {machine}, by {len(forecast.decayed.points)} points of {len(sizes)} sizes "
        f"in {ladder.folder}",
        f"size        hidden {model.hidden_size}, {model.num_hidden_layers} layers, "
        f"{best.size.total_parameters:,} parameters",
        f"tokens      {best.training.tokens:,} in {best.steps:,} steps of {training.global_batch_size} x "
        f"{training.sequence_length}, {best.training.tokens / ladder.unique_tokens:.2f} passes of the text",
        f"rate        {config.optimizer.learning_rate:g}"
        + (f", {declaration(config.optimizer.name).title} {rate:g}" if rate is not None else "")
        + f" at hidden size {config.optimizer.base_hidden_size} (muP); decay over the last "
        f"{config.schedule.decay_steps:,} steps",
        f"memory      {size_text(memory.peak)} a process, micro batches of {training.micro_batch_size} in "
        f"{training.precision}",
        f"compute     {best.training.flops:.3g} FLOPs{time}",
        f"loss        {best.prediction.loss:.4f}, between {low:.4f} and {high:.4f} in "
        f"{INTERVAL_LEVEL:.0%} of runs"
        + (f"; bits per byte {bits[0]:.4f}, {bits[1]:.4f} to {bits[2]:.4f}" if all(bits) else ""),
        "sizes for this budget, the best one marked",
    ]
    for choice in choices:
        if 1 / SHOWN <= choice.size.total_parameters / best.size.total_parameters <= SHOWN:
            mark = "*" if choice is best else " "
            lines.append(
                f"{mark} hidden {choice.size.hidden_size:>5}  {choice.size.total_parameters:>13,} parameters"
                f"  {choice.training.tokens:>15,} tokens  loss {choice.prediction.loss:.4f}"
            )
    return lines


def _warnings(forecast: Forecast, best: Choice, config: Config, arguments: argparse.Namespace) -> list[str]:
    """Why the plan may not hold."""
    import torch

    from llm_pretrain.forecast.measurements import shortcomings
    from llm_pretrain.launch.out_of_memory import step_warnings
    from llm_pretrain.memory import CUDA_CONTEXT, estimate_memory

    ladder = forecast.ladder
    warnings = shortcomings(ladder) + forecast.warnings(best)
    if not arguments.gpu:
        device = torch.device("cuda" if this_machine().gpus else "cpu")
        warnings += step_warnings(config, arguments.world_size, device)
    else:
        peak = estimate_memory(config, arguments.world_size, on_gpu=True).peak + CUDA_CONTEXT
        if peak > (total := GPU_GB[arguments.gpu] * 10**9):
            warnings.append(
                f"a step is estimated to need {size_text(peak)}, a GPU has {size_text(total)}: divide the "
                "model, `llm-pretrain simulate --search` finds a mesh, or limit --max-parameters"
            )
    here, there = config.training.precision, ladder.base.training.precision
    if here != there:
        warnings.append(f"the run computes in {here}, the ladder in {there}")
    return [f"warning: {line}" for line in warnings]
