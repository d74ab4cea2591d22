"""Prepares token stores: the same bytes at any number of workers and after any interruption."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from llm_pretrain.data.documents import EXCLUDED
from llm_pretrain.data.encoding import EncodedBatch, Origin, encoded_batches
from llm_pretrain.data.inputs import (
    COMPRESSIONS,
    HUB_PREFIX,
    TABLE_SUFFIXES,
    HubInterruptedError,
    Source,
    find_sources,
)
from llm_pretrain.data.readers import batch_records, cut_lone_text, read_sources
from llm_pretrain.data.store import FORMAT_VERSION, TokenStore
from llm_pretrain.data.store_writer import (
    SHARD_BYTES,
    HashedFile,
    SplitWriter,
    StaleStateError,
    StoreWriter,
    other_content,
)
from llm_pretrain.data.tokenizers import (
    TOKENIZER_FILES,
    Tokenizer,
    convert_tokenizer,
    open_tokenizer,
)
from llm_pretrain.errors import ConfigError, DataError, OutputError
from llm_pretrain.files import MARKER, read_json, read_marker, read_plain, replace_text, write_marker
from llm_pretrain.hardware import usable_cores
from llm_pretrain.version import __version__

BATCH_BYTES = 1 << 20
"""Bytes of raw records that a worker encodes at a time."""


@dataclass(frozen=True)
class Preparation:
    """Arguments of `prepare_store`.

    Args:
        input: Files, folders, patterns, hf://OWNER/NAME, or `stdlib`: the Python standard library's source.
        tokenizer: Any Hugging Face tokenizer folder.
        output: Folder of the token store to write.
        validation_fraction: Share of the documents, chosen by hash, that is kept for validation; of a lone
            text, of its last lines.
        on_error: A bad record is counted and left out, or stops with file and line.
        text_column: Field or column that holds a document's text.
        split: Which split of a folder that has several, or of a hub data set (default: train; the folder's
            validation split is then used for validation).
        validation_input: Inputs for validation, in place of documents chosen by hash.
        exclude: Token stores; documents of their validation splits are not trained on.
        special_tokens: Whether special tokens that are written in texts stay text or become tokens.
        document_separator: Cuts text files into documents, such as <|endoftext|> (default: one per file).
        deduplicate: Keep the first of equal documents, among all inputs, and leave the others out.
        overwrite: Replace a store that is already there.
        workers: Processes that tokenize (default: all cores).
        shard_bytes: Size of a token shard.
        commit_seconds: Interval of the commits from which a killed preparation resumes.
        progress: Called with the bytes of every finished batch.
        notice: Called with messages for the user.
    """

    input: Sequence[str]
    tokenizer: str | Path
    output: str | Path
    validation_fraction: float = 0.01
    on_error: Literal["skip", "fail"] = "fail"
    text_column: str = "text"
    split: str | None = None
    validation_input: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    special_tokens: Literal["text", "tokens"] = "text"
    document_separator: str | None = None
    deduplicate: bool = False
    overwrite: bool = False
    workers: int | None = None
    shard_bytes: int = SHARD_BYTES
    commit_seconds: float = 2.0
    progress: Callable[[int], object] = field(default=lambda done: None)
    notice: Callable[[str], object] = field(default=lambda text: None)

    @property
    def inputs(self) -> list[str]:
        """All inputs, those for validation last."""
        return [*self.input, *(self.validation_input or ())]


def prepare_store(preparation: Preparation) -> TokenStore:
    """Writes the store and opens it; resumes the same preparation after a kill.

    Equal documents get into the same split. A fraction above 0 may leave a split empty although two documents
    differ: then the threshold is moved by one document and the corpus is encoded again.

    Raises:
        DataError: bad input; nothing is left behind.
        ConfigError: an option out of its range.
        OutputError: another process prepares the same output.
    """
    output = Path(preparation.output)
    check_fraction(preparation.validation_fraction)
    if preparation.workers is not None and preparation.workers < 1:
        raise ConfigError(f"--workers: expected 1 or more, found {preparation.workers}")
    work_folder = output.parent / f".{output.name}.partial"
    if not work_folder.exists():
        _check_output(output, preparation.overwrite)
    with tempfile.TemporaryDirectory() as temporary:
        folder = convert_tokenizer(Path(preparation.tokenizer), Path(temporary))
        tokenizer = open_tokenizer(folder, parse_special=preparation.special_tokens == "tokens")
        tokenizer.check_named_tokens()
        validation_input = preparation.validation_input or ()
        sources = find_sources(preparation.input, preparation.split, validation_input, preparation.notice)
        sources = [replace(source, separator=preparation.document_separator) for source in sources]
        if not preparation.exclude:  # it compares whole documents
            sources = cut_lone_text(sources, preparation.validation_fraction, preparation.text_column)
        if part := sources[0].part:
            preparation.notice(f"{sources[0].name}: one text, for validation from byte {part.start:,} on")
        with Workspace(output, _fingerprint(preparation, sources, tokenizer)) as work:
            if work.state is None or not _is_done(work.state, output):
                _check_output(output, preparation.overwrite)
                try:
                    _fill(preparation, sources, output, tokenizer, work)
                except HubInterruptedError:
                    raise  # keeps the work: the same command resumes it
                except DataError:
                    work.remove()
                    raise
            work.remove()
    return TokenStore(output)


def check_fraction(fraction: float) -> None:
    """Raises ConfigError for a fraction that leaves no document to train on."""
    if not 0 <= fraction < 1:
        raise ConfigError(f"--validation_fraction: expected 0 ≤ fraction < 1, found {fraction}")


def input_bytes(preparation: Preparation) -> int | None:
    """Size of all records of the inputs, or None if it is unknown before they are read."""
    return _source_bytes(
        find_sources(preparation.input, preparation.split, preparation.validation_input or ())
    )


def _source_bytes(sources: Sequence[Source]) -> int | None:
    total = 0
    for source in sources:
        if source.path is None or source.path.suffix.lower() in (*COMPRESSIONS, *TABLE_SUFFIXES):
            return None
        if source.status and not source.fault:
            total += source.status.st_size
    return total


def _check_output(output: Path, overwrite: bool) -> None:
    if found := other_content(output):
        raise DataError(f"{output}: expected a new folder or a token store, found {found}; choose another")
    if not overwrite and output.exists() and any(output.iterdir()):
        raise DataError(f"{output}: expected no store, found one; use --overwrite to replace it")


def _fingerprint(preparation: Preparation, sources: Sequence[Source], tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that decides a byte of the store."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = tokenizer.folder / name
        digest.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    options = ("validation_fraction", "on_error", "text_column", "deduplicate", "shard_bytes")
    options += ("special_tokens", "document_separator")
    facts = {
        "format": [FORMAT_VERSION, __version__, BATCH_BYTES],
        "options": {name: getattr(preparation, name) for name in options},
        "inputs": preparation.inputs,
        "validation": [source.validation for source in sources],
        "exclude": [TokenStore(path).hash for path in preparation.exclude or ()],
        "sources": [source.fingerprint() for source in sources],
    }
    digest.update(json.dumps(facts, sort_keys=True).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _is_done(state: dict[str, Any], output: Path) -> bool:
    """Whether the store was complete when the work was killed."""
    file = output / "store.json"
    return file.is_file() and hashlib.sha256(read_plain(file)).hexdigest() == state.get("done")


def _fill(
    preparation: Preparation, sources: Sequence[Source], output: Path, tokenizer: Tokenizer, work: Workspace
) -> None:
    """Passes over the corpus until the threshold leaves no split empty; usually one pass."""
    fraction = 0.0 if sources[0].validation else preparation.validation_fraction
    threshold: int | None = int(fraction * HASHES)
    if work.state is not None:
        threshold = work.state["threshold"]
    while threshold is not None:
        try:
            threshold = _Pass(preparation, sources, output, tokenizer, work, threshold).run()
        except StaleStateError:
            work.clear()


class _Pass:
    """One pass over the corpus, from its beginning or from the last commit."""

    def __init__(
        self,
        preparation: Preparation,
        sources: Sequence[Source],
        output: Path,
        tokenizer: Tokenizer,
        work: Workspace,
        threshold: int,
    ):
        self._preparation, self._sources, self._work = preparation, sources, work
        self._tokenizer, self._threshold = tokenizer, threshold
        self._thresholds = {False: threshold, True: HASHES - 1}  # by Source.validation
        state = work.state
        saved = state or {"totals": None, "splits": None, "last": (0, -1), "bytes": 0}
        self._excluded: set[int] = set()
        for path in preparation.exclude or ():
            store = TokenStore(path)
            if store.facts.get("converted"):
                raise DataError(f"{path}: expected a store of prepare, found ids that convert took over")
            self._excluded.update(store.split("validation").hashes.tolist())
        self._totals = Totals(work.folder, len(preparation.inputs), saved["totals"])
        try:
            self._writer = StoreWriter(
                output,
                tokenizer,
                shard_bytes=preparation.shard_bytes,
                folder=work.folder / STORE,
                state=saved["splits"],
            )
        except StaleStateError:
            self._totals.close()
            raise
        self._last: tuple[int, int] = (saved["last"][0], saved["last"][1])
        self._bytes: int = saved["bytes"]
        self._seen = SeenDocuments(self._totals.keys()) if preparation.deduplicate else None
        self._next_commit = time.monotonic() + preparation.commit_seconds

    def run(self) -> int | None:
        """Returns None when the store is complete, or the threshold for another pass."""
        preparation, totals = self._preparation, self._totals
        with self._writer, totals:
            if self._bytes:
                preparation.notice(f"continues after {totals.documents:,} documents that were done before")
                preparation.progress(self._bytes)
            for batch, origin in self._batches():
                if batch.error:
                    raise DataError(
                        f"{batch.error}; correct it, or leave such records out with --on_error skip"
                    )
                self._add(batch, origin)
                if time.monotonic() >= self._next_commit:
                    self._commit()
                preparation.progress(origin.size)
            again = totals.other_threshold(self._threshold) if totals.documents else None
            if again is None and not self._writer.splits["train"].documents:
                names = ", ".join(preparation.inputs)
                raise DataError(f"{names}: expected documents to train on, found none{totals.causes()}")
            if again is None:
                self._commit()
                state = self._work.state or {}
                self._writer.commit(self._facts(), lambda done: self._work.save(state | {"done": done}))
        if again is not None:
            self._work.clear()
        return again

    def _batches(self) -> Iterator[tuple[EncodedBatch, Origin]]:
        preparation = self._preparation
        records = read_sources(self._sources, text_column=preparation.text_column, after=self._last)
        workers = preparation.workers or usable_cores()
        size = _source_bytes(self._sources)
        if size is not None:
            workers = min(workers, -(-size // (2 * BATCH_BYTES)))
        for own, part in groupby(records, key=lambda record: self._sources[record.source].validation):
            yield from encoded_batches(
                batch_records(part, BATCH_BYTES),
                self._tokenizer,
                workers,
                threshold=self._thresholds[own],
                fail_on_error=preparation.on_error == "fail",
                text_column=preparation.text_column,
            )

    def _add(self, batch: EncodedBatch, origin: Origin) -> None:
        threshold = self._thresholds[self._sources[origin.last[0]].validation]
        if self._excluded:  # counts 0 documents too: a store of other records excludes none
            known = np.array([each in self._excluded for each in batch.hashes.tolist()], np.bool_)
            excluded = known & (batch.hashes >= np.uint64(threshold))
            self._totals.skipped[EXCLUDED] += int(excluded.sum())
            batch = batch.only(~excluded, threshold)
        duplicates = 0
        if self._seen is not None:
            first = self._seen.add(batch.keys)
            duplicates = len(first) - int(first.sum())
            if duplicates:
                batch = batch.only(first, threshold)
        entries = np.array([self._sources[k].entry for k in origin.sources], dtype=np.int64)
        self._totals.add(batch, entries[batch.records], duplicates, keep_keys=self._seen is not None)
        chosen = batch.hashes < np.uint64(threshold)
        _append(self._writer.splits["train"], batch, ~chosen)
        _append(self._writer.splits["validation"], batch, chosen)
        self._last = origin.last
        self._bytes += origin.size

    def _commit(self) -> None:
        self._work.save(
            {
                "threshold": self._threshold,
                "splits": self._writer.state(),
                "totals": self._totals.state(),
                "last": self._last,
                "bytes": self._bytes,
            }
        )
        self._next_commit = time.monotonic() + self._preparation.commit_seconds

    def _facts(self) -> dict[str, Any]:
        """Entries of store.json besides the files."""
        preparation, totals = self._preparation, self._totals
        names = [name if name.startswith(HUB_PREFIX) else Path(name).name for name in preparation.inputs]
        has_own_split = self._sources[0].validation and not self._sources[0].part
        return {
            "inputs": names,
            "input_documents": totals.entries,
            "validation_fraction": None if has_own_split else preparation.validation_fraction,
            "on_error": preparation.on_error,
            "special_tokens": preparation.special_tokens,
            "document_separator": preparation.document_separator,
            "special_tokens_in_texts": totals.special_tokens,
            "skipped": dict(totals.skipped),
            "deduplicated": preparation.deduplicate,
            "duplicates": totals.duplicates,
            "altered_documents": totals.altered,
            "zlib_bits_per_byte": totals.zlib_bits_per_byte(),
        }


def _append(writer: SplitWriter, batch: EncodedBatch, chosen: np.ndarray) -> None:
    """Appends the documents selected by `chosen` bool [documents]."""
    if chosen.all():
        ids, mask = batch.ids, batch.loss_mask
    else:
        tokens = np.repeat(chosen, batch.lengths)
        ids, mask = batch.ids[tokens], batch.loss_mask[tokens]
    writer.append(ids, batch.lengths[chosen], mask, int(batch.text_bytes[chosen].sum()), batch.hashes[chosen])


class SeenDocuments:
    """A set of uint64 keys, which takes 8 bytes per key (at most 16 while it grows).

    It is a list of sorted arrays, each at least twice as long as the next. A key is 64 bits of a SHA-256:
    among 10^8 documents, any document is mistaken for a duplicate with a probability of 0.03 %.
    """

    def __init__(self, keys: np.ndarray | None = None):
        self._levels: list[np.ndarray] = []
        if keys is not None and len(keys):
            self._levels.append(np.sort(keys))

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds `keys`; returns bool [len(keys)]: whether a key occurs for the first time."""
        values, places = np.unique(keys, return_index=True)
        new = np.ones(len(values), dtype=np.bool_)
        for level in self._levels:
            found = np.searchsorted(level, values)
            found[found == len(level)] = 0
            new &= level[found] != values
        first = np.zeros(len(keys), dtype=np.bool_)
        first[places[new]] = True
        if new.any():
            self._insert(values[new])
        return first

    def _insert(self, values: np.ndarray) -> None:
        while self._levels and len(self._levels[-1]) < 2 * len(values):
            values = np.concatenate([self._levels.pop(), values])
            values.sort(kind="stable")
        self._levels.append(values)


STORE = "store"
"""Subfolder in which the store is written."""
REPLACED = STORE + "-old"
"""Subfolder of the store being replaced, between the two renames of a commit."""
_KEPT = ("lock", MARKER)
"""Names of the files that stay in the folder while a process works in it."""


class Workspace:
    """Folder of an unfinished preparation; as a context manager, it holds the lock of `output`.

    Attributes: `folder`; `state`: the last state saved with this `fingerprint` (of inputs, tokenizer and
    options), or None. Raises OutputError if another process prepares the same output.
    """

    def __init__(self, output: Path, fingerprint: str):
        self.folder = output.parent / f".{output.name}.partial"
        self.state: dict[str, Any] | None = None
        self._output = output
        self._fingerprint = fingerprint
        self._lock = FileLock(self.folder / "lock")
        self._removed = False

    def __enter__(self) -> Workspace:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_content()
            try:
                self._lock.acquire(timeout=0)
            except FileNotFoundError:
                continue  # the lock's last holder has just removed the folder
            except Timeout:
                raise OutputError(
                    f"{self._output}: expected no other prepare at work on it, found one; wait until it is "
                    "done, or choose another --output"
                ) from None
            if (self.folder / "lock").exists():
                break
            self._lock.release()
        write_marker(self.folder, "prepare")  # before any file that the marker vouches for
        self._restore_replaced_store()
        self.state = self._read_state()
        if self.state is None:
            self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        if self.state is None:
            self.remove()
        self._lock.release()

    def _refuse_other_content(self) -> None:
        """Refuses a folder that no earlier `prepare` left, since everything in it would be deleted."""
        begun = f".{MARKER}.tmp-"  # left by a process that was killed before it wrote the marker
        with suppress(FileNotFoundError):  # the lock's last holder has just removed the folder
            names = [entry.name for entry in os.scandir(self.folder) if not entry.name.startswith(begun)]
            other = [name for name in names if name != "lock"]
            if other and read_marker(self.folder, "prepare") is None:
                raise OutputError(
                    f"{self.folder}: expected the folder in which {self._output} is prepared, found "
                    f"{min(other)} in it, and no {MARKER} of it; move it, or choose another --output"
                )

    def _restore_replaced_store(self) -> None:
        """Moves the old store back if a process was killed between the two renames of a commit."""
        old = self.folder / REPLACED
        if old.is_dir() and not self._output.exists():
            old.rename(self._output)

    def save(self, state: dict[str, Any]) -> None:
        """Saves `state` atomically; the files it describes must be on disk already."""
        self.state = state
        content = {"fingerprint": self._fingerprint, "digest": _digest(state), "state": state}
        replace_text(self.folder / "state.json", json.dumps(content))

    def clear(self) -> None:
        """Discards all work; the folder keeps only its lock."""
        self.state = None
        (self.folder / "state.json").unlink(missing_ok=True)  # first: it describes the other files
        self._clear_but(*_KEPT)

    def remove(self) -> None:
        if self._removed:
            return  # a folder of this name belongs to another process now
        self._clear_but(*_KEPT, "state.json")
        (self.folder / "state.json").unlink(missing_ok=True)  # last: it may record that the store is complete
        shutil.rmtree(self.folder, ignore_errors=True)
        self._removed = True

    def _clear_but(self, *kept: str) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in kept:
                entry.unlink()

    def _read_state(self) -> dict[str, Any] | None:
        try:
            content = read_json(self.folder / "state.json")
            same = content["fingerprint"] == self._fingerprint
            return content["state"] if same and content["digest"] == _digest(content["state"]) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def _digest(state: dict[str, Any]) -> str:
    """SHA-256 of a state. It detects a damaged or edited state, which could lead to a wrong store."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


HASHES = 1 << 64
ZLIB_LIMIT = 64 << 20
"""zlib's bits per byte are taken over at most this many leading bytes of the validation text."""


def fitting_threshold(threshold: int, lowest: int, highest: int) -> int:
    """The next hash below which documents are validation so that no split is empty; 0 if all are equal."""
    if threshold == 0 or lowest == highest:
        return 0
    return min(max(threshold, lowest + 1), highest)


class ZlibRate:
    """Compresses a text at level 9, up to `ZLIB_LIMIT`."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(9)
        self._size = self._packed = 0

    @property
    def is_full(self) -> bool:
        """Whether no more text counts."""
        return self._size >= ZLIB_LIMIT

    def add(self, text: bytes) -> None:
        """Appends text in UTF-8."""
        text = text[: ZLIB_LIMIT - self._size]
        self._size += len(text)
        self._packed += len(self._compressor.compress(text))

    def bits_per_byte(self) -> float | None:
        """Ends the text; returns compressed bits per byte, or None without text."""
        if not self._size:
            return None
        return 8 * (self._packed + len(self._compressor.flush())) / self._size


_COUNTS = ("documents", "altered", "duplicates", "special_tokens", "lowest", "highest")


class Totals:
    """Counts over all documents of a preparation. Use as a context manager, which closes its files.

    Files hold the validation text and the keys of documents seen, which are too large for the state.
    Attributes: `documents` (stored), `altered` (stored, but their tokens do not decode to their text),
    `special_tokens` (in texts), `duplicates` (left out), `skipped` (by cause), `entries` (by input).
    """

    def __init__(self, folder: Path, inputs: int, state: dict[str, Any] | None = None):
        self.documents = self.altered = self.duplicates = self.special_tokens = 0
        self.lowest, self.highest = HASHES, -1
        self.skipped: Counter[str] = Counter()
        self.entries = [0] * inputs
        if state is not None:
            for name in _COUNTS:
                setattr(self, name, state[name])
            self.skipped.update(state["skipped"])
            self.entries = list(state["entries"])
        text, keys = ((), ()) if state is None else (state["text"], state["keys"])
        self._text = HashedFile(folder / "validation-text", *text)
        try:
            self._keys = HashedFile(folder / "document-keys", *keys)
        except StaleStateError:
            self._text.abandon()
            raise

    def __enter__(self) -> Totals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._text.abandon()
        self._keys.abandon()

    def add(self, batch: EncodedBatch, entries: np.ndarray, duplicates: int, *, keep_keys: bool) -> None:
        """Counts a batch from which `duplicates` were removed; `entries` [documents]: index of the input."""
        self.skipped += batch.skipped
        self.duplicates += duplicates
        self.documents += len(batch.lengths)
        self.altered += int(np.count_nonzero(batch.altered))
        self.special_tokens += int(batch.special_tokens.sum())
        self.entries = (self.entries + np.bincount(entries, minlength=len(self.entries))).tolist()
        if len(batch.hashes):
            self.lowest = min(self.lowest, int(batch.hashes.min()))
            self.highest = max(self.highest, int(batch.hashes.max()))
        for text in batch.texts:
            self._text.write(text[: max(0, ZLIB_LIMIT - self._text.bytes)])
        if keep_keys:
            self._keys.write(batch.keys.tobytes())

    def state(self) -> dict[str, Any]:
        """State to resume from; the files are flushed to disk first."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "skipped": dict(self.skipped),
            "entries": self.entries,
            "text": self._text.sync(),
            "keys": self._keys.sync(),
        }

    def keys(self) -> np.ndarray:
        """uint64 keys of all documents added with `keep_keys`."""
        return np.frombuffer(b"".join(self._keys.content()), dtype=np.uint64)

    def other_threshold(self, threshold: int) -> int | None:
        """The `fitting_threshold`; None if it puts every document into the same split as `threshold`."""
        fitting = fitting_threshold(threshold, self.lowest, self.highest)
        is_same = fitting == threshold or (fitting == 0 and threshold <= self.lowest)
        return None if is_same else fitting

    def zlib_bits_per_byte(self) -> float | None:
        """Compressed bits per byte of the validation text at level 9; None without text."""
        packed = ZlibRate()
        for data in self._text.content():
            packed.add(data)
        return packed.bits_per_byte()

    def causes(self) -> str:
        """End of a message, such as ` (left out: 2 invalid JSON)`; empty if no record was left out."""
        if not self.skipped:
            return ""
        parts = (f"{count} {cause}" for cause, count in sorted(self.skipped.items()))
        return f" (left out: {', '.join(parts)})"
