"""Writes half-precision weights in folders that transformers opens without custom code."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_pretrain import export
from llm_pretrain.checkpoints import folders, state
from llm_pretrain.checkpoints.tensor_files import write_safetensors
from llm_pretrain.config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError, DataError
from llm_pretrain.files import (
    MARKER,
    fsync_file,
    make_folder,
    read_json,
    read_marker,
    read_plain,
    write_marker,
    write_text,
)
from llm_pretrain.model import count_parameters

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_SHARD_BYTES = 5_000_000_000
"""Largest file, as in transformers."""
INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_SUFFIXES = {".json", ".model", ".txt", ".jinja", ".tiktoken"}
BEST_FILE = "best.json"
"""In `best/`: `{"step": …, "eval/loss": …}`."""
_OWN_FILES = {"config.json", "generation_config.json", INDEX_FILE, BEST_FILE, MARKER}


def save_weights(
    folder: Path,
    step: int,
    model: nn.Module | Mapping[str, Tensor],
    config: ModelConfig,
    *,
    dtype: str,
    tokenizer_folder: Path,
    tokenizer_digests: Mapping[str, str] | None = None,
    token_ids: dict[str, int | None],
    keep_last: int,
    sequence_length: int,
    best_loss: float | None = None,
    card: export.ModelCardData | None = None,
) -> Path:
    """Write `folder/step-00000100/` completely or not at all, then prune older ones (rank 0 only).

    A model that matches no architecture of transformers is written with `model_type` `llm_pretrain` and this
    package's field names in config.json, and a log line names the field.

    Args:
        folder: The run's `weights/`.
        step: Optimizer steps taken.
        model: The decoder, plain or wrapped, or its full state dict (`whole_state`, `CheckpointWeights`).
        config: Its configuration, with a resolved `vocab_size`.
        dtype: `bf16`, `fp16` or `fp32`.
        tokenizer_folder: Its tokenizer files are copied.
        tokenizer_digests: Name → SHA-256 that these files must have, as the run's store lists them.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`; None for a missing token.
        keep_last: Newest exports to keep; at least 2 are kept.
        sequence_length: Default limit of generated text, the length that the model was trained on.
        best_loss: If given, `folder/best/` is written (replaced) instead, with this loss in best.json.
        card: The facts in README.md; None writes no README.md.

    Returns:
        The folder with the weights.

    Raises:
        CheckpointError: a value does not fit `dtype`, the tokenizer is another one, or writing failed;
            earlier exports are unchanged.
    """
    temporary = folders.temporary_folder(folder, step, uuid.uuid4().hex)
    tensors = state.raw_module(model).state_dict() if isinstance(model, nn.Module) else model
    size = count_parameters(config).total * DTYPES[dtype].itemsize
    try:
        make_folder(folder)
        folders.clean(folder)
        temporary.mkdir()
        _write_model(temporary, tensors, config, dtype, token_ids)
        write_json(
            temporary / "generation_config.json",
            _generation_config(token_ids, sequence_length, tokenizer_folder),
        )
        copy_tokenizer(tokenizer_folder, temporary, tokenizer_digests)
        if card is not None:
            write_text(temporary / "README.md", export.model_card(card))
        if best_loss is not None:
            write_json(temporary / BEST_FILE, {"step": step, "eval/loss": best_loss})
        _list_files(temporary)
        if best_loss is not None:
            return folders.commit_folder(temporary, folders.BEST)
        path = folders.commit_folder(temporary, folders.folder_name(step))
    except OSError as error:
        free = _free_bytes(folder)  # before the files are deleted
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
    """Step of the weights in `folder/best/`, after undoing an interrupted replacement.

    Returns:
        None if there are none, or their best.json is damaged.
    """
    best = folders.best_folder(folder)
    if best is None:
        return None
    try:
        content = read_json(best / BEST_FILE)
    except (OSError, ValueError, RecursionError):
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return step if isinstance(step, int) else None


def _write_model(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    dtype: str,
    token_ids: dict[str, int | None],
) -> None:
    special = _special_ids(token_ids)
    try:
        content = export.huggingface_config(config, **special, dtype=dtype)
    except ConfigError as error:
        logger.info("transformers does not open these weights: %s", error)
        content = export.native_config(config, **special, dtype=dtype)
    write_tensors(folder, export.to_huggingface(tensors, config, DTYPES[dtype]))
    write_json(folder / "config.json", content)


def _special_ids(content: dict[str, Any]) -> dict[str, int | None]:
    return {name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write `model.safetensors`, or shards of at most `MAX_SHARD_BYTES` and their index file."""
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
    """Content of generation_config.json; text ends at EOS, or at the end of a chat turn."""
    known: dict[str, Any] = {name: value for name, value in token_ids.items() if value is not None}
    end, end_of_turn = token_ids.get("eos_token_id"), _end_of_turn_id(tokenizer_folder)
    if end is not None and end_of_turn not in (None, end):
        known["eos_token_id"] = [end, end_of_turn]
    return {**known, "do_sample": True, "max_new_tokens": sequence_length}


def _end_of_turn_id(tokenizer_folder: Path) -> int | None:
    try:
        return export.end_of_turn_id(tokenizer_folder)
    except (DataError, KeyError, TypeError, AttributeError):
        return None  # a damaged tokenizer does not prevent writing the weights


def copy_tokenizer(source: Path, target: Path, digests: Mapping[str, str] | None = None) -> None:
    """Copy a tokenizer's files, including its chat template, from a folder that may hold weights as well.

    Raises:
        CheckpointError: a file that `digests` names is missing or has another SHA-256.
    """
    for file in sorted(Path(source).iterdir()):
        if file.suffix in _TOKENIZER_SUFFIXES and file.name not in _OWN_FILES and file.is_file():
            shutil.copyfile(file, target / file.name)
            fsync_file(target / file.name)
    for name, expected in (digests or {}).items():
        copy = target / name
        found = hashlib.sha256(copy.read_bytes()).hexdigest() if copy.is_file() else "none"
        if found != expected:
            raise CheckpointError(
                f"{source / name}: expected the tokenizer that the run began with ({expected[:12]}), found "
                f"{found[:12]}: its store was replaced; bring it back"
            )


def _list_files(folder: Path) -> None:
    """Mark a folder of weights, with the names of its files."""
    write_marker(folder, "weights", files=sorted(each.name for each in folder.iterdir()))


def other_content(folder: Path) -> str | None:
    """What a folder has besides weights that this program wrote, in words; None for an empty one as well."""
    if not any(folder.iterdir()):
        return None
    if read_marker(folder, "weights") is None and not _is_earlier(folder):
        return "something else"
    if name := folders.unlisted_file(folder):
        return f"{name} in it, which this program did not write"
    return None


def _is_earlier(folder: Path) -> bool:
    """Whether a version without markers wrote the weights in a folder, by their card or their own fields."""
    with suppress(OSError):
        if b"pretrained from text by llm_pretrain." in read_plain(folder / "README.md"):
            return True
    with suppress(OSError, ValueError, RecursionError):
        content = read_json(folder / "config.json")
        return isinstance(content, dict) and export.NATIVE_MODEL_TYPE in (content.get("model_type"), *content)
    return False


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write and fsync `content`."""
    write_text(file, json.dumps(content, indent=2) + "\n")


_ALSO_COPIED = ("generation_config.json", "README.md")


def convert_weights(
    source: Path, output: Path, dtype: str, *, check: Callable[[], None] = lambda: None
) -> None:
    """Convert the weights in `source` to `dtype` in `output/`, which is replaced completely or not at all.

    Args:
        source: A weights folder, ours or transformers'.
        output: The folder to write.
        dtype: `bf16`, `fp16` or `fp32`.
        check: Called before `output` is replaced; raises if it must not be.

    Raises:
        ConfigError: names each field that no architecture of transformers has.
        CheckpointError: damaged weights, a value that does not fit in `dtype`, or writing failed.
    """
    content = export.read_config(source)
    model = export.model_config_from_huggingface(content)
    config = export.huggingface_config(model, **_special_ids(content), dtype=dtype)
    decoder = export.load_pretrained(source)
    temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
    try:
        make_folder(output.parent)
        temporary.mkdir()
        tensors = export.to_huggingface(decoder.state_dict(), model, DTYPES[dtype])
        write_tensors(temporary, tensors)
        write_json(temporary / "config.json", config)
        copy_tokenizer(source, temporary)
        for name in _ALSO_COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        _list_files(temporary)
        check()
        folders.commit_folder(temporary, output.name)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise CheckpointError(f"{output}: writing failed: {reason}") from error
    finally:
        folders.discard(temporary)
