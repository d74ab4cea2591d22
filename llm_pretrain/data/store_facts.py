"""Reads store.json, and checks all that later code relies on in it.

What the files hold is checked in `store_contents.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from llm_pretrain.data.tokenizers import MAX_VOCAB_SIZE
from llm_pretrain.errors import DataError

FORMAT = "llm_pretrain token store"
FORMAT_VERSION = 1

_MOST = 1 << 53
"""More documents, tokens or bytes than this are a mistake, and would not fit numpy's integers in all sums."""
_FILE = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""A path that stays within the store."""

_FACTS: dict[str, Any] = {
    **{"dtype": str, "vocab_size": int, "tokenizer_hash": str, "special_ids": list},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), int | None),
    **{"zlib_bits_per_byte": float | None, "splits": dict, "files": dict},
}
_SPLIT_FACTS: dict[str, Any] = {
    **dict.fromkeys(("documents", "tokens", "targets", "text_bytes", "max_token_id"), int),
    **{"shards": list, "masked": bool},
}

_OPTIONAL_FACTS: dict[str, Any] = {
    **{"inputs": list, "input_documents": list | None, "skipped": dict},
    **{"duplicates": int, "altered_documents": int},
}


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """What store.json says, and its SHA-256. Raises DataError for what `prepare` would not have written."""
    file = path / "store.json"
    if not file.is_file():
        raise DataError(
            f"{path}: expected a folder with store.json, found none; make one with `llm-pretrain prepare`"
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: expected a readable file, found: {error.strerror}") from error
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: expected JSON, found: {error!s:.200}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DataError(f"{file}: expected format {FORMAT!r}, found another file; name a store's folder")
    if facts.get("format_version") != FORMAT_VERSION:
        found = facts.get("format_version")
        raise DataError(
            f"{file}: expected format_version {FORMAT_VERSION}, found {found!r:.40}; prepare the store again"
        )
    _check_facts(file, facts)
    return facts, hashlib.sha256(content).hexdigest()


def _check_facts(file: Path, facts: dict[str, Any]) -> None:
    """What later code relies on; a store.json edited by hand is named here, not by a KeyError later."""
    _check_types(file, "", facts, _FACTS)
    _check_types(file, "", facts, {key: kind for key, kind in _OPTIONAL_FACTS.items() if key in facts})
    if facts["dtype"] not in ("<u2", "<u4"):
        found = f"{facts['dtype']!r:.40}"
        raise DataError(f"{file}: expected dtype <u2 or <u4, found {found}; prepare the store again")
    for name in ("train", "validation"):
        split = facts["splits"].get(name)
        if not isinstance(split, dict):
            raise DataError(f"{file}: expected a split {name}, found none; prepare the store again")
        _check_types(file, f"splits.{name}.", split, _SPLIT_FACTS)
        for count in ("documents", "tokens", "targets", "text_bytes"):
            if not 0 <= split[count] <= _MOST:
                raise DataError(
                    f"{file}: expected splits.{name}.{count} between 0 and {_MOST}, "
                    f"found {split[count]!r:.40}; prepare the store again"
                )
        if split["max_token_id"] >= facts["vocab_size"]:
            raise DataError(
                f"{file}: expected token ids below vocab_size {facts['vocab_size']}, "
                f"found {split['max_token_id']} in {name}; prepare the store again"
            )
    _check_vocabulary(file, facts)
    _check_entries(file, facts)


def _check_vocabulary(file: Path, facts: dict[str, Any]) -> None:
    size, named = facts["vocab_size"], [f"{name}_token_id" for name in ("bos", "eos", "pad")]
    if not 0 < size <= MAX_VOCAB_SIZE:
        raise DataError(f"{file}: expected vocab_size of 1 to {MAX_VOCAB_SIZE}, found {size!r:.40}")
    if (bits := facts["zlib_bits_per_byte"]) is not None and not math.isfinite(bits):
        raise DataError(f"{file}: expected zlib_bits_per_byte to be finite, found {bits}")
    for name in named:
        if facts[name] is not None and not 0 <= facts[name] < size:
            raise DataError(
                f"{file}: expected {name} below vocab_size {size}, found {facts[name]!r:.40}; "
                "prepare the store again"
            )


def _check_entries(file: Path, facts: dict[str, Any]) -> None:
    """What lists and mappings hold; that every file which is read has its size and hash among `files`."""
    shapes = {"bytes": int, "sha256": str}
    files = facts["files"]
    counts = [
        *facts["special_ids"],
        *(facts.get("input_documents") or ()),
        *facts.get("skipped", {}).values(),
    ]
    sound = all(isinstance(entry, dict) and _has(entry, shapes) for entry in files.values())
    sound &= all(
        isinstance(entry, dict) and isinstance(entry.get("sample", ""), str) for entry in files.values()
    )
    sound &= all(type(count) is int and 0 <= count <= _MOST for count in counts)
    sound &= all(isinstance(name, str) for name in facts.get("inputs", ()))
    needed = ["tokenizer/tokenizer.json"]
    for name in ("train", "validation"):
        split = facts["splits"][name]
        shards = [shard for shard in split["shards"] if isinstance(shard, dict)]
        shards = [shard for shard in shards if _has(shard, {"file": str, "tokens": int})]
        sound &= len(shards) == len(split["shards"]) and all(0 <= s["tokens"] <= _MOST for s in shards)
        parts = ["offsets.bin", *(["loss_mask.bin"] if split["masked"] else []), *(s["file"] for s in shards)]
        needed += [f"{name}/{part}" for part in parts]
    if not sound:
        raise DataError(
            f"{file}: expected what prepare writes, found entries of other types; prepare it again"
        )
    if missing := [name for name in needed if name not in files]:
        raise DataError(f"{file}: expected {missing[0]!s:.80} in files, found none; prepare the store again")
    if outside := [name for name in files if not _FILE.fullmatch(name)]:
        raise DataError(f"{file}: expected names of files in the store, found {outside[0]!r:.80}")


def _has(entry: dict[str, Any], types: dict[str, type]) -> bool:
    return all(_is(entry.get(key), kind) for key, kind in types.items())


def _is(value: Any, kind: Any) -> bool:
    """As isinstance, but true and false are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_types(file: Path, prefix: str, facts: dict[str, Any], types: dict[str, Any]) -> None:
    for key, kind in types.items():
        if key not in facts:
            raise DataError(f"{file}: expected the field {prefix}{key}, found none; prepare the store again")
        if not _is(facts[key], kind):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise DataError(
                f"{file}: expected {prefix}{key} of type {expected}, found {facts[key]!r:.40}; "
                "prepare the store again"
            )
