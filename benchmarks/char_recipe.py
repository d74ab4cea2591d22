"""Steps to a loss at character level: the preset char-0.8m against nanoGPT's recipe for a CPU.

The peer is transformers' GPT-2 of the same shape, trained as nanoGPT's README says for a CPU: 4 layers, 4
heads, hidden 128, sequences of 64 at random places, 12 a step, 2,000 steps of AdamW at 1e-3 with cosine to
1e-4 after 100 steps, beta2 0.99, weight decay 0.1, clipping at 1.0, no dropout, no biases, GELU. Ours is the
preset through the torchrun script's own path. Both see the first nine tenths of the text, character by
character, and are evaluated on the whole last tenth in the same blocks; all in fp32.

Without --input the text is 1.1 MB of the Python standard library's source.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.measuring import Spread
from benchmarks.reporting import report
from benchmarks.training_runs import TrainingRun, preset_config, train
from llm_pretrain.data import (
    Batch,
    Conversion,
    TokenStore,
    convert,
    evaluation_batches,
    open_tokenizer,
    train_tokenizer,
)
from llm_pretrain.errors import DataError

PRESET = "char-0.8m"
STEPS = 2000
GOAL_STEPS = 0.18
GOAL_LOSS = 0.30
TEXT_BYTES = 1_100_000
VALIDATION_SHARE = 0.1

SEQUENCE_LENGTH, BATCH_SIZE = 64, 12
PEAK, FLOOR, WARMUP_STEPS = 1e-3, 1e-4, 100

EVALUATION = ["--evaluation.max_batches", "null"]
"""The whole validation split."""

QUICK = ["--quick"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options."""
    parser.add_argument("--input", type=Path, nargs="+", metavar="FILE", help="texts of about 1 MB")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of both on each text")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, without goals")


def run(arguments: argparse.Namespace) -> None:
    """Prints both sides' losses on each text, and where ours passes the peer's last."""
    steps = STEPS // 10 if arguments.quick else STEPS
    for path in arguments.input or [None]:
        with tempfile.TemporaryDirectory() as temporary:
            text = _default_text() if path is None else _read(path)
            store = prepare_text(text, Path(temporary))
            pairs = [_pair(store, steps, seed) for seed in range(arguments.seeds)]
        name = "standard library" if path is None else path.name
        _report(name, pairs, steps, has_goals=not arguments.quick)


def _pair(store: Path, steps: int, seed: int) -> tuple[TrainingRun, TrainingRun]:
    """(The peer's, ours) with one seed."""
    ours = train(PRESET, store, _options(steps, seed))
    peer = train_peer(store, steps, seed)
    for side, result in (("GPT-2 under nanoGPT's recipe", peer), (PRESET, ours)):
        losses = ", ".join(f"{step}: {loss:.4f}" for step, loss in sorted(result.losses.items()) if step)
        print(f"seed {seed} {side}: {losses} ({result.cpu_seconds:.0f} s CPU)", flush=True)
    return peer, ours


def _options(steps: int, seed: int) -> list[str]:
    """Over the preset: its length, and evaluations of the whole split at thirds of the steps of the goal."""
    options = [*EVALUATION, "--training.max_steps", str(steps), "--training.precision", "fp32"]
    options += ["--evaluation.eval_steps", str(round(steps * GOAL_STEPS / 3))]
    return [*options, "--run.seed", str(seed), "--data.seed", str(seed)]


def _report(
    name: str, pairs: Sequence[tuple[TrainingRun, TrainingRun]], steps: int, *, has_goals: bool
) -> None:
    peers, own = zip(*pairs, strict=True)
    target = statistics.fmean(each.final_loss for each in peers)
    means = {step: statistics.fmean(each.losses[step] for each in own) for step in sorted(own[0].losses)}
    passed = next((step for step, loss in means.items() if loss <= target), None)
    gain = target - means[steps]
    report(f"{name}: loss of GPT-2 under nanoGPT's recipe after {steps} steps", f"{target:.4f}")
    report(
        f"{name}: loss of {PRESET} after {steps} steps",
        f"{means[steps]:.4f}, {gain:.4f} lower",
        bound=f"≥ {GOAL_LOSS:.2f} lower" if has_goals else "",
        met=not has_goals or gain >= GOAL_LOSS,
    )
    report(
        f"{name}: steps of {PRESET} to the peer's last loss, share of the peer's",
        "not reached" if passed is None else f"≤ {passed / steps:.3f} ({passed} steps, {means[passed]:.4f})",
        bound=f"≤ {GOAL_STEPS}" if has_goals else "",
        met=not has_goals or (passed is not None and passed <= GOAL_STEPS * steps),
    )
    ratio = Spread.of(one.cpu_seconds / other.cpu_seconds for other, one in pairs)
    report(f"{name}: CPU time of {PRESET} for all its steps / the peer's", ratio)


def _default_text() -> str:
    """The first 1.1 MB of the standard library's modules, in the order of their names."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8")
        if len(text) >= TEXT_BYTES:
            break
    return text[:TEXT_BYTES]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input {path}: expected a UTF-8 text file, found {error}") from None


def prepare_text(text: str, folder: Path) -> Path:
    """A token store of the text, its last tenth for validation, with a tokenizer of characters."""
    (folder / "text.txt").write_text(text, encoding="utf-8")
    train_tokenizer([str(folder / "text.txt")], folder / "tokenizer", 384, type="char")
    tokenizer = open_tokenizer(folder / "tokenizer")
    cut = round(len(text) * (1 - VALIDATION_SHARE))
    files = []
    for split, ids in zip(("train", "val"), tokenizer.encode([text[:cut], text[cut:]]), strict=True):
        file = folder / f"{split}.bin"
        np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16).tofile(file)
        files.append(str(file))
    convert(Conversion(files, folder / "store", tokenizer=folder / "tokenizer"))
    return folder / "store"


def train_peer(store: Path, steps: int, seed: int) -> TrainingRun:
    """The published recipe on the store's train split, its decay as long as the run."""
    split = TokenStore(store).split("train")
    stored = torch.from_numpy(split.tokens_at(0, int(split.offsets[-1])).astype(np.int64))
    batches = evaluation_batches(preset_config(PRESET, store, store, EVALUATION))
    own_ids, vocab_size = own_vocabulary([stored, *(batch.labels for batch in batches)])
    torch.manual_seed(seed)
    model = _gpt2(vocab_size)
    optimizer = _adamw(model)
    tokens, before = own_ids[stored], time.process_time()
    for step in range(steps):
        starts = torch.randint(len(tokens) - SEQUENCE_LENGTH, (BATCH_SIZE,)).tolist()
        windows = torch.stack([tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        logits = model(windows[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = peer_learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.process_time() - before
    return TrainingRun({steps: peer_loss(model, batches, own_ids)}, seconds)


def own_vocabulary(tokens: Sequence[Tensor]) -> tuple[Tensor, int]:
    """(The peer's number for each of ours, how many): a row for each character, none for bytes unused."""
    used = torch.cat([each[each >= 0].flatten() for each in tokens]).unique()
    own_ids = torch.zeros(int(used.max()) + 1, dtype=torch.int64)
    own_ids[used] = torch.arange(len(used))
    return own_ids, len(used)


def peer_learning_rate(step: int, steps: int) -> float:
    """Of the step that follows `step` finished ones: nanoGPT's `get_lr`, decaying to the last step."""
    if step < WARMUP_STEPS:
        return PEAK * (step + 1) / (WARMUP_STEPS + 1)
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FLOOR + 0.5 * (1 + math.cos(math.pi * progress)) * (PEAK - FLOOR)


@torch.no_grad()
def peer_loss(model: Any, batches: Sequence[Batch], own_ids: Tensor) -> float:
    """Nats per token of our evaluation's batches."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        logits = model(own_ids[batch.input_ids], use_cache=False).logits
        kept = batch.loss_mask
        total += float(F.cross_entropy(logits[kept].double(), own_ids[batch.labels[kept]], reduction="sum"))
        count += batch.num_loss_tokens
    return total / count


def _gpt2(vocab_size: int) -> Any:
    """transformers' GPT-2 in the preset's size; its biases stay at zero, where they begin."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=SEQUENCE_LENGTH,
            n_embd=128,
            n_layer=4,
            n_head=4,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.requires_grad_(False).zero_()
    return model


def _adamw(model: Any) -> AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=PEAK, betas=(0.9, 0.99), fused=True)
