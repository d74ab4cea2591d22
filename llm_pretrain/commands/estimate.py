"""`llm-pretrain estimate`: parameters, memory, time and cost of a run, from its configuration alone."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated

from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.schema import NonNegativeFloat, PositiveInt, Range
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, DataError
from llm_pretrain.hardware import DEFAULT_MFU, GPU_GB, device_peak_flops
from llm_pretrain.launch.options import add_configuration, given_options
from llm_pretrain.text import duration, quantity, size_text

EXAMPLES = """\
Every other option is a setting, --section.field VALUE.

examples:
  llm-pretrain estimate --config configs/minimind3-64m.yaml
  llm-pretrain estimate --config configs/qwen3-0.6b.yaml --gpu h200 --world-size 8 --mfu 0.45 --price 3.5
  llm-pretrain estimate --config configs/olmoe-1b-7b.yaml --gpu h100 --world-size 64 --tokens 5e12
  llm-pretrain estimate --config configs/qwen3-30b-a3b.yaml --world-size 64 --distributed.strategy fsdp
"""

_WITHOUT_BF16 = ("t4", "v100")


@dataclass(frozen=True)
class Estimated:
    """What is estimated besides the configuration.

    Args:
        world_size: Processes.
        mfu: Share of the device's peak that is reached.
        price: Price of a device for an hour, for the cost.
        tokens: Token budget, such as 2e9 (default: the configuration's).
    """

    world_size: PositiveInt = 1
    mfu: Annotated[float, Range(gt=0, le=1)] = DEFAULT_MFU
    price: NonNegativeFloat | None = None
    tokens: Annotated[float, Range(ge=1, le=1e18)] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options, and every setting of the configuration."""
    add_configuration(parser, "estimate")
    parser.add_argument(
        "--gpu", type=str.lower, choices=GPU_GB, metavar="NAME",
        help=f"device: {', '.join(GPU_GB)} (default: a CPU)",
    )  # fmt: skip
    add_parameters(parser, Estimated)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate."""
    options = given_options(arguments)
    chosen(arguments, Estimated)
    has_bf16 = None if arguments.gpu is None else arguments.gpu not in _WITHOUT_BF16
    processes = arguments.world_size
    config = with_vocabulary(load_config(options, needs_data=False, has_bf16=has_bf16, world_size=processes))
    if has_bf16 is False and config.training.precision == "bf16":
        raise ConfigError(
            f"training.precision: expected fp16 or fp32 on a {arguments.gpu}, which has no bf16, found bf16"
        )
    _print_model(config)
    _print_memory(config, arguments)
    _print_time(config, arguments)
    return 0


def with_vocabulary(config: Config) -> Config:
    """The configuration with the vocabulary size that the run will have."""
    from llm_pretrain.data.loader import open_stores

    if config.model.vocab_size is not None:
        return config
    try:
        return resolve_model(config, open_stores(config)[0].vocab_size)
    except DataError as error:
        raise ConfigError(
            "model.vocab_size: expected a size, since the configuration leaves it to the data, which is not "
            f"here ({error}); add --model.vocab_size N"
        ) from error


def _print_model(config: Config) -> None:
    from llm_pretrain.memory import token_budget
    from llm_pretrain.model.sizes import count_parameters, flops_per_token

    size, length = count_parameters(config.model), config.training.sequence_length
    print(f"{config.run.name}")
    print(f"  parameters         {size.total:,} total, {size.active:,} active")
    print(f"  FLOPs per token    {quantity(flops_per_token(config.model, length))}, forward and backward")
    print(f"  tokens of the run  {quantity(token_budget(config))}")
    # Chinchilla, arXiv:2203.15556, table 3, rounded
    print(f"  compute-optimal    {quantity(20 * size.active)} tokens (20 per active parameter)")


def _print_memory(config: Config, arguments: argparse.Namespace) -> None:
    from llm_pretrain.memory import CUDA_CONTEXT, TOLERANCE, estimate_memory

    on_gpu, world_size = arguments.gpu is not None, arguments.world_size
    memory = estimate_memory(config, world_size, on_gpu=on_gpu)
    training, strategy = config.training, config.distributed.strategy
    print(
        f"memory of one of {world_size} {'process' if world_size == 1 else 'processes'} ({strategy}, "
        f"{training.precision}, {training.micro_batch_size} x {training.sequence_length} tokens at a time), "
        f"coarse: within {TOLERANCE:.0%}"
    )
    has_buckets = strategy == "ddp" and world_size > 1
    for name, text in (
        ("weights", "in fp32"),
        ("gradients", "in fp32" + ("; DDP's buckets are these" if has_buckets else "")),
        ("optimizer", config.optimizer.name + (", and the average" if config.optimizer.ema_decay else "")),
        ("weight_copies", "of the products' matrices, in low precision, or gathered"),
        ("activations", "kept by the layers for their backward passes"),
        ("head", "its logits and their gradient, and its matrix'"),
        ("temporaries", "of a layer's backward pass"),
        ("heap_holes", "between freed blocks of a CPU's heap, as measured: a quarter of the rest"),
    ):
        if getattr(memory, name):
            print(f"  {name.replace('_', ' '):<19} {size_text(getattr(memory, name)):>11}  {text}")
    exact = "; `llm-pretrain simulate` counts it, with uncompiled layers" if on_gpu else ""
    print(f"  {'peak, about':<19} {size_text(memory.peak):>11}  not all at once; without libraries{exact}")
    if memory.staging:
        print(f"  {'while saving':<19} {size_text(memory.staging):>11}  more in the processor's memory")
    if on_gpu:
        total = GPU_GB[arguments.gpu] * 10**9
        fits = "fits" if memory.peak + CUDA_CONTEXT <= total else "may NOT fit"
        if memory.peak / (1 + TOLERANCE) + CUDA_CONTEXT > total:
            fits = "does NOT fit"
        print(f"  {fits} into {arguments.gpu}'s {total // 10**9} GB with 1 GB for CUDA's context")


def _print_time(config: Config, arguments: argparse.Namespace) -> None:
    from llm_pretrain.memory import estimate_time, token_budget

    if arguments.gpu is None:
        print("time: name a --gpu for tokens per second, hours and cost")
        return
    if config.training.precision == "fp32":
        print("time: not estimated in fp32; the peaks that are known here are those of bf16 and fp16")
        return
    flops = device_peak_flops(arguments.gpu)
    assert flops is not None, arguments.gpu
    tokens = int(arguments.tokens or token_budget(config))
    time = estimate_time(config, arguments.world_size, tokens=tokens, flops=flops, mfu=arguments.mfu)
    peak = f"{flops / 1e12:g} TFLOP/s"
    print(f"time on {arguments.world_size} x {arguments.gpu} at {arguments.mfu:.0%} of {peak}")
    each = time.tokens_per_second / arguments.world_size
    print(f"  tokens per second  {time.tokens_per_second:,.0f}, {each:,.0f} a device")
    whole, of_devices = duration(3600 * time.hours), duration(3600 * time.device_hours)
    print(f"  {quantity(tokens)} tokens in  {whole}, {of_devices} of devices")
    if arguments.price is not None:
        print(f"  cost               {arguments.price * time.device_hours:,.2f}")
