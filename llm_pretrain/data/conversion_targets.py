"""Where converted documents go: a token store, or a folder of another program's files.

Either appears under its name when it is whole, and not at all otherwise.
"""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_pretrain.data.document_files import NanogptWriter
from llm_pretrain.data.megatron_files import MegatronWriter
from llm_pretrain.data.store_writer import StoreWriter
from llm_pretrain.data.tokenizers import TOKENIZER_FILES, Tokenizer

_ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this much validation text, as `prepare` does."""
_FILE_NAMES = {
    "nanogpt": {"train": "train.bin", "validation": "val.bin"},
    "megatron": {"train": "train", "validation": "validation"},
}


def open_target(format: str, output: Path, tokenizer: Tokenizer) -> _StoreTarget | _FolderTarget:
    """A target of `format` `store`, `nanogpt` or `megatron`; use as a context manager, then commit it."""
    if format == "store":
        return _StoreTarget(output, tokenizer)
    return _FolderTarget(format, output, tokenizer)


class _StoreTarget:
    """A token store; bytes of text and their size under zlib come from the tokens."""

    has_mask = True

    def __init__(self, output: Path, tokenizer: Tokenizer):
        self._store = StoreWriter(output, tokenizer)
        self._pieces = tokenizer.token_pieces()
        self._piece_bytes = tokenizer.token_bytes()
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0

    def __enter__(self) -> _StoreTarget:
        self._store.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._store.__exit__(*error)

    def append(self, split: str, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Adds documents, joined, to a split."""
        if not len(lengths):
            return
        self._store.splits[split].append(ids, lengths, loss_mask, int(self._piece_bytes[ids].sum()))
        if split == "validation" and self._zlib_in < _ZLIB_LIMIT:
            text = b"".join(self._pieces[token] for token in ids.tolist())[: _ZLIB_LIMIT - self._zlib_in]
            self._zlib_in += len(text)
            self._zlib_out += len(self._zlib.compress(text))

    def commit(self, inputs: Sequence[str], fraction: float | None, skipped: dict[str, int]) -> None:
        """Completes the store and puts it in its place."""
        zlib_bits = None
        if self._zlib_in:
            zlib_bits = 8 * (self._zlib_out + len(self._zlib.flush())) / self._zlib_in
        self._store.commit(
            {
                "inputs": [Path(name).name for name in inputs],
                "validation_fraction": fraction,
                "on_error": "fail",
                "skipped": {cause: count for cause, count in skipped.items() if count},
                "altered_documents": 0,
                "zlib_bits_per_byte": zlib_bits,
            }
        )


class _FolderTarget:
    """A folder of token files, with the tokenizer beside them. A split without documents has no file."""

    def __init__(self, format: str, output: Path, tokenizer: Tokenizer):
        self.has_mask = format == "megatron"
        self._format, self._output, self._tokenizer = format, output, tokenizer
        self._folder = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex[:8]}")
        self._writers: dict[str, NanogptWriter | MegatronWriter] = {}

    def __enter__(self) -> _FolderTarget:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, split: str, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray) -> None:
        """Adds documents, joined, to a split."""
        if not len(lengths):
            return
        if split not in self._writers:
            kind = MegatronWriter if self._format == "megatron" else NanogptWriter
            path = self._folder / _FILE_NAMES[self._format][split]
            self._writers[split] = kind(path, self._tokenizer.vocab_size)
        self._writers[split].append(ids, lengths, loss_mask)

    def commit(self, *_: Any) -> None:
        """Completes the files and puts the folder in its place."""
        for writer in self._writers.values():
            writer.close()
        (self._folder / "tokenizer").mkdir()
        for name in TOKENIZER_FILES:
            if (self._tokenizer.folder / name).is_file():
                shutil.copyfile(self._tokenizer.folder / name, self._folder / "tokenizer" / name)
        if self._output.exists():
            self._output.rmdir()
        self._folder.rename(self._output)
