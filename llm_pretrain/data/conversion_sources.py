"""Finds and opens what is converted: token files of other programs, or a store, as documents per split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.document_files import DocumentFile, open_nanogpt
from llm_pretrain.data.megatron_files import MASK_SUFFIX, open_megatron
from llm_pretrain.data.token_store import StoreSplit, TokenStore
from llm_pretrain.data.tokenizers import Tokenizer
from llm_pretrain.errors import ConfigError, DataError

_VALIDATION = re.compile(r"(^|[_.-])val(id(ation)?)?([_.-]|$)")
_SUFFIXES = {"nanogpt": {".bin"}, "megatron": {".bin", ".idx"}}


def find_tokenizer(inputs: Sequence[str]) -> Path:
    """The folder `tokenizer` in or beside the inputs. Raises ConfigError where there is none."""
    for entry in inputs:
        for folder in (Path(entry) / "tokenizer", Path(entry).parent / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return folder
    raise ConfigError(f"--tokenizer: expected the folder of the tokenizer that wrote {inputs[0]}, found none")


def open_splits(format: str, inputs: Sequence[str], tokenizer: Tokenizer) -> dict[str, list[DocumentFile]]:
    """{"train": …, "validation": …}, or {"all": …} where the files do not say which is which.

    `format` is `store`, `nanogpt` or `megatron`. Raises DataError for files that are something else.
    """
    if format == "store":
        return _open_store(inputs, tokenizer)
    assert tokenizer.eos_token_id is not None
    found: dict[str, list[DocumentFile]] = {"train": [], "validation": []}
    for path in _find(format, inputs):
        file = open_megatron(path) if format == "megatron" else open_nanogpt(path, tokenizer.eos_token_id)
        found["validation" if _VALIDATION.search(path.stem) else "train"].append(file)
    if found["train"] and found["validation"]:
        return found
    return {"all": found["train"] + found["validation"]}


def _find(format: str, inputs: Sequence[str]) -> list[Path]:
    """The files of nanoGPT, or the prefixes of Megatron's pairs of files, in a fixed order."""
    suffixes = _SUFFIXES[format]
    paths: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        inside = sorted(p for p in path.glob("*") if p.suffix in suffixes) if path.is_dir() else [path]
        if not inside:
            wanted = " and ".join(sorted(suffixes))
            raise DataError(f"{entry}: expected a folder with {wanted} files, found none in it")
        paths += inside
    if format == "nanogpt":
        return paths
    prefixes = [p.with_suffix("") if p.suffix in suffixes else p for p in paths]
    return [p for p in dict.fromkeys(prefixes) if not p.name.endswith(MASK_SUFFIX)]


def _open_store(inputs: Sequence[str], tokenizer: Tokenizer) -> dict[str, list[DocumentFile]]:
    if len(inputs) != 1:
        raise ConfigError(f"--input: expected one store, found {len(inputs)}")
    store = TokenStore(inputs[0])
    if store.tokenizer_hash != tokenizer.hash:
        raise DataError(f"{tokenizer.folder}: expected the tokenizer that wrote the store, found another")
    return {name: _store_files(store.split(name), f"{store.path}/{name}") for name in ("train", "validation")}


def _store_files(split: StoreSplit, name: str) -> list[DocumentFile]:
    """One for each shard; no document crosses from one to the next."""
    files = []
    for index, tokens in enumerate(split.shards):
        start, stop = (int(split.shard_starts[k]) for k in (index, index + 1))
        first, last = np.searchsorted(split.offsets, [start, stop])
        mask: Any = _MaskView(split, start) if split.has_mask else None
        files.append(DocumentFile(name, tokens, split.offsets[first : last + 1] - start, mask))
    return files


class _MaskView:
    """The loss mask of one shard, read slice by slice."""

    def __init__(self, split: StoreSplit, start: int):
        self._split, self._start = split, start

    def __getitem__(self, where: slice) -> np.ndarray:
        return self._split.mask_at(self._start + where.start, self._start + where.stop)
