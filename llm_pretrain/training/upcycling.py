"""A dense decoder's weights as the start of a mixture of experts that computes the same function.

Sparse upcycling (arXiv:2212.05055): every expert begins as the dense layer's SwiGLU, or as a slice of it
(fine-grained: arXiv:2410.07524, section 4.2). Only tensors; which settings allow it is told before any
is read.

Shapes: E experts, K experts per token, G slices that make up the dense width, I an expert's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_pretrain.config import ModelConfig
from llm_pretrain.model import Decoder


def has_dense_layers(model: ModelConfig) -> bool:
    """Whether some layer has no experts."""
    return len(model.moe_layers) < model.num_hidden_layers


def upcycling_problems(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """Why the experts of `ours` cannot start equal to the dense layers of `theirs`, one line each."""
    dense, expert = theirs.intermediate_size, ours.expert_intermediate_size
    chosen, experts = ours.num_experts_per_tok, ours.num_experts
    if dense % expert:
        return [
            f"model.moe_intermediate_size: expected {dense}, the dense width, or a whole part of it, found "
            f"{expert}"
        ]
    slices, problems = dense // expert, []
    if chosen % slices or experts % slices:
        problems.append(
            f"model.num_experts_per_tok, model.num_experts: expected multiples of {slices}, the "
            f"experts that make up the dense width ({dense} / {expert}), found {chosen} and {experts}"
        )
    if not ours.norm_topk_prob and (chosen < experts or ours.scoring_func != "softmax"):
        problems.append(
            "model.norm_topk_prob: expected true, since otherwise the experts' weights do not sum to one "
            "and the model would not start as the dense one, found false"
        )
    return problems


@torch.no_grad()
def upcycle(source: dict[str, Tensor], model: Decoder, theirs: ModelConfig) -> list[str]:
    """Turn the dense state `source` into a state of `model` that computes the same logits, in place.

    With G = dense width / I: expert e is slice e mod G of the dense SwiGLU, and the routers' initial rows
    are repeated G times, so that the top K = t·G experts are the t best rows' whole sets of slices
    ("virtual groups", arXiv:2410.07524). The weights of the chosen sum to `routed_scaling_factor`, and
    each set gets its share G times over, so `down_proj` is multiplied by G / routed_scaling_factor.
    With G = 1 that is every expert a copy and the router as initialised. Shared experts begin silent:
    their `down_proj` is zero, the rest random.

    Args:
        source: `Decoder.state_dict()` of a dense decoder.
        model: With its initial weights; its shape has passed `upcycling_problems`.
        theirs: The dense shape.
    """
    ours, initial = model.config, model.state_dict()
    slices = theirs.intermediate_size // ours.expert_intermediate_size
    scale = slices / ours.routed_scaling_factor
    for layer in ours.moe_layers:
        prefix = f"model.layers.{layer}.mlp."
        gate, up, down = (source.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
        halves = zip(gate.chunk(slices), up.chunk(slices), strict=True)
        pairs = torch.stack([torch.cat(pair) for pair in halves])
        downs = torch.stack(down.chunk(slices, dim=1)) * scale
        sets = ours.num_experts // slices
        source[f"{prefix}experts.gate_up_proj"] = pairs.repeat(sets, 1, 1)
        source[f"{prefix}experts.down_proj"] = downs.repeat(sets, 1, 1)
        rows = initial[f"{prefix}gate.weight"]
        source[f"{prefix}gate.weight"] = rows[::slices].repeat_interleave(slices, dim=0)
        for name, tensor in initial.items():
            if name.startswith(prefix) and "shared_expert" in name:
                silent = name.endswith("down_proj.weight")
                source[name] = torch.zeros_like(tensor) if silent else tensor.clone()
    what = f"a slice of 1/{slices} of" if slices > 1 else "a copy of"
    note = f"upcycled: each of {ours.num_experts} experts in {len(ours.moe_layers)} layers is {what} the"
    return [f"{note} dense layer's SwiGLU"]
