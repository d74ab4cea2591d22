"""The balance loss over the whole global batch: exact at every split, with one counting pass more.

Shares of the micro batch at hand are put into both engines in tests/traps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.corpora import make_config
from support.engines import reset_accelerate, run_engine, small_config
from support.faults import Fault, Patch, replace_everywhere
from support.stepping import relative_error
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import global_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.model.moe import Router
from llm_pretrain.training.engine import seed_dropout
from llm_pretrain.training.model_setup import initialize_weights
from llm_pretrain.training.recorder import loss_metrics
from llm_pretrain.training.step import Objective, Step, attach_global_expert_counts


def unseeded_counting(patch: Patch, engine: type) -> None:
    """The counting pass draws other dropout than the training pass."""

    def seed(config: Config, batch: Batch) -> None:
        if torch.is_grad_enabled():
            seed_dropout(config, batch)

    replace_everywhere(patch, seed_dropout, seed)


MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    router_aux_loss_coef=0.5,
    router_aux_loss_scope="global_batch",
)
SPLITS = [(1, 8), (1, 1), (2, 2), (4, 1)]
SPLIT_NAMES = ["1x1", "1x8", "2x2", "4x2"]
"""(W, B) of a global batch of 8 sequences, and W x A."""


class OneProcess:
    """What the counting pass asks of an engine, for all ranks' micro batches in one process."""

    def __init__(self, model: Decoder, config: Config, world_size: int, *, bf16: bool = False):
        self.model, self.config, self.world_size, self.bf16 = model, config, world_size, bf16
        self.device, self.objective = torch.device("cpu"), Objective(config, world_size)
        self.outputs: list[DecoderOutput] = []
        self.reduced: list[Tensor] = []

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def forward(self, batch: Batch) -> DecoderOutput:
        seed_dropout(self.config, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            self.outputs.append(self.model(**batch.model_inputs()))
        return self.outputs[-1]

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        self.reduced.append(tensor.clone())
        return tensor.clone()


def config_of(store: TokenStore, micro_batch_size: int, **model: object) -> Config:
    config = make_config(
        store, micro_batch_size=micro_batch_size, global_batch_size=8, max_steps=3, sequence_length=48
    )
    return dataclasses.replace(config, model=dataclasses.replace(MODEL, **model))


def build(config: Config, dtype: torch.dtype, *, checkpointing: bool = False) -> Decoder:
    model = Decoder(config.model, activation_checkpointing=checkpointing)
    initialize_weights(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0 if "gate.weight" in name else 1.5)  # away from a uniform router
    return model.to(dtype).train()


def window_of(config: Config, world_size: int) -> list[Batch]:
    """All ranks' micro batches of the first step."""
    size = config.gradient_accumulation_steps(world_size) * world_size
    return list(global_batches(config, start_step=0))[:size]


def train(engine: Any, config: Config) -> tuple[dict[str, Tensor], Step]:
    """Gradients of W ranks and A micro batches, and the step's reduced sums."""
    batches = window_of(config, engine.world_size)
    accumulation = config.gradient_accumulation_steps(engine.world_size)
    step = Step.begin(batches, engine, lambda step: True)
    for batch in step.micro_batches:
        loss = step.add(engine.forward(batch), batch) / accumulation
        (loss / engine.world_size).backward()
    model = engine.model
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, step


def definition(model: Decoder, batches: Sequence[Batch], config: Config) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, and mean over layers of E · Σ_e f_e · P_e, of all batches in one graph."""
    gates = [module for module in model.modules() if isinstance(module, Router)]
    inputs: dict[Module, list[Tensor]] = {gate: [] for gate in gates}
    hooks = [
        gate.register_forward_pre_hook(lambda gate, seen: inputs[gate].append(seen[0])) for gate in gates
    ]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        seed_dropout(config, batch)
        logits = model(batch.input_ids, batch.position_ids, batch.document_ids).logits
        # labels say which positions to ignore
        total = total + cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    for hook in hooks:
        hook.remove()
    mask = torch.cat([batch.loss_mask.flatten() for batch in batches]).double()
    balances = []
    for gate in gates:
        hidden = torch.cat([each.flatten(0, 1) for each in inputs[gate]])
        probs = (hidden @ gate.weight.T).softmax(-1)
        top = probs.topk(config.model.num_experts_per_tok, -1).indices
        chosen = torch.zeros_like(probs).scatter(-1, top, 1.0)
        share = (mask[:, None] * chosen).sum(0) / (config.model.num_experts_per_tok * mask.sum())
        mean_prob = (mask[:, None] * probs).sum(0) / mask.sum()
        balances.append(config.model.num_experts * (share.detach() * mean_prob).sum())
    return total / mask.sum(), torch.stack(balances).mean()


def reference(config: Config) -> tuple[dict[str, Tensor], float]:
    """float64 gradients of the definition over the whole global batch, and its balance loss."""
    model = build(config, torch.float64)
    loss, balance = definition(model, window_of(config, 1), config)
    (loss + config.model.router_aux_loss_coef * balance).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, balance.item()


@pytest.fixture(scope="module")
def store(masked_store) -> TokenStore:
    return TokenStore(masked_store)


@pytest.fixture(scope="module")
def exact(store: TokenStore) -> tuple[dict[str, Tensor], float]:
    return reference(config_of(store, micro_batch_size=8))


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "dtype", "bound"),
    [*((*split, torch.float64, 1e-12) for split in SPLITS), (2, 2, torch.float32, 1e-6)],
    ids=[*SPLIT_NAMES, "fp32"],
)
def test_gradients_and_loss_are_the_global_batch_s_at_every_split(
    store: TokenStore,
    exact: tuple[dict[str, Tensor], float],
    world_size: int,
    micro_batch_size: int,
    dtype: torch.dtype,
    bound: float,
):
    config = config_of(store, micro_batch_size)
    stored: dict[str, Tensor] = {}
    for checkpointing in (False, True):
        engine = OneProcess(build(config, dtype, checkpointing=checkpointing), config, world_size)
        gradients, step = train(engine, config)
        stored = stored or gradients
        assert all(torch.equal(stored[name], gradients[name]) for name in stored), "recomputed otherwise"
        for part in ("", "mlp.gate"):
            assert relative_error(gradients, exact[0], part) < bound, (part, checkpointing)
        tokens = sum(batch.num_loss_tokens for batch in window_of(config, world_size))
        found = loss_metrics(step, config)["train/aux_loss"]
        assert found == pytest.approx(config.model.router_aux_loss_coef * exact[1], rel=bound)
        assigned = tokens * config.model.num_experts_per_tok
        assert step.sums.expert_counts.sum(-1).tolist() == [assigned] * 2, "a recomputation counts twice"


def test_it_is_another_loss_than_the_other_scopes(store: TokenStore, exact: tuple[dict[str, Tensor], float]):
    """The batch is ragged enough, and the router far enough from uniform, to tell the scopes apart."""
    for scope in ("sequence", "micro_batch"):
        config = config_of(store, 1, router_aux_loss_scope=scope)
        gradients, _ = train(OneProcess(build(config, torch.float64), config, 1), config)
        assert relative_error(gradients, exact[0], "mlp.gate") > 0.05


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_training_sends_every_token_where_the_counting_pass_sent_it(store: TokenStore, bf16: bool):
    config = config_of(store, 2, hidden_dropout=0.2, attention_dropout=0.1)
    engine = OneProcess(build(config, torch.float32, checkpointing=True), config, 2, bf16=bf16)
    _, step = train(engine, config)
    counted, trained = engine.outputs[:4], engine.outputs[4:]
    assert len(trained) == 4
    for first, second in zip(counted, trained, strict=True):
        assert torch.equal(first.expert_counts, second.expert_counts)
        assert first.token_losses is not None
        assert second.token_losses is not None
        assert torch.equal(first.token_losses, second.token_losses), "not even a bit"
    (reduced,) = engine.reduced
    assert reduced.dtype == torch.int64
    assert torch.equal(reduced, step.sums.expert_counts)
    assert not any(output.loss_sum is None or output.loss_sum.requires_grad for output in counted)


def test_gradients_with_dropout_are_the_global_batch_s(store: TokenStore):
    config = config_of(store, 2, hidden_dropout=0.3)
    engine = OneProcess(build(config, torch.float64, checkpointing=True), config, 2)
    assert relative_error(train(engine, config)[0], reference(config)[0]) < 1e-12


def test_nothing_is_counted_where_nothing_asks_for_it(store: TokenStore):
    cases: list[tuple[dict[str, object], int]] = [
        ({"router_aux_loss_scope": "sequence"}, 2),
        ({"router_aux_loss_scope": "micro_batch"}, 2),
        ({"router_aux_loss_coef": 0.0}, 2),
        ({}, 8),  # one micro batch is the whole batch
    ]
    for changes, micro_batch_size in cases:
        config = config_of(store, micro_batch_size, **changes)
        engine: Any = OneProcess(build(config, torch.float32), config, 1)
        batches = window_of(config, 1)
        assert attach_global_expert_counts(engine, batches) is batches
        assert not engine.outputs
        assert not engine.reduced
        assert not any("global_expert_counts" in batch.model_inputs() for batch in batches)


# both engines


@pytest.fixture
def engine_config(masked_store, monkeypatch):
    """`engine_config(**model)`: a configuration for `run_engine`, whose gradients are not clipped."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = {"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0}
    yield lambda **changes: small_config(
        masked_store, model=model | changes, training={"max_grad_norm": 0.0, "max_steps": 2}
    )
    reset_accelerate()


def check_dropout(launcher: str, config: Config, *faults: Fault) -> None:
    """Each micro batch's tokens go to the same experts in the counting pass and in training."""
    counts: list[list[Tensor]] = [[], []]

    def note(output: DecoderOutput) -> None:
        counts[torch.is_grad_enabled()].append(output.expert_counts)

    forward = Decoder.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", lambda self, *a, **k: [out := forward(self, *a, **k), note(out)][0])
        run_engine(launcher, config, *faults)
    assert len(counts[0]) == len(counts[1]) == 8
    for counted, trained in zip(*counts, strict=True):
        assert torch.equal(counted, trained), "a token went elsewhere than it was counted"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_dropout_is_the_same_in_both_passes(launcher: str, engine_config):
    config = engine_config(hidden_dropout=0.3)
    check_dropout(launcher, config)
    with pytest.raises(AssertionError, match="went elsewhere"):
        check_dropout(launcher, config, unseeded_counting)
