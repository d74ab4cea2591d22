"""Replaces functions while a step is simulated: some of torch, and those that `OURS` names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from llm_pretrain.forecast.simulation import device
from llm_pretrain.forecast.simulation.tracker import Tracker

OURS = {
    "train_pretrain.shard": "there are no data",
    "llm_pretrain.model.moe.top_experts": "the router would choose by values",
    "llm_pretrain.distributed.expert_parallel._rows_by_rank": "reads how many rows travel",
    "llm_pretrain.model.kernels.attention._offsets": "reads where documents begin",
    "llm_pretrain.model.kernels.loss._in_ratio": "reads a gradient",
    "llm_pretrain.model.kernels.layers.HAS_TRITON": "a machine without a GPU may have no Triton",
    "llm_pretrain.model.kernels.grouped_mm": "imports Triton",
    "llm_pretrain.model.kernels.cross_entropy": "imports Triton",
}
"""Names of this package that are replaced, and why."""
_KERNELS = "llm_pretrain.model.kernels"


def _ours(name: str, value: Any) -> AbstractContextManager[Any]:
    assert name in OURS
    return patch(name, value)


@contextmanager
def _our_module(name: str, **functions: Any) -> Iterator[None]:
    """A block in which a module consists of these functions."""
    assert name in OURS
    modules: dict[str, Any] = sys.modules
    before = {name: modules[name]} if name in modules else {}
    modules[name] = SimpleNamespace(**functions)
    try:
        yield
    finally:  # not patch.dict, which also drops modules imported in the block
        del modules[name]
        modules.update(before)


@contextmanager
def outside_a_run() -> Iterator[None]:
    """A block in which an engine uses the existing process group, and takes batches unchanged."""
    with (
        patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        patch.object(dist, "init_process_group"),
        _ours("train_pretrain.shard", lambda batches, *_: batches),
    ):
        yield


@contextmanager
def gpu_kernels(capability: tuple[int, int]) -> Iterator[None]:
    """A block in which the simulated GPU uses the kernels of a GPU with this compute capability."""
    clear = torch.clear_autocast_cache

    def clear_copies() -> None:
        device.autocast_copies.clear()
        clear()

    with (
        patch.object(torch, "clear_autocast_cache", clear_copies),
        patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        patch.object(F, "scaled_dot_product_attention", device.attention),
        _ours(f"{_KERNELS}.layers.HAS_TRITON", True),
        _our_module(f"{_KERNELS}.grouped_mm", grouped_mm=device.GroupedProduct.apply),
        _our_module(
            f"{_KERNELS}.cross_entropy",
            log_partition=device.log_partition,
            write_softmax_gradient=device.write_softmax_gradient,
        ),
    ):
        yield


@contextmanager
def even_router(*, real: bool) -> Iterator[None]:
    """A block in which the router gives assignment i to expert i modulo the number of experts."""
    count = experts = 0

    def top_experts(ranking: Tensor, top_k: int) -> Tensor:
        nonlocal count, experts
        experts = ranking.shape[-1]
        count = ranking.numel() // experts * top_k
        chosen = torch.arange(count, device=ranking.device) % experts
        return chosen.view(*ranking.shape[:-1], top_k)

    def rows_by_rank(sent: Tensor, received: Tensor, ranks: int) -> tuple[list[int], list[int]]:
        own = experts // ranks
        rows = [count // experts + (expert < count % experts) for expert in range(experts)]
        to_rank = [sum(rows[rank * own : (rank + 1) * own]) for rank in range(ranks)]
        return to_rank, [to_rank[0]] * ranks

    with ExitStack() as stack:
        stack.enter_context(_ours("llm_pretrain.model.moe.top_experts", top_experts))
        if not real:
            rows = "llm_pretrain.distributed.expert_parallel._rows_by_rank"
            stack.enter_context(_ours(rows, rows_by_rank))
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """A block in which no code reads a tensor's value, and device meshes consist of real tensors."""
    find, in_ratio = Tensor.nonzero, resolve_name(f"{_KERNELS}.loss._in_ratio")

    def row_offsets(document_ids: Tensor) -> Tensor:
        with unset_fake_temporarily():
            return torch.arange(0, document_ids.numel() + 1, document_ids.shape[1], dtype=torch.int32)

    def nonzero(mask: Tensor) -> Tensor:
        if not isinstance(mask, FakeTensor):
            return find(mask)
        return torch.arange(len(mask), device=mask.device)[:, None]  # every token counts

    def is_in_ratio(grad_loss: Tensor, *rest: Any) -> bool:
        return grad_loss.device.type == "cpu" or in_ratio(grad_loss, *rest)

    with ExitStack() as stack:
        stack.enter_context(_ours(f"{_KERNELS}.loss._in_ratio", is_in_ratio))
        stack.enter_context(_ours(f"{_KERNELS}.attention._offsets", row_offsets))
        stack.enter_context(patch.object(Tensor, "nonzero", nonzero))
        # it would warn about a fake group
        stack.enter_context(patch.object(dist.distributed_c10d, "_set_pg_timeout"))
        for name in ("_concatenate", "_unflatten", "_flatten", "__getitem__"):
            stack.enter_context(_outside_fakes(DeviceMesh, name))
        for module in (_fsdp_init, device_mesh):
            stack.enter_context(_outside_fakes(module, "init_device_mesh"))
        yield


def _outside_fakes(owner: Any, name: str) -> AbstractContextManager[Any]:
    """A block in which a function of a class or module makes real tensors."""
    original = owner.__dict__[name]
    is_static = isinstance(original, staticmethod)
    function = original.__func__ if is_static else original

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return patch.object(owner, name, staticmethod(call) if is_static else call)


@contextmanager
def tracked(tracker: Tracker) -> Iterator[None]:
    """A block that the tracker follows, including storages that are freed or resized in place."""
    resize, infer = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resized(storage: Any, size: int) -> Any:
        made = resize(storage, size)
        tracker.resized(storage, size)
        return made

    def inferred(*arguments: Any) -> Any:
        """DTensor infers shapes on fake tensors, which take no memory."""
        with tracker.paused():
            return infer(*arguments)

    with (
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", inferred),
        tracker,
    ):
        yield


def telling_reductions(tracker: Tracker) -> AbstractContextManager[Any]:
    """A block in which FSDP tells the tracker when it has reduced a layer's gradients."""
    post_backward = FSDPParamGroup.post_backward

    def reduce(group: Any, *unused: Any) -> None:
        post_backward(group, *unused)
        if layer := re.search(r"\blayers\.(\d+)", group._module_fqn or ""):
            tracker.reduced(int(layer[1]))

    return patch.object(FSDPParamGroup, "post_backward", reduce)


class _Works(list[Any]):
    """Outstanding sends and receives; they keep their tensors alive, as those of Gloo and NCCL do."""

    operations: Any


@contextmanager
def telling_micro_batches(tracker: Tracker, count: int) -> Iterator[None]:
    """A block in which the stages of a pipeline tell the tracker what they compute, and know the shapes of
    received tensors without a first exchange.

    A stage has receive buffers for all `count` micro batches of a step, though fewer are traced.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # not in torch 2.11

    batch_p2p = schedules._batch_p2p

    def telling(phase: str) -> AbstractContextManager[Any]:
        name = f"{phase}_one_chunk"
        compute = getattr(PipelineStage, name)

        def run(stage: Any, number: int, *rest: Any, **more: Any) -> Any:
            tracker.enter(phase, number)
            return compute(stage, number, *rest, **more)

        return patch.object(PipelineStage, name, run)

    def of_all(name: str) -> AbstractContextManager[Any]:
        original = getattr(PipelineStage, name)
        return patch.object(PipelineStage, name, lambda stage, _, *rest: original(stage, count, *rest))

    def skip_exchange(schedule: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def keep_tensors(operations: Any, *rest: Any, **more: Any) -> Any:
        works = _Works(batch_p2p(operations, *rest, **more))
        works.operations = operations
        return works

    with (
        telling("forward"),
        telling("backward"),
        of_all("_setup_forward_recv_info"),
        of_all("_setup_backward_recv_info"),
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", skip_exchange),
        patch.object(schedules, "_batch_p2p", keep_tensors),
    ):
        yield
