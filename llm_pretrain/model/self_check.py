"""Compares the kernels that training takes on a device with their definitions, on small inputs.

Definitions are computed in float64 on the CPU. The inputs have the model's sizes; large sizes are reduced.
Input values are exact in the type of the products, so that only the kernel's own arithmetic differs. They are
drawn on the CPU from a fixed seed, so that every rank checks the same values.

Shapes: B sequences, S positions, T = B*S tokens, N query heads, M key and value heads, D head_dim, E experts,
K experts per token, H hidden_size, I moe_intermediate_size, V vocab_size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.optim import AdamW

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.attention import rotary_tables
from llm_pretrain.model.decoder import DecoderLayer, compile_layer
from llm_pretrain.model.kernels.attention import DocumentLayout, document_attention, document_layout
from llm_pretrain.model.kernels.choice import Kernels, experts_kernel, loss_kernel, resolved_kernels
from llm_pretrain.model.kernels.experts import experts_reference
from llm_pretrain.model.kernels.layers import ACTIVATIONS
from llm_pretrain.model.kernels.loss import IGNORE_INDEX
from llm_pretrain.model.layers import RMSNorm
from llm_pretrain.text import type_and_reason

Part = Literal["experts", "attention", "loss", "norm", "optimizer", "compile"]
PARTS: tuple[Part, ...] = ("experts", "attention", "loss", "norm", "optimizer")
FIXED: dict[Part, str] = {"norm": "fused", "optimizer": "fused", "compile": "on"}
"""Implementations of the parts that `Kernels` has no choice for."""
_DOCUMENTS = ((1, 130, 61, 64), (100, 1, 1, 154))
"""Lengths of the documents in each of 2 rows of 256 positions. Some documents have a single token. Some lie
inside a kernel's block (128 positions), and some cross the border of two."""
_TOKENS = sum(map(sum, _DOCUMENTS))
_WIDEST, _MOST_EXPERTS, _MOST_VOCABULARY, _MOST_HEADS = 256, 16, 5000, 2
"""Largest H and I, E (2K if that is more), V (more than the loss kernel's block of 4,096 columns) and M."""
_ALIGNED = 16
"""A reduced size keeps its remainder modulo 16, since alignment decides which kernel and code path runs."""
_SUMMED = 256
"""Rounding errors that the bound allows for sums in fp32; see `error_bound`."""
_TF32 = 2.0**-9
"""Error that the bound allows for products in TF32; see `error_bound`."""
_LOSS_SCALE = 256.0
"""Gradient of the summed loss. With a gradient of 1, small gradients would be subnormal in fp16."""
_STEPS, _RATE, _DECAY, _BETAS, _EPS = 3, 0.1, 0.1, (0.9, 0.95), 1e-8
"""Steps and options of the AdamW that is checked."""


def error_bound(part: Part, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error that rounding explains: `u + 256 · 2⁻²³`, twice that for a compiled layer.

    The first term covers rounding to the type of the products. u is the distance from 1 to the next number:

    - 2⁻⁷ in bf16, 2⁻¹⁰ in fp16;
    - 2⁻⁹ in fp32 if products may use TF32: twice the 2⁻¹⁰ of TF32, since TF32 rounds the inputs too;
    - 0 in fp32 otherwise, and always for norm and optimizer, which compute in fp32.

    Rounding to nearest has an error of at most u/2 and a root mean square error of at most u/(2·sqrt(3)). A
    result or gradient is rounded up to eight times, independently. The relative errors add up to at most
    sqrt(8)·u/(2·sqrt(3)) = 0.82·u.

    The second term covers sums in fp32: the error of a sum of n terms is about sqrt(n)·2⁻²⁴, and n is at most
    5,000. A compiled layer has twice the bound because it runs several kernels in a row.

    The bound of a kernel is below 0.8 %. In every type, the check therefore finds a factor that is 1 % off,
    one missing expert of 16, or a key of another document.
    """
    unit = 0.0
    if part not in ("norm", "optimizer"):
        unit = torch.finfo(dtype).eps
        if dtype == torch.float32:
            allows_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
            unit = _TF32 if allows_tf32 else 0.0
    bound = unit + _SUMMED * torch.finfo(torch.float32).eps
    return 2 * bound if part == "compile" else bound


@dataclass(frozen=True)
class KernelCheck:
    """The check of one kernel on a device.

    Args:
        part: The part that the kernel computes.
        implementation: The kernel's name, as in `Kernels` or `FIXED`.
        reference: The definition that the kernel was compared with, in words.
        forward_error: The largest relative error of a result: `|found - expected| / |expected|` in the
            Euclidean norm of a tensor. Not finite if a result is not finite; None if the kernel raised.
        backward_error: The largest relative error of a gradient (for the optimizer, of a moment).
        bound: The check fails if one of the errors is larger; see `error_bound`.
        error: The exception that the kernel raised, in one line; None if it ran.
        seconds: Duration of the check, compilation included.
    """

    part: Part
    implementation: str
    reference: str
    forward_error: float | None
    backward_error: float | None
    bound: float
    error: str | None
    seconds: float

    @property
    def problem(self) -> str | None:
        """What is wrong with the kernel, in words; None if it may be used."""
        if self.error is not None:
            return f"raised {self.error}"
        for kind, error in (("results", self.forward_error), ("gradients", self.backward_error)):
            if error is None or not error <= self.bound:
                return f"computed {kind} that differ by {error or 0:.1e} (bound: {self.bound:.1e})"
        return None


def check_kernels(
    config: ModelConfig,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    parts: Collection[Part] = PARTS,
) -> list[KernelCheck]:
    """Check the implementations that training would use; one entry for each part that the model has.

    Args:
        config: The model's shape; `vocab_size` None counts as 0.
        kernels: The configured implementations, `auto` included.
        device: The device of the training.
        dtype: Type of the matrix products in training: bf16, fp16 or fp32.
        parts: Parts to check; `compile` compiles a layer of each kind, which takes longer.

    Raises:
        torch.OutOfMemoryError: the device has no room for inputs of a few MB.
    """
    chosen = resolved_kernels(config, kernels, device, dtype)
    on = _Device(device, dtype)
    return [
        _checked(part, config, chosen, on)
        for part in (*PARTS, "compile")
        if part in parts and (part != "experts" or config.moe_layers)
    ]


class _Device(NamedTuple):
    """The device that kernels run on, and the type of their products."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast region that training computes in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


class _Computed(NamedTuple):
    """Results and gradients, in one order for a kernel and its definition."""

    results: list[Any]
    gradients: list[Any]


def _checked(part: Part, config: ModelConfig, kernels: Kernels, on: _Device) -> KernelCheck:
    """Compute a part by its kernel and by its definition, and compare them."""
    case, reference = {
        "experts": (_experts, "sum over all experts"),
        "attention": (_attention, "masked softmax"),
        "loss": (_loss, "cross-entropy of whole logits"),
        "norm": (_norm, "formula"),
        "optimizer": (_optimizer, "formula"),
        "compile": (_compiled, "uncompiled layer"),
    }[part]
    start, errors, raised = time.perf_counter(), (None, None), None
    try:
        found, expected = case(config, kernels, on)
        errors = tuple(_error(*pair) for pair in zip(found, expected, strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raised = type_and_reason(error)[:300]
    return KernelCheck(
        part=part,
        implementation=FIXED.get(part) or getattr(kernels, part),
        reference=reference,
        forward_error=errors[0],
        backward_error=errors[1],
        bound=error_bound(part, *on),
        error=raised,
        seconds=time.perf_counter() - start,
    )


def _error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest relative error of a tensor; infinite if one side lacks a tensor, NaN if a value is NaN."""
    errors = []
    for ours, exact in zip(found, expected, strict=True):
        if ours is None or exact is None:
            errors.append(0.0 if ours is exact else math.inf)
            continue
        target = exact.detach().double().cpu()
        distance = (ours.detach().double().cpu() - target).norm()
        errors.append((distance / target.norm().clamp(min=1e-300)).item())
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


class _Inputs:
    """Random values that are exact in `dtype`; every instance draws the same values."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """fp32 [shape], on the CPU."""
        return (torch.randn(*shape, generator=self.generator) * std).to(self.dtype).float()


def _computed(
    function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> _Computed:
    """Results of `function`, and the gradients of its first results with respect to `leaves`.

    Args:
        function: Takes the leaves as arguments.
        leaves: Inputs and weights.
        grad_outputs: Gradients of the first results, in their order; further results are not differentiated.
    """
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    results = function(*leaves)
    grad_outputs = [grad.to(result) for grad, result in zip(grad_outputs, results, strict=False)]
    gradients = torch.autograd.grad(results[: len(grad_outputs)], leaves, grad_outputs, allow_unused=True)
    return _Computed(list(results), list(gradients))


def _compared(
    kernel: Callable[..., Sequence[Tensor]],
    definition: Callable[..., Sequence[Tensor]],
    leaves: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    device: torch.device,
) -> tuple[_Computed, _Computed]:
    """The kernel on the device, in the leaves' types, and its definition in float64 on the CPU."""
    return (
        _computed(kernel, [leaf.to(device) for leaf in leaves], grad_outputs),
        _computed(definition, [leaf.double() for leaf in leaves], grad_outputs),
    )


def _capped(size: int, cap: int) -> int:
    """`size` if it is at most `cap`, else the largest number up to `cap` with that remainder modulo 16."""
    return size if size <= cap else cap - (cap - size) % _ALIGNED


def _experts(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """The experts' sum [T, H]: one expert gets no token, the others get different numbers of tokens."""
    draw, top_k = _Inputs(on.dtype), config.num_experts_per_tok
    experts = min(config.num_experts, max(_MOST_EXPERTS, 2 * top_k))
    hidden, width = (_capped(n, _WIDEST) for n in (config.hidden_size, config.expert_intermediate_size))
    scores = draw.normal(_TOKENS, experts) + torch.arange(experts) / experts
    if experts > top_k:
        scores[:, 0] = -math.inf
    chosen = scores.topk(top_k).indices
    leaves = (
        draw.normal(_TOKENS, hidden),
        draw.normal(experts, 2 * width, hidden, std=hidden**-0.5),
        draw.normal(experts, hidden, width, std=width**-0.5),
        draw.normal(_TOKENS, top_k).abs(),
    )
    kernel = experts_kernel(kernels, on.device, on.dtype, (experts, hidden, width))
    chosen_on_device, activation = chosen.to(on.device), ACTIVATIONS[config.hidden_act]
    return _compared(
        lambda *tensors: [kernel(*tensors, chosen_on_device, on.dtype, activation)],
        lambda x, gate_up, down, weights: [
            experts_reference(x, gate_up, down, weights, chosen, torch.float64, activation)
        ],
        leaves,
        [draw.normal(_TOKENS, hidden)],
        on.device,
    )


def _document_ids() -> tuple[Tensor, Tensor]:
    """Document ids, int64 [B, S], and offsets, int32; the last offset is repeated, as in a padded batch."""
    rows = [[index for index, length in enumerate(row) for _ in range(length)] for row in _DOCUMENTS]
    lengths = torch.tensor([0, *(length for row in _DOCUMENTS for length in row), 0, 0])
    return torch.tensor(rows), lengths.cumsum(0).int()


def _visible(ids: Tensor) -> Tensor:
    """bool [B, 1, S, S]: whether a key is in the query's document, at or before the query."""
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal


def _attention(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """Attention [B, S, N, D]. Scores have a standard deviation of two, so that a wrong scale is found."""
    draw, size = _Inputs(on.dtype), config.attention_head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    heads = min(config.num_key_value_heads, _MOST_HEADS)
    ids, offsets = _document_ids()
    layout = document_layout(ids.to(on.device), offsets.to(on.device), kernels.attention)  # pyright: ignore[reportArgumentType] (resolved: not auto)
    visible = _visible(ids)

    def definition(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        key, value = (each.repeat_interleave(groups, 2) for each in (key, value))
        scores = torch.einsum("bsnd,btnd->bnst", query, key) * size**-0.5
        probabilities = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return [torch.einsum("bnst,btnd->bsnd", probabilities, value)]

    leaves = (
        draw.normal(*ids.shape, groups * heads, size, std=2.0),
        draw.normal(*ids.shape, heads, size),
        draw.normal(*ids.shape, heads, size),
    )
    return _compared(
        lambda query, key, value: [document_attention(query, key, value.to(on.dtype), layout, 0.0)],
        definition,
        leaves,
        [draw.normal(*ids.shape, groups * heads, size)],
        on.device,
    )


def _loss(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """The summed loss, 0-dim, and the loss of each token [2, T/4]; half of the labels are masked."""
    draw, coefficient = _Inputs(on.dtype), kernels.z_loss_coef
    hidden, vocab_size = (
        _capped(config.hidden_size, _WIDEST),
        _capped(config.vocab_size or 1, _MOST_VOCABULARY),
    )
    labels = torch.randint(0, vocab_size, (2, _TOKENS // 4), generator=draw.generator)
    labels[0, 0], labels[0, 1] = 0, vocab_size - 1
    mask = torch.rand(labels.shape, generator=draw.generator) < 0.5
    mask[0, :2] = True
    kernel = loss_kernel(kernels, vocab_size)
    targets = (labels.masked_fill(~mask, IGNORE_INDEX).to(on.device), mask.to(on.device))

    def ours(states: Tensor, weight: Tensor) -> list[Tensor]:
        with on.autocast():
            sums = kernel(states, weight, *targets, coefficient)
        # as in `Objective`: if the coefficient is 0, the z-loss is not added and has no gradient
        objective = sums.loss + coefficient * sums.z_loss if coefficient else sums.loss
        return [objective, sums.token_losses]

    def definition(states: Tensor, weight: Tensor) -> list[Tensor]:
        logits = states @ weight.t()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask
        squares = logits.logsumexp(-1).square() * mask
        return [losses.sum() + coefficient * squares.sum(), losses]

    leaves = (draw.normal(*labels.shape, hidden), draw.normal(vocab_size, hidden, std=hidden**-0.5))
    return _compared(ours, definition, leaves, [torch.tensor(_LOSS_SCALE)], on.device)


def _norm(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """RMSNorm of rows of H and of D values: [T, H] and [T, D]."""
    draw, eps = _Inputs(torch.float32), config.rms_norm_eps
    sizes = (config.hidden_size, config.attention_head_dim)
    leaves, grad_outputs = [], []
    for size in sizes:
        leaves += [draw.normal(_TOKENS, size), 1 + draw.normal(size, std=0.1)]
        grad_outputs.append(draw.normal(_TOKENS, size))

    def ours(*tensors: Tensor) -> list[Tensor]:
        with on.device:
            modules = [RMSNorm(size, eps) for size in sizes]
        pairs = zip(modules, tensors[::2], tensors[1::2], strict=True)
        return [functional_call(module, {"weight": weight}, x) for module, x, weight in pairs]

    def definition(*tensors: Tensor) -> list[Tensor]:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return [x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight for x, weight in pairs]

    return _compared(ours, definition, leaves, grad_outputs, on.device)


def _optimizer(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """Three steps of fused AdamW on a matrix and a vector, then a step that `found_inf` must skip."""
    draw = _Inputs(torch.float32)
    shapes = ((3, 67), (130,))
    values = [draw.normal(*shape, std=0.1) for shape in shapes]
    gradients = [[draw.normal(*shape) for shape in shapes] for _ in range(_STEPS)]
    parameters = [torch.nn.Parameter(value.to(on.device, copy=True)) for value in values]
    options: dict[str, Any] = {"lr": _RATE, "betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY}
    optimizer = AdamW(parameters, fused=True, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(on.device)
        optimizer.step()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.found_inf = torch.ones((), device=on.device)  # type: ignore[attr-defined]  # torch's name
    optimizer.step()
    moments = [optimizer.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
    exact = [
        _adamw(value.double(), [step[i].double() for step in gradients]) for i, value in enumerate(values)
    ]
    expected = _Computed([each[0] for each in exact], [moment for each in exact for moment in each[1:]])
    return _Computed(list(parameters), moments), expected


def _adamw(value: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter and its moments after a step with each gradient (arXiv:1711.05101, algorithm 2)."""
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, 1):
        mean = _BETAS[0] * mean + (1 - _BETAS[0]) * gradient
        square = _BETAS[1] * square + (1 - _BETAS[1]) * gradient.square()
        corrected, root = mean / (1 - _BETAS[0] ** step), (square / (1 - _BETAS[1] ** step)).sqrt()
        value = value * (1 - _RATE * _DECAY) - _RATE * corrected / (root + _EPS)
    return value, mean, square


def _compiled(config: ModelConfig, kernels: Kernels, on: _Device) -> tuple[_Computed, _Computed]:
    """A layer of each kind, compiled on the device and uncompiled in float64 on the CPU.

    The layer has only K experts, so that every token passes through all: rounding could change a choice.
    """
    from torch import _dynamo

    heads = min(config.num_key_value_heads, _MOST_HEADS)
    small = replace(
        config,
        hidden_size=_capped(config.hidden_size, _WIDEST),
        intermediate_size=_capped(config.intermediate_size, _WIDEST),
        moe_intermediate_size=_capped(config.expert_intermediate_size, _WIDEST),
        head_dim=config.attention_head_dim,
        num_key_value_heads=heads,
        num_attention_heads=heads * (config.num_attention_heads // config.num_key_value_heads),
        num_experts=config.num_experts_per_tok if config.num_experts else 0,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    found, expected = _Computed([], []), _Computed([], [])
    try:
        for index in {config.is_moe_layer(each): each for each in range(config.num_hidden_layers)}.values():
            draw, exact = _Inputs(on.dtype), DecoderLayer(small, index, Kernels(experts="reference"))
            with on.device:
                layer = DecoderLayer(small, index, kernels)
            leaves = [draw.normal(len(_DOCUMENTS), _TOKENS // len(_DOCUMENTS), small.hidden_size)]
            for parameter in layer.parameters():
                value = draw.normal(*parameter.shape, std=parameter.shape[-1] ** -0.5)
                leaves.append(value if value.dim() > 1 else value + 1)
                parameter.data.copy_(leaves[-1])
            compile_layer(layer)
            grad_output = draw.normal(*leaves[0].shape)
            with on.autocast():
                got = _layer(layer, small, kernels, leaves[0].to(on.device), grad_output)
            names = [name for name, _ in exact.named_parameters()]

            def definition(
                x: Tensor, *values: Tensor, exact: Any = exact, names: list[str] = names
            ) -> list[Tensor]:
                weights = dict(zip(names, values, strict=True))
                return [functional_call(exact, weights, _layer_inputs(x, small, None))[0]]

            want = _computed(definition, [leaf.double() for leaf in leaves], [grad_output])
            for total, part in ((found, got), (expected, want)):
                total.results.extend(part.results)
                total.gradients.extend(part.gradients)
    finally:
        _dynamo.reset()  # else the graphs of these layers count towards the limit for the model's graphs
    return found, expected


def _layer_inputs(x: Tensor, config: ModelConfig, implementation: Any) -> tuple[Any, ...]:
    """Arguments of a layer; `implementation` of attention decides the layout, and None makes a mask."""
    ids, offsets = (each.to(x.device) for each in _document_ids())
    if implementation is None:
        layout = DocumentLayout(mask=_visible(ids))
    else:
        layout = document_layout(ids, offsets, implementation)
    positions = torch.arange(ids.shape[1], device=x.device)[None]
    return x, *rotary_tables(positions, config, x.dtype), layout, torch.ones_like(ids, dtype=torch.bool)


def _layer(
    layer: DecoderLayer, config: ModelConfig, kernels: Kernels, x: Tensor, grad_output: Tensor
) -> _Computed:
    """The result of a compiled layer, and the gradients of its input and parameters."""
    x = x.detach().clone().requires_grad_()
    out, _ = layer(*_layer_inputs(x, config, kernels.attention))
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad([out], leaves, [grad_output.to(out)], allow_unused=True)
    return _Computed([out], list(gradients))
