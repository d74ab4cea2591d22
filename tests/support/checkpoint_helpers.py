"""A small model with everything a checkpoint must carry, and a run of one process around it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from llm_pretrain.checkpoints.manifest import ResumePoint, RunFacts
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.distributed.collectives import OneRank, Ranks

SINGLE_RANK = OneRank()
VOCABULARY, WIDTH, EXPERTS = 32, 8, 3
FINGERPRINTS = {"model.hidden_size": "8", "data.store.0": "ab12", "training.global_batch_size": "4"}


class SmallModel(nn.Module):
    """Tied embeddings, stacked experts, a norm, a float32 and a 0-dimensional buffer."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.experts = nn.Parameter(torch.randn(EXPERTS, width, width) / width)
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("router_bias", torch.randn(EXPERTS))
        self.register_buffer("updates", torch.tensor(3))
        self.register_buffer("rotary", torch.randn(4), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        mixed = torch.einsum("bsh,ehd,e->bsd", hidden, self.experts, self.router_bias.softmax(0))
        return self.lm_head(self.norm(hidden + mixed))


class Run:
    """Model, optimizer and store of one process."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        fused: bool = False,
        keep_last: int = 2,
        ranks: Ranks = SINGLE_RANK,
        **model_options,
    ):
        torch.manual_seed(seed)
        self.model = SmallModel(**model_options)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            fused=fused,
        )
        self.scaler = None
        self.step = 0
        self.world_size = ranks.world_size
        self.store = CheckpointStore(folder, ranks, keep_last=keep_last)

    def train(self, steps: int, module: nn.Module | None = None) -> Run:
        """Take steps whose data depends on the step alone; `module` is the wrapped model, if any."""
        for _ in range(steps):
            input_ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(self.step))
            logits = (module or self.model)(input_ids)
            nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.roll(-1).flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                self.model.router_bias += 1e-3
            self.step += 1
        return self

    def facts(self, **changes) -> RunFacts:
        values = {
            "step": self.step,
            "tokens_seen": 12 * self.step,
            "launcher": "torchrun",
            "strategy": "ddp",
            "world_size": self.world_size,
            "global_batch_size": 4,
            "seed": 0,
            "wandb_id": "abc",
            "fingerprints": FINGERPRINTS,
            "extra": {"skipped_in_a_row": 1},
        }
        return RunFacts(**(values | changes))

    def save(self, module: nn.Module | None = None, **changes) -> Path:
        """Commit a checkpoint; `module` is the wrapped model, if any."""
        facts = self.facts(**changes)
        return self.store.write(
            self.store.stage(self.model if module is None else module, self.optimizer, self.scaler, facts)
        )

    def restore(
        self, source: Path | None = None, expected: dict[str, str] = FINGERPRINTS
    ) -> ResumePoint | None:
        found = self.store.find(expected=lambda run: expected, source=source)
        if found is not None:
            self.store.load(found, self.model, self.optimizer, self.scaler)
            self.step = found.step
        return found


def everything(run: Run) -> dict[str, Tensor]:
    """Every tensor of the training state, cloned, by name."""
    tensors = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return {name: value.detach().clone() for name, value in tensors.items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal to the last bit, signs of zeros and NaNs included."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].reshape(-1).view(torch.uint8).equal(right[name].reshape(-1).view(torch.uint8))
        for name in left
    )
