"""`training.compile`: each decoder layer through `torch.compile`, in place: parameters keep their names.

Only training's own passes are compiled. What runs now and then, in other shapes and without gradients,
runs eagerly: an evaluation gives the same bits as `llm-pretrain evaluate`, and generation compiles nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import nn

from llm_pretrain.config import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model import Decoder, Experts


def compiles(config: Config) -> bool:
    """Whether layers are compiled: as configured; `auto` on a GPU, but not under DeepSpeed."""
    choice = config.training.compile
    if choice == "auto":
        return torch.cuda.is_available() and config.distributed.strategy != "deepspeed"
    return choice == "on"


def check_compiler(config: Config) -> None:
    """Stop before any model is built where what `torch.compile` generates could not be compiled.

    Raises:
        ConfigError: a C++ compiler (CPU), a C compiler or Triton (GPU) is missing.
    """
    if not compiles(config):
        return
    if not torch.cuda.is_available():
        missing = None if _has_cpp_compiler() else "a C++ compiler (g++ or clang++, or CXX)"
    elif find_spec("triton") is None:
        missing = "the package triton"
    else:
        names = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
        missing = None if any(map(shutil.which, names)) else "a C compiler (gcc or clang, or CC)"
    if missing:
        raise ConfigError(
            f"training.compile: expected {missing} for what torch.compile generates, found none; install it, "
            "or set training.compile off"
        )


def _has_cpp_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (exc.InvalidCxxCompiler, RuntimeError):
        return False


def compile_layers(model: Decoder, config: Config) -> None:
    """Compile the layers of a model that is not wrapped or sharded yet, if the configuration asks for it.

    Layers that are alike share what is compiled. On a CPU the experts stay opaque, as attention within
    documents does: both run over numbers that differ from batch to batch, and would be compiled for each.
    """
    if not compiles(config):
        return
    for layer in model.model.layers:
        if not torch.cuda.is_available():
            for module in layer.modules():
                if isinstance(module, Experts):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore  # the same signature
        layer.compile()


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run compiled layers as if they were not, as long as the context lasts."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield
