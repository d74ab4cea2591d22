"""Inductor for a GPU that is not there: it generates kernels, and fake tensors pass through the graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import fake_cuda
import torch
import triton
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget

from llm_pretrain.model.kernels import choice as kernels

OPTIONS = {
    "compile_threads": 1,  # in this process, which has the fake device
    "fx_graph_cache": False,
    "joint_graph_constant_folding": False,  # it computes constants on the device
    "use_static_triton_launcher": False,
}


class Driver:
    """What Inductor and Triton ask of a GPU's driver to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * fake_cuda.H100.major + fake_cuda.H100.minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def is_active(self) -> bool:
        return True


@dataclass(frozen=True)
class Kernel:
    """One launch of a compiled graph, and the operations of the traced graph that it computes.

    `accesses` has the bytes of each buffer that it reads or writes, without those inside a fused kernel;
    `extern` is the operation, if a library computes it.
    """

    accesses: dict[str, int]
    origins: list[torch.fx.Node]
    extern: torch.fx.Node | None = None

    @property
    def bytes(self) -> int:
        return sum(self.accesses.values())


@dataclass
class Inductor:
    """A backend of `torch.compile`, to use inside `installed`.

    Args:
        around: Makes the context in which a graph runs, from the graph's kernels.
        to_machine_code: Whether `ptxas` compiles the Triton kernels too, each in its first configuration.
    """

    around: Callable[[list[Kernel]], AbstractContextManager[None]] = nullcontext
    to_machine_code: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    """Of all graphs, in order."""
    machine_code: dict[str, int] = field(default_factory=dict)
    """Bytes of each Triton kernel's cubin, by name."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        traced, before = copy.deepcopy(graph), len(self.kernels)
        compile_fx_inner(graph, inputs, **options)
        kernels = self.kernels[before:]

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            with self.around(kernels):
                return traced(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace what needs a GPU, and keep what is generated."""
        codegen, inductor = inductor_graph.GraphLowering.codegen, self

        def codegen_and_keep(graph: Any) -> Any:
            code = codegen(graph)
            inductor.kernels += filter(None, map(_kernel, graph.scheduler.nodes))
            return code

        def precompile(tuner: CachingAutotuner, *_: Any, **__: Any) -> None:
            if inductor.to_machine_code:
                compiled = tuner._precompile_config(tuner.configs[0]).kernel
                inductor.machine_code[f"{len(inductor.machine_code)} {tuner.fn.__name__}"] = len(
                    compiled.asm["cubin"]
                )

        torch._dynamo.reset()
        triton.runtime.driver.set_active(Driver())
        with ExitStack() as stack:
            stack.enter_context(inductor_config.patch(OPTIONS))
            for owner, name, value in (
                (inductor_graph.GraphLowering, "codegen", codegen_and_keep),
                (CachingAutotuner, "precompile", precompile),
                (triton_helpers, "set_driver_to_gpu", lambda: None),
            ):
                stack.enter_context(patch.object(owner, name, value))
            yield
        torch._dynamo.reset()


def _kernel(node: Any) -> Kernel | None:
    """The kernel of one of the scheduler's nodes; None if the node launches nothing."""
    accesses = {name: size for name, size in node.get_read_write_buffer_accesses(True, True).items() if size}
    if not accesses:
        return None
    parts = [each.node for each in node.get_nodes() if each.node is not None]
    origins = [origin for part in parts for origin in part.get_origins()]
    extern = None
    if node.is_extern() or node.is_template():
        extern = getattr(parts[0], "fx_node", None) or parts[0].get_origin_node()
    return Kernel(accesses, origins, extern)


A100 = {
    "name": "NVIDIA A100-SXM4-80GB",
    "major": 8,
    "minor": 0,
    "multi_processor_count": 108,
    "shared_memory_per_block_optin": 166_912,
    "shared_memory_per_multiprocessor": 167_936,
    "L2_cache_size": 41_943_040,
}
"""Its properties where they differ from the H100's."""


@contextmanager
def on_capability(major: int, minor: int) -> Iterator[None]:
    """The fake device as an A100, or another capability with an A100's limits, inside the context."""
    caches = (DeviceProperties.create, kernels._capability)
    changed = A100 | {"major": major, "minor": minor} if (major, minor) < (9, 0) else {}
    with ExitStack() as stack:
        for cached in caches:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        for name, value in changed.items():
            stack.enter_context(patch.object(fake_cuda.H100, name, value))
        yield
