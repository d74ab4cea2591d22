"""Writes half-precision weights in folders that transformers opens without custom code.

Names, shapes and types decide the position of every byte. So each rank writes its parts in place, and the
files are the same however the model is divided over ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llm_pretrain.checkpoints import folders, state
from llm_pretrain.checkpoints.manifest import OPTIMIZER_STATE, Manifest
from llm_pretrain.checkpoints.state import Piece, describe_tensors, held_pieces, meta_tensors
from llm_pretrain.checkpoints.tensor_files import CHUNK_BYTES, safetensors_header
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.distributed.collectives import ONE_RANK, Ranks, gather_results, run_on_rank0
from llm_pretrain.distributed.initial_values import runs
from llm_pretrain.errors import CheckpointError, ConfigError, DataError
from llm_pretrain.export.config_json import huggingface_config, model_config_from_huggingface, native_config
from llm_pretrain.export.huggingface import (
    INDEX_FILE,
    DiskTensor,
    disk_dtype,
    disk_layout,
    end_of_turn_id,
    load_pretrained,
    read_config,
    rounded,
)
from llm_pretrain.export.model_card import ModelCardData, model_card
from llm_pretrain.files import (
    MARKER,
    fsync_file,
    make_folder,
    naming,
    object_or_empty,
    read_marker,
    write_marker,
    write_text,
)
from llm_pretrain.model.kernels import DTYPES
from llm_pretrain.optim.ema import average_name

if TYPE_CHECKING:
    from llm_pretrain.distributed.pipeline import Pipeline

logger = logging.getLogger(__name__)

_TOKENIZER_SUFFIXES = {".json", ".model", ".txt", ".jinja", ".tiktoken"}
BEST_FILE = "best.json"
"""In `best/`: the step, and the loss by its name, such as `eval/loss`."""
_OWN_FILES = {"config.json", "generation_config.json", INDEX_FILE, BEST_FILE, MARKER}


@dataclass(frozen=True)
class HeldWeights:
    """The weights of a model that is divided over ranks.

    Args:
        tensors: Tensors of the whole model, by name in its state dict; on any device, since only shapes and
            types are used.
        pieces: Parts of the tensors that this rank writes. All ranks' pieces have every element once.
    """

    tensors: Mapping[str, Tensor]
    pieces: Iterable[Piece]


def saved_names(content: Manifest, *, average: bool) -> dict[str, str]:
    """Name in the model's state dict → name in the checkpoint; `average` selects averages, if it has them."""
    names = {name: name for name in content.tensors if not name.startswith(OPTIMIZER_STATE)}
    if average:
        averages = {name: average_name(name) for name in names}
        names |= {name: saved for name, saved in averages.items() if saved in content.tensors}
    return names | {second: names[first] for second, first in content.tied.items() if first in names}


def weights_in(content: Manifest, pieces: Iterable[Piece]) -> HeldWeights:
    """The weights among a checkpoint's pieces; if it has averages of the parameters (EMA), the averages."""
    names = saved_names(content, average=True)
    tensors = meta_tensors({name: content.tensors[saved] for name, saved in names.items()})
    own = {saved: name for name, saved in reversed(names.items())}  # tied tensors get the first name
    return HeldWeights(tensors, (replace(each, name=own[each.name]) for each in pieces if each.name in own))


def model_weights(model: nn.Module, ranks: Ranks = ONE_RANK, pipeline: Pipeline | None = None) -> HeldWeights:
    """The weights of a model, which may be plain, wrapped or sharded."""
    module = state.raw_module(model)
    tensors = module.state_dict()
    pieces = held_pieces(tensors, rank=ranks.rank, world_size=ranks.world_size, pipeline=pipeline)
    if pipeline is not None:  # collective
        tensors = meta_tensors(pipeline.merged(describe_tensors(tensors)))
    return HeldWeights(tensors, pieces)


def save_weights(
    folder: Path,
    step: int,
    model: nn.Module | HeldWeights,
    config: ModelConfig,
    *,
    dtype: str,
    tokenizer_folder: Path,
    tokenizer_digests: Mapping[str, str] | None = None,
    token_ids: dict[str, int | None],
    keep_last: int,
    sequence_length: int,
    best: Mapping[str, float] | None = None,
    card: ModelCardData | None = None,
    ranks: Ranks = ONE_RANK,
) -> Path:
    """Write `folder/step-00000100/` completely or not at all, then prune older exports (collective).

    Every rank writes its parts of the tensors in place, so the bytes do not depend on how the model is
    divided. Rank 0 writes everything else. No tensor is gathered: a rank needs only 16 MB of extra memory.

    A model may match no architecture of transformers. Its config.json then has `model_type` `llm_pretrain`
    and this package's field names, and a log line names the fields.

    Args:
        folder: The run's folder `weights/`, shared by all ranks.
        step: Optimizer steps taken.
        model: The decoder (plain, wrapped or sharded), or the weights that this rank holds.
        config: The decoder's configuration, with a resolved `vocab_size`.
        dtype: `bf16`, `fp16` or `fp32`.
        tokenizer_folder: The folder whose tokenizer files are copied.
        tokenizer_digests: File name → SHA-256 that the tokenizer file must have, as in the run's store.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`; None for a missing token.
        keep_last: Number of newest exports to keep; at least 2 are kept.
        sequence_length: Default limit of generated text, the length that the model was trained on.
        best: Name and value of the lowest loss, if these weights have it: the export replaces `folder/best/`
            instead, with both in best.json.
        card: The content of README.md; None writes no README.md.
        ranks: The ranks that hold the model together.

    Returns:
        The folder with the weights.

    Raises:
        CheckpointError: a value does not fit `dtype`, the tokenizer is another one, or writing failed. All
            ranks raise it; earlier exports are unchanged.
    """
    held = model_weights(model, ranks) if isinstance(model, nn.Module) else model
    files = WeightFiles(held.tensors, config, DTYPES[dtype])

    def complete(path: Path) -> None:
        _write_config(path, config, dtype, token_ids)
        generation = _generation_config(token_ids, sequence_length, tokenizer_folder)
        write_json(path / "generation_config.json", generation)
        copy_tokenizer(tokenizer_folder, path, tokenizer_digests)
        if card is not None:
            write_text(path / "README.md", model_card(card))
        if best is not None:
            write_json(path / BEST_FILE, {"step": step, **best})
        _list_files(path)

    def begin() -> Path:
        make_folder(folder)
        folders.clean(folder)
        return folders.temporary_folder(folder, step, uuid.uuid4().hex)

    name = folders.folder_name(step) if best is None else folders.BEST
    temporary = run_on_rank0(ranks, begin, f"{folder}: beginning the weights of step {step}")
    path = _write_folder(temporary, name, files, held.pieces, complete, ranks)
    if best is None and ranks.rank == 0:
        folders.prune(folder, newest=step, keep_last=keep_last)
    return path


def _write_folder(
    temporary: Path,
    name: str,
    files: WeightFiles,
    pieces: Iterable[Piece],
    complete: Callable[[Path], None],
    ranks: Ranks,
) -> Path:
    """Commit `temporary` under the name `name` in its parent folder. Each rank writes its pieces of `files`,
    and `complete` adds the other files on rank 0."""
    doing = f"{temporary.parent / name}: writing weights, {files.bytes} bytes,"

    def make() -> None:
        temporary.mkdir()
        files.create(temporary)

    def commit() -> Path:
        files.check(temporary, covered)
        complete(temporary)
        return folders.commit_folder(temporary, name)

    try:
        run_on_rank0(ranks, make, doing)
        covered = gather_results(ranks, lambda: files.write(temporary, pieces), doing)
        return run_on_rank0(ranks, commit, doing)
    except BaseException:
        if ranks.rank == 0:
            folders.discard(temporary)
        raise


def best_step(folder: Path) -> int | None:
    """Step of the weights in `folder/best/`, after undoing an interrupted replacement.

    Returns:
        None if there are no such weights, or best.json is damaged.
    """
    best = folders.best_folder(folder)
    if best is None:
        return None
    step = object_or_empty(best / BEST_FILE).get("step")
    return step if isinstance(step, int) else None


def _write_config(folder: Path, config: ModelConfig, dtype: str, token_ids: dict[str, int | None]) -> None:
    special = _special_ids(token_ids)
    try:
        content = huggingface_config(config, **special, dtype=dtype)
    except ConfigError as error:
        logger.info("transformers does not open these weights: %s", error)
        content = native_config(config, **special, dtype=dtype)
    write_json(folder / "config.json", content)


def _special_ids(content: dict[str, Any]) -> dict[str, int | None]:
    return {name: content.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _generation_config(
    token_ids: dict[str, int | None], sequence_length: int, tokenizer_folder: Path
) -> dict[str, Any]:
    """Content of generation_config.json; text ends at EOS, or at the end of a chat turn."""
    known: dict[str, Any] = {name: value for name, value in token_ids.items() if value is not None}
    end, end_of_turn = token_ids.get("eos_token_id"), None
    with suppress(DataError, KeyError, TypeError, AttributeError):  # weights are written even so
        end_of_turn = end_of_turn_id(tokenizer_folder)
    if end is not None and end_of_turn not in (None, end):
        known["eos_token_id"] = [end, end_of_turn]
    return {**known, "do_sample": True, "max_new_tokens": sequence_length}


def copy_tokenizer(source: Path, target: Path, digests: Mapping[str, str] | None = None) -> None:
    """Copy a tokenizer's files, including the chat template, from a folder that may also hold weights.

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
    """Write the marker of a weights folder, with the names of its files."""
    write_marker(folder, "weights", files=sorted(each.name for each in folder.iterdir()))


def other_content(folder: Path) -> str | None:
    """Content of a folder other than weights that this program wrote, in words; None if there is none."""
    if not any(folder.iterdir()):
        return None
    if read_marker(folder, "weights") is None:
        return "something else"
    if name := folders.unlisted_file(folder):
        return f"{name} in it, which this program did not write"
    return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write and fsync `content`."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def convert_weights(
    source: Path, output: Path, dtype: str, *, check: Callable[[], None] = lambda: None
) -> None:
    """Convert the weights in `source` to `dtype` in `output/`, which is replaced completely or not at all.

    Args:
        source: A weights folder of this package or of transformers.
        output: The folder to write.
        dtype: `bf16`, `fp16` or `fp32`.
        check: Called before `output` is replaced; raises if `output` must not be replaced.

    Raises:
        ConfigError: names each field that no architecture of transformers has.
        CheckpointError: damaged weights, a value that does not fit in `dtype`, or writing failed.
    """
    content = read_config(source)
    model = model_config_from_huggingface(content)
    config = huggingface_config(model, **_special_ids(content), dtype=dtype)
    held = model_weights(load_pretrained(source))
    files = WeightFiles(held.tensors, model, DTYPES[dtype])

    def complete(path: Path) -> None:
        write_json(path / "config.json", config)
        copy_tokenizer(source, path)
        for name in ("generation_config.json", "README.md"):
            if (source / name).is_file():
                shutil.copyfile(source / name, path / name)
        _list_files(path)
        check()

    temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
    run_on_rank0(ONE_RANK, lambda: make_folder(output.parent), f"{output}: making its folder")
    _write_folder(temporary, output.name, files, held.pieces, complete, ONE_RANK)


MAX_SHARD_BYTES = 5_000_000_000
"""Largest size of a file, as in transformers."""
_SUMS = 1 << 64


@dataclass(frozen=True)
class _Place:
    """A tensor on disk, its file, the type of its elements on disk, and where its first byte is."""

    tensor: DiskTensor
    file: str
    dtype: torch.dtype
    begin: int

    def edge(self, element: int) -> int:
        """A 64-bit hash of the file and the byte where this element begins."""
        text = f"{self.file}/{self.begin + element * self.dtype.itemsize}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def cover(self, begin: int, end: int) -> int:
        """The edge of `end` minus the edge of `begin`, so that consecutive parts add up to the whole."""
        return self.edge(end) - self.edge(begin)


class WeightFiles:
    """`model.safetensors`, or shards of at most `MAX_SHARD_BYTES` and their index.

    Args:
        tensors: The model's tensors by name; only names, shapes and types are used.
        config: The model's shape, with a resolved `vocab_size`.
        dtype: Type of the floating tensors on disk, such as `torch.bfloat16`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype):
        from huggingface_hub import split_state_dict_into_shards_factory

        self._dtype = dtype
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        layout = {each.name: each for each in disk_layout(self._shapes, config)}
        described: dict[str, Tensor] = {}
        for name, each in layout.items():
            own = disk_dtype(name, tensors[each.source], dtype)
            described[name] = torch.empty(each.shape, dtype=own, device="meta")
        self._headers: dict[str, tuple[bytes, int]] = {}
        self._places: dict[str, list[_Place]] = {}
        self._index: dict[str, Any] | None = None
        split = split_state_dict_into_shards_factory(
            described,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_BYTES,
        )
        for file, names in split.filename_to_tensors.items():
            shard = {name: described[name] for name in names}
            header, begins = safetensors_header(shard, {"format": "pt"})
            self._headers[file] = header, len(header) + sum(each.nbytes for each in shard.values())
            for name, begin in begins.items():
                place = _Place(layout[name], file, described[name].dtype, begin)
                self._places.setdefault(place.tensor.source, []).append(place)
        if split.is_sharded:
            self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}

    def create(self, folder: Path) -> None:
        """Make the files in full size, headers followed by zeros. One rank calls this before `write`."""
        for file, (header, size) in self._headers.items():
            with open(folder / file, "wb", buffering=0) as stream, naming(stream.name):
                stream.write(header)
                stream.truncate(size)
                os.fsync(stream.fileno())
        if self._index is not None:
            write_text(folder / INDEX_FILE, json.dumps(self._index, indent=2) + "\n")

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self._headers.values())

    def write(self, folder: Path, pieces: Iterable[Piece]) -> int:
        """Write pieces of the model's tensors in chunks, and fsync; returns this rank's sum for `check`.

        Raises:
            CheckpointError: a value does not fit in `dtype`, or the files are not there.
            DivergedError: a value is not finite.
            OSError: naming the file.
        """
        covered = 0
        with ExitStack() as stack:
            opened: dict[str, FileIO] = {}
            for piece in pieces:
                places = self._places.get(piece.name, []) if piece.tensor.numel() else []
                for values, start in runs(piece.tensor, self._shapes[piece.name], piece.offsets):
                    for place in places:
                        for part, at in place.tensor.parts(values, start):
                            if place.file not in opened:
                                opened[place.file] = stack.enter_context(_opened(folder / place.file))
                            self._write(opened[place.file], place, part, at)
                            covered += place.cover(at, at + len(part))
            for stream in opened.values():
                with naming(stream.name):
                    os.fsync(stream.fileno())
        return covered % _SUMS

    def _write(self, stream: FileIO, place: _Place, values: Tensor, at: int) -> None:
        """Write values to a tensor on disk, beginning at element `at`."""
        position = place.begin + at * place.dtype.itemsize
        for chunk in values.detach().split(max(1, CHUNK_BYTES // values.element_size())):
            scaled = chunk if place.tensor.factor == 1 else chunk * place.tensor.factor
            data = rounded(place.tensor.name, scaled, self._dtype).view(torch.uint8).numpy().data
            with naming(stream.name), _locked(stream, position, len(data)):
                while data:
                    written = os.pwrite(stream.fileno(), data, position)
                    data, position = data[written:], position + written

    def check(self, folder: Path, covered: Iterable[int]) -> None:
        """Check that the ranks together have written every byte once.

        Args:
            folder: The folder with the files.
            covered: The results of `write` on all ranks.

        Raises:
            CheckpointError: a byte was not written, or written more than once.
        """
        places = [place for each in self._places.values() for place in each if place.tensor.factor]
        expected = sum(place.cover(0, place.tensor.elements) for place in places)
        if (sum(covered) - expected) % _SUMS:
            raise CheckpointError(
                f"{folder}: expected each part of the weights from one rank, found parts from none or from "
                "several"
            )


def _opened(file: Path) -> FileIO:
    try:
        # write-only: if a file is open for reading too, NFS reads a page before it writes into the page
        return open(file, "wb", buffering=0, opener=lambda path, _: os.open(path, os.O_WRONLY))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: expected the file that rank 0 has made, found none; weights need a folder that all "
            "machines share"
        ) from None


@contextmanager
def _locked(stream: FileIO, begin: int, size: int) -> Iterator[None]:
    """Lock these bytes if the file system has locks: NFS then writes no bytes of other ranks in a page."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX, size, begin)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        fcntl.lockf(stream, fcntl.LOCK_UN, size, begin)
