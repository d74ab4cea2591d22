"""Round 2: what others train with on a GPU, on the same tokens, at the same tokens a step.

All attend over joined documents, as their users' scripts do. A peer that keeps whole logits takes a smaller
micro batch and accumulates. The peers of CPUs are in `benchmarks/peers.py`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.parts import Case, Context, stretches, wait
from benchmarks.peers import transformers_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.store import TokenStore
from llm_pretrain.model.sizes import flops_per_token

MICRO_BATCHES = {"gpt2-124m": {"trainer": 32, "loop": 32}, "qwen3-0.6b": {"trainer": 2, "loop": 2}}
"""Sequences, where the case's own micro batch does not fit."""


def measure(context: Context, kind: str, name: str) -> None:
    """Measure a peer on a case.

    Args:
        context: Of the part.
        kind: `nanogpt` (GPT-2 as nanoGPT writes it, compiled whole), `loop` (transformers' model, compiled
            layer by layer, in a plain loop) or `trainer` (transformers' Trainer).
        name: Of the case.
    """
    case = context.case(name)
    whole = dataclasses.replace(context, halvings=0).case(name).micro_batch_size
    own = MICRO_BATCHES.get(name, {}).get(kind, whole)
    micro = max(1, min(case.micro_batch_size, own >> context.halvings))
    take = {"trainer": _trainer, "loop": _loop, "nanogpt": _nanogpt}[kind]
    take(context, case._replace(micro_batch_size=micro), whole // micro)


def rows_of(context: Context, case: Case) -> np.ndarray:
    """The store's documents, joined and cut into rows of the sequence length."""
    store = TokenStore(context.store(case))
    ids = store.split("train").tokens_at(0, store.facts["splits"]["train"]["tokens"])
    ids = np.asarray(ids).astype(np.int64)
    return ids[: len(ids) // case.length * case.length].reshape(-1, case.length)


def _loop(context: Context, case: Case, accumulation: int) -> None:
    """transformers' model in the loop that one writes by hand: autocast, compiled layers, fused AdamW."""
    config = context.config(case)
    model = _transformers_model(config)
    for layer in model.model.layers if torch.cuda.is_available() else []:
        layer.compile()

    def loss_of(batch: Tensor) -> Tensor:
        return model(input_ids=batch[:, :-1], labels=batch[:, :-1], use_cache=False).loss

    flops = flops_per_token(config.model, case.length)
    _plain_steps(context, "loop", case, accumulation, model, loss_of, flops)


def _nanogpt(context: Context, case: Case, accumulation: int) -> None:
    """GPT-2 (github.com/karpathy/nanoGPT): LayerNorm, learned positions, GELU, biases; compiled whole."""
    shape = context.config(case).model
    assert shape.vocab_size is not None
    model = GPT2(
        shape.vocab_size, case.length, shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads
    )
    counted = sum(each.numel() for each in model.parameters()) - model.wpe.weight.numel()
    flops = 6.0 * counted + 12.0 * shape.num_hidden_layers * shape.hidden_size * case.length
    called = torch.compile(model) if torch.cuda.is_available() else model

    def loss_of(batch: Tensor) -> Tensor:
        return called(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

    _plain_steps(context, "nanogpt", case, accumulation, model, loss_of, flops)


class Block(nn.Module):
    """A pre-norm layer of GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSH: Tensor) -> Tensor:
        size_BSH = x_BSH.shape
        parts = self.c_attn(self.ln_1(x_BSH)).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSH = x_BSH + self.c_proj(attended.transpose(1, 2).reshape(size_BSH))
        return x_BSH + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x_BSH))))


class GPT2(nn.Module):
    """GPT-2 with its loss over whole logits, embedding and head tied."""

    def __init__(self, vocab_size: int, length: int, width: int, layers: int, heads: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "ln_" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSH = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x_BSH = block(x_BSH)
        return F.cross_entropy(self.lm_head(self.ln_f(x_BSH)).flatten(0, 1), labels.flatten())


def _plain_steps(
    context: Context, kind: str, case: Case, accumulation: int, model: nn.Module,
    loss_of: Callable[[Tensor], Tensor], flops: float,
) -> None:  # fmt: skip
    """A plain loop in bf16 autocast: micro batches from pinned memory, clipping, fused AdamW.

    Args:
        context: Of the part.
        kind: Of the peer.
        case: With the peer's micro batch.
        accumulation: Micro batches of a step.
        model: To train, its layers compiled already.
        loss_of: Mean loss of a batch [sequences, length + 1].
        flops: Of a token.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rows = torch.from_numpy(rows_of(context, case))
    ids = torch.cat([rows.flatten(), rows[0, :1]])
    losses: list[Tensor] = []

    def step() -> None:
        for _ in range(accumulation):
            starts = torch.randint(len(rows), (case.micro_batch_size,)) * case.length
            batch = torch.stack([ids[start : start + case.length + 1] for start in starts.tolist()])
            if on_gpu:
                batch = batch.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = loss_of(batch)
            (loss / accumulation).backward()
            losses[:] = [loss.detach()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    step()
    wait()
    first = time.perf_counter() - begin
    tokens = accumulation * case.micro_batch_size * case.length
    found = stretches(step, tokens, 1 if context.is_dry else 8)
    assert math.isfinite(float(losses[0])), f"{kind}: the loss is {losses[0]}"
    size = f"{case.micro_batch_size} x {case.length}, {accumulation} times"
    context.emit_speed(case, kind, found, flops, first, micro_batch=size, loss=float(losses[0]))


def _transformers_model(config: Config) -> Any:
    model = transformers_model(config)
    model.config.use_cache = False
    return model


def _trainer(context: Context, case: Case, accumulation: int) -> None:
    """transformers.Trainer with sdpa, bf16, torch_compile and fused AdamW, fed as `run_clm.py` feeds it."""
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    on_gpu, steps = torch.cuda.is_available(), 1 if context.is_dry else 8
    config, rows, times = context.config(case), rows_of(context, case), list[float]()
    begin = time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # after the first step, after as many to warm up as a stretch has, and after each stretch
            if state.global_step % steps == 1 % steps:
                wait()
                times.append(time.perf_counter())

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input_ids": torch.from_numpy(rows[index]), "labels": torch.from_numpy(rows[index])}

    trainer = Trainer(
        model=_transformers_model(config),
        args=TrainingArguments(
            output_dir=str(Path(context.work, context.part)), max_steps=1 + 4 * steps,
            per_device_train_batch_size=case.micro_batch_size, gradient_accumulation_steps=accumulation,
            learning_rate=3e-4, weight_decay=0.1, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=on_gpu,
            tf32=True if on_gpu else None, torch_compile=on_gpu, use_cpu=not on_gpu, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=10_000, dataloader_num_workers=2 if on_gpu else 0,
        ),
        train_dataset=Rows(), data_collator=default_data_collator, callbacks=[Clock()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    tokens = accumulation * case.micro_batch_size * case.length * steps
    found = [tokens / (end - start) for start, end in pairwise(times[1:])]
    size = f"{case.micro_batch_size} x {case.length}, {accumulation} times"
    flops = flops_per_token(config.model, case.length)
    context.emit_speed(case, "trainer", found, flops, times[0] - begin, micro_batch=size)
