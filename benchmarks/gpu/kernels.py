"""FLOPs and bytes of every kernel of a training step, counted on a fake GPU.

    python -m benchmarks.gpu.kernels CASE …

Prints a line of JSON per case. `roofline.py` runs it, with `tests/cuda_without_gpu` and the package triton on
its path.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fake_cuda  # pyright: ignore[reportMissingImports] (on the path that roofline.py sets; before torch)
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.parts import CASES, case_options
from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.model.sizes import flops_per_token

CASTS, NORMS, OTHER = "casts of weights and their gradients", "norms, rotary, residual", "other"
_CALLERS = {
    "kernels/loss.py": "loss head",
    "torch/optim/": "optimizer",
    "optim/muon.py": "optimizer",
    "optim/orthogonal.py": "optimizer",
    "utils/clip_grad.py": "clipping",
    "model/attention.py": NORMS,
}
"""Part of an operation outside the layers, by the file that calls it."""
_MODULES = {"self_attn": "attention", "gate": "router", "experts": "experts", "mlp": "MLP"}
_UNREAD = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_"}
"""Operations that overwrite their first argument."""


class Launch(NamedTuple):
    """A kernel, or an operation that is one."""

    part: str
    name: str
    flops: float
    """Of matrix products."""
    in_bf16: bool
    """Whether they run on tensor cores in bf16."""
    mfu_flops: float
    """What `flops_per_token` counts for it: attention over whole rows, and nothing computed again."""
    bytes: float
    """Of distinct inputs and outputs in the device's memory."""


def matrix_flops(func: Any, arguments: Sequence[Any], result: Any, squares: float) -> tuple[float, float]:
    """FLOPs of a matrix product or of attention, and those that MFU counts; 0 for another operation.

    Args:
        func: The operation.
        arguments: Its positional arguments, with real or fake tensors.
        result: Its result.
        squares: Sum of the squared lengths of the documents.
    """
    name = func._schema.name
    if name.startswith("torch_attn::_varlen_attn"):
        # the query [T, N, D] and `max_q`, here a row's length; backward has the result's gradient before them
        backward = name.endswith("backward")
        query, columns = (arguments[1], arguments[8]) if backward else (arguments[0], arguments[5])
        rows, *heads = query.shape
        # forward two products, of which half is masked; backward five, the scores again among them
        size = math.prod(heads)
        return (5 if backward else 2) * size * squares, (8 if backward else 4) * size * rows * columns
    if name == "aten::_grouped_mm":
        left, right = arguments[:2]
        found = 2.0 * left.shape[0] * left.shape[1] * right.shape[-1]
    elif (formula := flop_registry.get(func._overloadpacket)) is not None:
        found = float(formula(*(each for each in arguments if isinstance(each, Tensor)), out_val=result))
    else:
        found = 0.0
    return found, found


def _last_module(node: torch.fx.Node) -> tuple[str, str]:
    """Path and class of the module that called the operation, or whose gradient it computes."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", ""))
    return path, getattr(kind, "__name__", str(kind))


def layer_part(nodes: Sequence[torch.fx.Node]) -> str:
    """The part of a layer that a kernel belongs to, by the operations fused into it."""
    names = [str(node.target) for node in nodes]
    computing = [
        node
        for node, name in zip(nodes, names, strict=True)
        if not any(word in name for word in ("view", "permute", "convert", "clone", "transpose", "reshape"))
    ]
    if not computing:
        return CASTS
    found: Counter[str] = Counter()
    for node in computing:
        path, kind = _last_module(node)
        steps = path.replace("'", ".").split(".")
        if kind == "RMSNorm" or not path or "in apply_rotary" in (node.meta.get("stack_trace") or ""):
            return NORMS
        found[next((part for step, part in _MODULES.items() if step in steps), NORMS)] += 1
    return found.most_common(1)[0][0]


def compiled_launch(kernel: Any, squares: float) -> Launch:
    """A kernel of a compiled layer; `kernel` is a `fake_inductor.Kernel`."""
    node = kernel.extern
    if node is None or not isinstance(node.target, torch._ops.OpOverload):
        name = " ".join(sorted({str(each.target).split(".")[1] for each in kernel.origins}))
        return Launch(layer_part(kernel.origins), name[:80], 0, True, 0, kernel.bytes)
    arguments = map_arg(node.args, lambda each: each.meta["val"])
    flops, counted = matrix_flops(node.target, arguments, node.meta["val"], squares)  # type: ignore[arg-type]
    in_bf16 = next(each for each in tree_leaves(arguments) if isinstance(each, Tensor)).dtype.itemsize < 4
    return Launch(layer_part([node]), str(node.target), flops, in_bf16, counted, kernel.bytes)


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; a dimension that was expanded (stride 0) counts once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()


def eager_bytes(func: Any, arguments: Sequence[Any], options: dict[str, Any], result: Any) -> int:
    """Bytes that an operation reads and writes; 0 for views and for tensors without values yet."""
    name = func._schema.name
    if (
        func.is_view
        or name.startswith(("aten::empty", "prim::"))
        or name in ("aten::_unsafe_view", "aten::new_empty")
    ):
        return 0
    outputs = {id(each): each for each in tree_leaves(result) if isinstance(each, Tensor)}
    total, written = 0, 0
    given = list(zip(func._schema.arguments, arguments, strict=False))
    given += [(each, options[each.name]) for each in func._schema.arguments if each.name in options]
    for place, (argument, value) in enumerate(given):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if name == "aten::_fused_adamw_" and argument.name == "grads":
            changed = False  # only to unscale them
        for each in (each for each in tree_leaves(value) if isinstance(each, Tensor)):
            outputs.pop(id(each), None)
            # `out=` and the first argument of `_UNREAD` are written without being read
            is_read = not (changed and (argument.kwarg_only or (name in _UNREAD and place == 0)))
            total += _touched(each) * is_read
            written += _touched(each) * changed
    written += sum(map(_touched, outputs.values()))
    if name == "aten::embedding":  # the rows of the tokens, not the table
        return 2 * written + _touched(arguments[1])
    return total + written


class Step(TorchDispatchMode):
    """The launches of a step: those of the compiled layers, by `layer`, and every other operation.

    Args:
        squares: Sum of the squared lengths of the documents.
    """

    def __init__(self, squares: float):
        super().__init__()
        self.squares, self.is_in_layer = squares, False
        self.launches: list[Launch] = []
        self._known: dict[int, list[Launch]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that compiled layers stay compiled

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextmanager
    def layer(self, kernels: list[Any]) -> Iterator[None]:
        """Count the kernels of a compiled graph instead of the operations that it was made of."""
        if id(kernels) not in self._known:
            self._known[id(kernels)] = [compiled_launch(each, self.squares) for each in kernels]
        self.launches += self._known[id(kernels)]
        self.is_in_layer = True
        yield
        self.is_in_layer = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not self.is_in_layer:
            self._add(func, args, options, result)
        return result

    def _add(self, func: Any, args: Any, options: dict[str, Any], result: Any) -> None:
        tensors = [each for each in tree_leaves((args, options, result)) if isinstance(each, Tensor)]
        if not any(each.device.type == "cuda" for each in tensors):
            return
        size = eager_bytes(func, args, options, result)
        if size == 0:
            return
        flops, counted = matrix_flops(func, args, result, self.squares)
        in_bf16 = any(each.dtype.itemsize < 4 for each in tensors)
        self.launches.append(Launch(_eager_part(func), str(func), flops, in_bf16, counted, size))


def _eager_part(func: Any) -> str:
    name = func._schema.name
    if "embedding" in name:
        return "embedding"
    if "rms_norm" in name:
        return NORMS
    files = {frame.filename for frame in traceback.extract_stack()}
    return next((part for place, part in _CALLERS.items() if any(place in file for file in files)), OTHER)


@torch.library.custom_op("roofline::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("on fake tensors only")


@torch.library.custom_op("roofline::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("on fake tensors only")


_rms_norm.register_fake(lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1])))
_rms_norm_backward.register_fake(
    lambda grad, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight))
)
_rms_norm.register_autograd(
    lambda ctx, grad, _: _rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


def _fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` outside the layers as one kernel, as on a GPU; on fake tensors torch decomposes it."""
    return torch.rms_norm(x, shape, weight, eps) if torch.compiler.is_compiling() else _rms_norm(x, weight)[0]


def step_launches(config: Config, squares: float) -> list[Launch]:
    """The launches of a compiled training step on one GPU: the second, in which optimizer state exists."""
    from fake_inductor import Inductor  # pyright: ignore[reportMissingImports] (see above)
    from fake_steps import fake_loop  # pyright: ignore[reportMissingImports]

    step = Step(squares)
    with ExitStack() as stack:
        inductor = Inductor(around=step.layer)
        stack.enter_context(inductor.installed())
        stack.enter_context(patch.object(F, "rms_norm", _fused_rms_norm))
        loop, batches = fake_loop(stack, config, backend=inductor)

        loop._step(batches)
        step.launches.clear()
        with step:
            loop._step(batches)
    return step.launches


def main(names: Sequence[str]) -> None:
    """Prints a line of JSON per case: its name, FLOPs for MFU, and rows of a count and a `Launch`."""
    missing = fake_cuda.REASON
    if missing is None and find_spec("triton") is None:
        missing = "no package triton for Inductor's kernels; make .venv-triton/.installed"
    if missing:
        print(json.dumps({"skipped": missing}))
        return
    warnings.simplefilter("ignore")
    for case in map(CASES.__getitem__, names):
        options = case_options(case, Path("unused"), Path("unused"))
        config = load_config([*options, "--training.compile", "off"], needs_data=False, has_bf16=True)
        launches = Counter(step_launches(config, case.micro_batch_size * case.length**2))
        rows = [[count, *launch] for launch, count in launches.items()]
        nominal = flops_per_token(config.model, case.length) * case.micro_batch_size * case.length
        print(json.dumps({"case": case.name, "mfu_flops": nominal, "launches": rows}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
