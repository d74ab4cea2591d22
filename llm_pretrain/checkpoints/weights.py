"""Half-precision weights for everybody else: a folder that transformers opens without custom code.

Not a resume source: it has no optimizer state, and half precision has lost bits. Called by rank 0 only.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_pretrain import export
from llm_pretrain.checkpoints import folders, state
from llm_pretrain.checkpoints.tensor_files import write_safetensors
from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_SHARD_BYTES = 5_000_000_000
"""As transformers shards: what a hub, a browser and a small disk still take as one file."""
INDEX_FILE = "model.safetensors.index.json"
END_OF_TURN = "<|im_end|>"
_TOKENIZER_SUFFIXES = {".json", ".model", ".txt", ".jinja", ".tiktoken"}
BEST_FILE = "best.json"
"""In `best/`: `{"step": …, "eval/loss": …}`."""
_OWN_FILES = {"config.json", "generation_config.json", INDEX_FILE, BEST_FILE}


def save_weights(
    folder: Path,
    step: int,
    model: nn.Module | dict[str, Tensor],
    config: ModelConfig,
    *,
    dtype: str,
    tokenizer_folder: Path,
    token_ids: dict[str, int | None],
    keep_last: int,
    sequence_length: int,
    best_loss: float | None = None,
    card: export.CardFacts | None = None,
) -> Path:
    """Write `folder/step-00000100/` whole or not at all, then prune older ones; returns its path.

    With `best_loss` it is `folder/best/` instead, which replaces the one before; nothing is pruned.

    A model that no known architecture describes is written all the same, with `model_type`
    `llm_pretrain` and our own field names in its config.json, and a warning names the field.

    Args:
        folder: The run's `weights/`.
        step: Optimizer steps taken.
        model: The decoder, plain or wrapped, or its whole state where it is sharded (`whole_state`).
        config: Its shape, with a resolved `vocab_size`.
        dtype: `bf16` or `fp16`.
        tokenizer_folder: Its tokenizer files are copied.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`; None where there is none.
        keep_last: Exports to keep; at least 2 are kept.
        sequence_length: Longest text the model was trained on; generation stops there by default.
        best_loss: The evaluation loss of a new best, for its best.json.
        card: What README.md says of them; None writes none.

    Raises:
        CheckpointError: a value does not fit `dtype`, or writing failed; earlier exports are as they were.
    """
    temporary = folders.temporary_folder(folder, step, uuid.uuid4().hex)
    tensors = state.raw_module(model).state_dict() if isinstance(model, nn.Module) else model
    size = sum(tensor.numel() for tensor in tensors.values()) * DTYPES[dtype].itemsize
    try:
        folders.make_parent(folder)
        folders.clean(folder)
        temporary.mkdir()
        _write_model(temporary, tensors, config, dtype, token_ids)
        write_json(
            temporary / "generation_config.json",
            _generation_config(token_ids, sequence_length, tokenizer_folder),
        )
        copy_tokenizer(tokenizer_folder, temporary)
        if card is not None:
            write_text(temporary / "README.md", export.model_card(card))
        if best_loss is not None:
            write_json(temporary / BEST_FILE, {"step": step, "eval/loss": best_loss})
            return folders.commit_as(temporary, folders.BEST)
        path = folders.commit_folder(temporary, step)
    except OSError as error:
        free = _free_bytes(folder)  # as long as what was written is there
        folders.discard(temporary)
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: writing weights of step {step}, {size} bytes, failed: {text} ({free})"
        ) from error
    except Exception:
        folders.discard(temporary)
        raise
    folders.prune(folder, newest=step, keep_last=keep_last)
    return path


def _free_bytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes free"
    except OSError:
        return "the folder is not there"


def best_step(folder: Path) -> int | None:
    """Step of the weights in `folder/best/`; None where there are none, or their best.json is damaged.

    Undoes a replacement of them that was interrupted.
    """
    best = folders.best_folder(folder)
    if best is None:
        return None
    try:
        content = json.loads((best / BEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return step if isinstance(step, int) else None


def _write_model(
    folder: Path,
    tensors: dict[str, Tensor],
    config: ModelConfig,
    dtype: str,
    token_ids: dict[str, int | None],
) -> None:
    bos, eos, pad = (token_ids.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    arguments: dict[str, Any] = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": dtype,
    }
    try:
        content = export.huggingface_config(config, **arguments)
    except ConfigError as error:
        logger.info("these weights open with llm_pretrain only: %s", error)
        content = export.native_config(config, **arguments)
    write_tensors(folder, export.to_huggingface(tensors, config, DTYPES[dtype]))
    write_json(folder / "config.json", content)


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """`model.safetensors`, or shards of at most `MAX_SHARD_BYTES` and the index that readers expect."""
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_SHARD_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = MAX_SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})


def _generation_config(
    token_ids: dict[str, int | None], sequence_length: int, tokenizer_folder: Path
) -> dict[str, Any]:
    """Text ends at the tokenizer's end of text, and at the end of a turn where it has one."""
    known: dict[str, Any] = {name: value for name, value in token_ids.items() if value is not None}
    end, end_of_turn = token_ids.get("eos_token_id"), _id_of(tokenizer_folder, END_OF_TURN)
    if end is not None and end_of_turn not in (None, end):
        known["eos_token_id"] = [end, end_of_turn]
    return {**known, "do_sample": True, "max_new_tokens": sequence_length}


def _id_of(tokenizer_folder: Path, token: str) -> int | None:
    try:
        content = json.loads((tokenizer_folder / "tokenizer.json").read_text("utf-8"))
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever opens the tokenizer says so; the weights are written all the same
    return added.get(token)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what belongs to a tokenizer, its chat template too, and nothing that belongs to weights."""
    for file in sorted(Path(source).iterdir()):
        if file.suffix in _TOKENIZER_SUFFIXES and file.name not in _OWN_FILES and file.is_file():
            shutil.copyfile(file, target / file.name)
            folders.fsync_file(target / file.name)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` so that it outlives a power cut."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write `text` likewise."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
