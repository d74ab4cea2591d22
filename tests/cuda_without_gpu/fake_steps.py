"""The training step of both scripts on fake CUDA tensors, and every operation that it dispatched."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from support.engines import engine_class, reset_accelerate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import train_pretrain
from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training import trainer
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.model_setup import build_model
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.step import Step

CUDA = torch.device("cuda", 0)

WAITS = {
    *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero"),
    *("aten::masked_select", "aten::_unique2", "aten::bincount", "aten::repeat_interleave.Tensor"),
}
"""Operations that copy a value or a size from the device to the host."""

DENSE: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
}
MOE: dict[str, Any] = DENSE | {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 1e-3,
}


def fake_config(model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Two micro batches of 2 x 1,024 tokens in bf16, uncompiled; `sections` change that."""
    training = {"precision": "bf16", "micro_batch_size": 2, "global_batch_size": 4, "compile": "off"}
    training |= {"sequence_length": 1024} | sections.pop("training", {})
    return from_dict({"model": model, "training": training, **sections})


@dataclass
class Watched(TorchDispatchMode):
    """Every operation below it, and those that wait for the device."""

    operations: list[str] = field(default_factory=list)
    """Name, then type, shape and strides of each tensor."""
    waits: list[str] = field(default_factory=list)
    """Operation, and the lines of this project from which it came."""
    decisions: int = 0
    """Steps that the monitor decided on the host, which waits for the device by design."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        self.operations.append(f"{func} " + " ".join(map(_described, tensors)))
        name = func._schema.name
        crosses = (
            name in ("aten::_to_copy", "aten::copy_") and len({each.device.type for each in tensors}) > 1
        )
        if name in WAITS or crosses:
            self.waits.append(f"{name} in {_own_lines()}")
        return out


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.device.type} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _own_lines() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/llm_pretrain/" in frame.filename]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-3:])


def fake_batch(config: Config, pieces: int = 64, micro_batch: int = 0) -> Batch:
    """A packed micro batch on the device; the digest stays on the host."""
    rows, length = config.training.micro_batch_size, config.training.sequence_length
    zeros = torch.zeros((rows, length), dtype=torch.int64, device=CUDA)
    digest: Any = SimpleNamespace(tolist=lambda: [0] * 8)
    return Batch(
        input_ids=zeros,
        position_ids=zeros,
        document_ids=zeros,
        labels=zeros,
        loss_mask=zeros.bool(),
        num_loss_tokens=rows * length,
        step=0,
        micro_batch=micro_batch,
        digest=digest,
        document_offsets=torch.zeros(pieces + 1, dtype=torch.int32, device=CUDA),
    )


def fake_model(config: Config) -> Decoder:
    """The configured model on the device; call it inside a FakeTensorMode."""
    with CUDA:
        return build_model(config, CUDA)


def fake_loop(
    stack: ExitStack, config: Config, launcher: str = "torchrun", backend: Any = None
) -> tuple[Any, list[Batch]]:
    """The loop of a run on one fake GPU, and the micro batches of a step for its `_step`.

    An operation that needs a value on the device raises DataDependentOutputException. `stack` receives the
    contexts that the loop needs; `backend` compiles the layers.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    stack.callback(torch.use_deterministic_algorithms, deterministic)
    torch.use_deterministic_algorithms(config.training.deterministic)
    reset_accelerate()
    engine = engine_class(launcher)(config)
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    model = fake_model(config)
    for layer in model.model.layers if backend else ():
        layer.compile(backend=backend)
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    in_place: Any = lambda device: model  # noqa: E731
    model.to = in_place  # fake tensors cannot be swapped
    stack.enter_context(patch.object(train_pretrain, "shard", lambda loader, *_: loader))
    loader: Any = []
    engine.prepare(model, optimizer, loader, lambda model: None)
    loop: Any = object.__new__(trainer.Trainer)
    loop.config, loop.engine, loop.progress = config, engine, Progress()
    loop.decision = Decision(config, engine, loop.progress)
    loop.decision.settle = settled
    loop.recorder = SimpleNamespace(add=lambda step, rate: None)
    count = config.gradient_accumulation_steps(1)
    return loop, [fake_batch(config, micro_batch=index) for index in range(count)]


def settled(step: Step) -> None:
    """Fill in what nobody can read from a fake tensor."""
    step.grad_norm, step.loss = 1.0, 1.0


def watched_step(config: Config, launcher: str = "torchrun") -> Watched:
    """The second training step of a run on one fake GPU, by the loop's own `_step`; see `fake_loop`."""
    watched = Watched()
    with ExitStack() as stack:
        loop, batches = fake_loop(stack, config, launcher)

        def settle(step: Step) -> None:
            watched.decisions += 1
            settled(step)

        loop.decision.settle = settle
        stack.enter_context(watched)
        loop._step(batches)  # the optimizer's state is created
        watched.decisions, watched.operations, watched.waits = 0, [], []
        loop._step(batches)
    return watched
