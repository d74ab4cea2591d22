"""DeepSpeed's ZeRO: options, state as a plain model and optimizer, and checks of what it cannot do.

DeepSpeed is an extra, and is imported inside functions only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, ConfigError, DivergedError
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state tensors of a parameter, besides its step."""


def prepare_deepspeed() -> None:
    """Import DeepSpeed for this machine's device, without its warnings.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "distributed.strategy: deepspeed needs the package deepspeed, found none; "
            "DS_BUILD_OPS=0 pip install --no-build-isolation 'llm_pretrain[deepspeed]'"
        )
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)  # without a launcher DeepSpeed would look for MPI
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    warnings.filterwarnings(
        "ignore", message=".*` is deprecated. Please use `torch.distributed", category=FutureWarning
    )
    import deepspeed

    # it would spend half a minute compiling a shared-memory reduction for inference
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def zero_options(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration, besides what Accelerate's plugin fills in.

    bf16 is autocast over fp32 parameters, as under the other strategies; DeepSpeed's bf16 engine would keep
    the router's weights in bf16. No module is listed as safe in lower precision, so gradients are reduced and
    parameters gathered in fp32.
    """
    training = config.training
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "train_batch_size": training.global_batch_size,
        "gradient_clipping": training.max_grad_norm,  # without this option DeepSpeed clips to 1.0
        "gradient_accumulation_steps": config.gradient_accumulation_steps(world_size),
    }
    if training.precision == "bf16":
        options["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return options


def stop_if_diverged(zero: Any, skipped: str | None, step: int) -> None:
    """Stop if a gradient or loss was not finite, since DeepSpeed's engine has stepped or skipped by itself.

    The arguments are the same on every rank, so all ranks stop, before anything is saved.

    Raises:
        DivergedError: on every rank.
    """
    if not (skipped or zero.overflow):
        return
    what = "loss" if skipped == "nonfinite_loss" else "gradient"
    error = DivergedError(
        f"distributed.strategy: deepspeed cannot skip a step, and the {what} of step {step + 1} is not "
        "finite; the run's checkpoints are sound: continue with a lower optimizer.learning_rate or "
        "another data.seed, or under ddp or fsdp, which skip such a step"
    )
    error.shared = True
    raise error


def clip_as_torch(zero: Any, model: nn.Module, config: Config, device: torch.device) -> None:
    """Make ZeRO-1 clip by the norm that `clip_grad_norm_` computes under DDP, bit for bit.

    ZeRO's own norm sums the norms of the ranks' shards; at two ranks this is the only difference from DDP.
    DDP's norm needs every gradient gathered once per step, so it is computed only where bit identity is
    guaranteed: on a CPU or with `training.deterministic`. ZeRO-2 and 3 sum in another order anyway.
    """
    if getattr(zero, "partition_gradients", True) or (
        device.type != "cpu" and not config.training.deterministic
    ):
        return
    parameters, max_norm = list(model.parameters()), config.training.max_grad_norm

    def total_norm(norm_type: float = 2) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        norms = [torch.linalg.vector_norm(safe_get_full_grad(parameter)) for parameter in parameters]
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip(gradients: list[Tensor], norm: Tensor) -> None:
        if max_norm:
            for gradient in gradients:
                gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    zero.scaled_global_norm, zero.unscale_and_clip_grads = total_norm, clip


@contextmanager
def materialized_state(
    zero: Any, model: nn.Module, config: Config, *, loading: bool
) -> Iterator[tuple[nn.Module, Optimizer]]:
    """A plain model and AdamW on the CPU, on every rank, with the state of ZeRO's partitions; collective.

    With `loading` the block fills model and optimizer. When it ends without an error, their state is written
    to the partitions. Each rank holds the whole state: 12 bytes per parameter.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        model: The unwrapped model, whose parameters ZeRO may have partitioned.
        config: Says how the optimizer is built.
        loading: Whether the block fills model and optimizer.

    Raises:
        CheckpointError: AdamW's steps differ between parameters, but ZeRO keeps one count for all.
    """
    assert isinstance(model, Decoder)
    plain = Decoder(model.config)
    optimizer = build_optimizer(plain, config.optimizer)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    if not loading:
        _read(zero, pairs, optimizer)
        _copy_buffers(model, plain)
    yield plain, optimizer
    if loading:
        _write(zero, pairs, optimizer)
        _copy_buffers(plain, model)


@torch.no_grad()
def _read(zero: Any, pairs: list[tuple[nn.Parameter, nn.Parameter]], optimizer: Optimizer) -> None:
    from deepspeed import utils

    get_parameter: Any = utils.safe_get_full_fp32_param  # typed as optional: None for frozen parameters
    get_moment: Any = utils.safe_get_full_optimizer_state
    for zero_parameter, plain_parameter in pairs:
        plain_parameter.copy_(get_parameter(zero_parameter))
    _copy_groups(zero, optimizer)
    steps = [state["step"] for state in zero.state.values()]
    if steps:
        _link_moments(zero)
    for zero_parameter, plain_parameter in pairs if steps else ():
        optimizer.state[plain_parameter] = {"step": steps[0].detach().cpu().clone()} | {
            key: get_moment(zero_parameter, key).cpu().clone() for key in MOMENTS
        }


@torch.no_grad()
def _write(zero: Any, pairs: list[tuple[nn.Parameter, nn.Parameter]], optimizer: Optimizer) -> None:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_optimizer_state

    for zero_parameter, plain_parameter in pairs:
        with GatheredParameters([zero_parameter], modifier_rank=0):  # no effect below ZeRO-3
            zero_parameter.data.copy_(plain_parameter)
    zero.refresh_fp32_params()
    _copy_groups(optimizer, zero)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    if len(steps) > 1 or len(optimizer.state) not in (0, len(pairs)):
        raise CheckpointError(
            f"the checkpoint's AdamW counts {sorted(steps)} steps over {len(optimizer.state)} of "
            f"{len(pairs)} parameters, and ZeRO keeps one count for all; resume it with "
            "distributed.strategy ddp"
        )
    for step in steps:
        _create_moments(zero, step)
        for zero_parameter, plain_parameter in pairs:
            for key in MOMENTS:
                safe_set_full_optimizer_state(
                    zero_parameter, optimizer.state[plain_parameter][key].to(zero.device), key
                )


def _create_moments(zero: Any, step: float) -> None:
    """Create the state of the flat partitions with this step count, as AdamW's first step creates it."""
    partitioned: list[Tensor] = (
        zero.fp32_partitioned_groups_flat if _is_partitioned(zero) else zero.single_partition_of_fp32_groups
    )
    for flat in partitioned:
        zero.state[flat] = {"step": torch.tensor(step, dtype=torch.float32, device=flat.device)} | {
            key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS
        }
    _link_moments(zero)


def _link_moments(zero: Any) -> None:
    """Link ZeRO-1's and ZeRO-2's flat moments to the parameters of every group.

    DeepSpeed itself links them after the first group's step, when the other groups have no moments yet.
    """
    if not _is_partitioned(zero):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _is_partitioned(zero: Any) -> bool:
    """Whether `zero` is of ZeRO-3, which partitions the parameters themselves."""
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _copy_groups(source: Any, target: Any) -> None:
    """Copy the settings of the parameter groups, such as the learning rate."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for buffer, other in zip(source.buffers(), target.buffers(), strict=True):
        other.copy_(buffer)
