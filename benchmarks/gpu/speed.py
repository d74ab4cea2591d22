"""Rounds 2 and 3: tokens per second and peak memory of a case by our engine, for each choice of settings."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.engine_pairs import Steps
from benchmarks.gpu.parts import Case, Context, dense_twin, stretches, wait
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.out_of_memory import is_out_of_memory
from llm_pretrain.launch.process import prepare_process
from llm_pretrain.memory import estimate_memory
from llm_pretrain.model.sizes import flops_per_token
from llm_pretrain.training.model_setup import check_float8, kernels_in_use
from train_pretrain import TorchrunEngine

LEAST_OF_DENSE = 0.7
"""Of a mixture's tokens per second, in those of its dense twin."""
PEAK_BOUND = 0.08
"""Of the uncompiled peak against what `simulate` predicts, relatively."""
_SMI = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"]


def variants(context: Context, name: str, *words: str) -> None:
    """Measure a case in one process: `default`, NAME=SETTING:VALUE,SETTING:VALUE, or `twin`, a dense model of
    equal active FLOPs. A choice that this machine cannot take is named; one that fails stops no other."""
    case, failed = context.case(name), False
    prepare_process(context.config(case))
    speeds: dict[str, float] = {}
    for number, word in enumerate(words):
        side, _, settings = word.partition("=")
        chosen = dense_twin(case) if side == "twin" else case
        try:
            speeds[side] = _measure(context, chosen, side, [each for each in settings.split(",") if each])
        except ConfigError as error:
            context.emit(f"{case.name}, {side}: not here", error.problems[0])
        except Exception as error:
            if is_out_of_memory(error):
                context.halve([name, *words[number:]])
            failed = True
            context.emit_failure(f"{chosen.name}, {side}", error)
    if {"default", "twin"} <= speeds.keys():
        ratio = speeds["default"] / speeds["twin"]
        twin = dense_twin(case).name.removeprefix(f"{name}'s ")
        context.emit(f"{name}: tokens/s / its {twin}", ratio, goal=LEAST_OF_DENSE)
    if failed:
        sys.exit(1)


def _measure(context: Context, case: Case, side: str, settings: list[str]) -> float:
    """Measure one choice of settings; its tokens per second."""
    on_gpu, steps_each = torch.cuda.is_available(), 1 if context.is_dry else 8
    config = context.config(case, *settings)
    check_float8(config)
    torch._dynamo.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = TorchrunEngine(config)
    begin = time.perf_counter()
    steps = Steps(config, engine)
    steps.step()
    wait()
    first = time.perf_counter() - begin
    tokens = config.training.global_batch_size * config.training.sequence_length
    found = stretches(steps.step, tokens, steps_each)
    estimate = estimate_memory(config, 1, on_gpu=on_gpu).peak
    size = f"{config.training.micro_batch_size} x {config.training.sequence_length}"
    speed = context.emit_speed(
        case, side, found, flops_per_token(config.model, config.training.sequence_length), first,
        micro_batch=size, coarse_estimate_gib=estimate / 2**30,
        kernels=kernels_in_use(config, engine.device, 1).removeprefix("kernels: "),
    )  # fmt: skip
    if side == "uncompiled" and (predicted := context.counted("peaks", case.name)):
        _compare_peak(context, case, predicted)
    if side == "default" and on_gpu:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(subprocess.getoutput, " ".join([*_SMI, "--format=csv"]))
            while not asked.done():
                steps.step()
                wait()
        context.emit(f"{case.name}: nvidia-smi while it trains", asked.result(), show=False)
    return speed


def _compare_peak(context: Context, case: Case, predicted: dict[str, int]) -> None:
    """The measured uncompiled peak beside the one that was simulated, if both are of the same micro batch."""
    if torch.cuda.is_available() and predicted["micro_batch_size"] == case.micro_batch_size:
        ratio = torch.cuda.max_memory_allocated() / predicted["peak"]
        result = f"{'within' if abs(ratio - 1) <= PEAK_BOUND else 'NOT within'} {PEAK_BOUND:.0%}"
        context.emit(f"{case.name}: uncompiled peak / the simulated one", ratio, result=result)
    else:
        sizes = predicted["micro_batch_size"], predicted["peak"] / 2**30
        context.emit(f"{case.name}: simulated peak, GiB, of {sizes[0]} sequences", sizes[1])
