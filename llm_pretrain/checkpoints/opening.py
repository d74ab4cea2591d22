"""Opens a model to use: from weights, from a checkpoint, or from the folder of a run, even while it runs.

Reads tensors of the model only; nothing here continues a training. One process.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from llm_pretrain import export
from llm_pretrain.checkpoints.averages import average_name
from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import (
    MANIFEST_NAME,
    Manifest,
    UnsoundError,
    find_damage,
    read_manifest,
)
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.config import (
    Config,
    YamlError,
    from_dict,
    read_yaml_file,
    resolve_precision,
    shape_problems,
)
from llm_pretrain.errors import CheckpointError, PretrainError
from llm_pretrain.model import Decoder

_OPTIMIZER = "optimizer.state."
_ATTEMPTS = 5
"""A run deletes its oldest folders while it goes on; so often another one is looked for."""


@dataclass(frozen=True)
class OpenedModel:
    """A decoder and what is known of where it came from.

    Args:
        model: In fp32, on the CPU, in eval mode.
        path: The folder it was read from.
        kind: Exported `weights`, or a full-precision `checkpoint`.
        step: Optimizer steps it was trained for; None where the folder does not say.
        tokenizer_folder: With its `tokenizer.json`; None where none was found.
        token_ids: `bos_token_id`, `eos_token_id` (possibly several) and the like, as the weights' JSON files
            have them; empty for a checkpoint.
        run: The configuration of the run it belongs to; None for a folder outside of one.
        world_size: Processes of that run when it saved; None for weights.
    """

    model: Decoder
    path: Path
    kind: Literal["weights", "checkpoint"]
    step: int | None
    tokenizer_folder: Path | None
    token_ids: dict[str, Any]
    run: Config | None
    world_size: int | None = None


def open_model(source: str | Path, *, average: bool = True) -> OpenedModel:
    """Open what `source` names.

    Args:
        source: A weights folder (ours or Hugging Face's), a checkpoint's folder, or a folder that has such
            folders in it, `RUN`, `RUN/weights`, `RUN/checkpoints`: then the one of the latest step, and of
            the same step the checkpoint, which is in full precision. A running run may delete the folder
            while it is read; then the next one is taken.
        average: Of a checkpoint that has an average of the parameters, read that, as its run evaluates it.

    Raises:
        CheckpointError: nothing to open there, or a damaged file; names it.
        ConfigError: an architecture that our decoder cannot compute.
    """
    source = Path(source)
    path = source
    for _ in range(_ATTEMPTS):
        path = _newest(source)
        there = path.exists()
        try:
            return _open_checkpoint(path, average) if is_checkpoint(path) else _open_weights(path)
        except (PretrainError, OSError) as error:
            if path.exists() or not there:
                if isinstance(error, OSError):
                    raise CheckpointError(f"{path}: expected readable files, found: {error}") from error
                raise
        if path == source:
            break
    raise CheckpointError(
        f"{path}: was deleted while it was read, as a run does with its older folders; name the run's "
        "folder, for its newest"
    )


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is a full-precision checkpoint, sound or not."""
    return (path / MANIFEST_NAME).is_file()


def _newest(source: Path) -> Path:
    """The folder to read: `source` itself, or the one of the latest step in it."""
    if is_checkpoint(source) or (source / "config.json").exists():
        return source
    found: dict[tuple[int, bool], Path] = {}
    for folder in (source, source / "weights", source / "checkpoints"):
        for step, path in committed_folders(folder).items():
            found[step, is_checkpoint(path)] = path
    return found[max(found)] if found else source


def _open_weights(path: Path) -> OpenedModel:
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path / 'config.json'}: expected a weights folder, a checkpoint or a run, found none of them; "
            "name a folder such as RUN/weights/step-00000100, RUN/checkpoints/step-00000100 or RUN"
        )
    token_ids = {key: value for key, value in export.read_config(path).items() if key.endswith("token_id")}
    token_ids |= {
        key: value
        for key, value in _json(path / "generation_config.json").items()
        if key.endswith("token_id")
    }
    return OpenedModel(
        model=export.load_pretrained(path).eval(),
        path=path,
        kind="weights",
        step=_step(path),
        tokenizer_folder=path if (path / "tokenizer.json").is_file() else None,
        token_ids=token_ids,
        run=_run_config(path),
    )


def _open_checkpoint(path: Path, average: bool) -> OpenedModel:
    try:
        content = read_manifest(path)
    except UnsoundError as error:
        raise CheckpointError(f"{path} is damaged: {error}; name an older checkpoint") from None
    run = _run_config(path)
    if run is None:
        raise CheckpointError(
            f"{path.parent.parent / 'config.yaml'}: expected the configuration of the checkpoint's run, "
            "found none; name a checkpoint inside of its run's folder, RUN/checkpoints/step-00000100"
        )
    return OpenedModel(
        model=_read_model(path, content, run, average).eval(),
        path=path,
        kind="checkpoint",
        step=content.run.step,
        tokenizer_folder=_tokenizer_of(path.parent.parent, run, content.run.fingerprints.get("tokenizer")),
        token_ids={},
        run=run,
        world_size=content.run.world_size,
    )


def _read_model(path: Path, content: Manifest, run: Config, average: bool) -> Decoder:
    """The decoder of a checkpoint whose files are all as its manifest says."""
    if problems := find_damage(path, content):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}; name an older checkpoint")
    fields = {f"model.{name}": str(value) for name, value in asdict(run.model).items()}
    saved = content.run.fingerprints
    for key in sorted(fields.keys() & saved.keys()):
        if fields[key] != saved[key]:
            raise CheckpointError(
                f"{path.parent.parent / 'config.yaml'}: expected {key} {saved[key]}, as the checkpoint "
                f"{path.name} has it, found {fields[key]}; it is another run's configuration"
            )
    if problems := shape_problems(run.model):
        raise CheckpointError(f"{path.parent.parent / 'config.yaml'}: {problems[0]}")
    with torch.device("meta"):  # nothing is allocated before the files are known to have it
        described = Decoder(run.model).state_dict()
    tensors = {name: value for name, value in described.items() if name not in content.tied}
    expected = {name: ["float32", list(value.shape)] for name, value in tensors.items()}
    found = {
        name: [facts["dtype"], list(facts["shape"])]
        for name, facts in content.tensors.items()
        if not name.startswith(_OPTIMIZER)
    }
    if different := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        name = different[0]
        raise CheckpointError(
            f"{path}: expected {name} as {expected.get(name, 'absent')}, by the run's config.yaml, found "
            f"{found.get(name, 'absent')} ({len(different)} tensors differ)"
        )
    model = Decoder(run.model)
    tensors = {}
    for name, value in model.state_dict().items():
        if name not in content.tied:
            averaged = average_name(name)
            tensors[averaged if average and averaged in content.tensors else name] = value
    read_tensors(tensors, path, sorted(content.files), world_size=1)
    return model


def _tokenizer_of(folder: Path, run: Config, digest: str | None) -> Path | None:
    """Where the run's tokenizer lies: in its first data store, or beside weights it has exported."""
    exported = [*reversed(committed_folders(folder / "weights").values()), folder / "weights" / "best"]
    stores = [Path(source.store) / "tokenizer" for source in run.data.sources[:1]]
    for candidate in [*stores, *exported]:
        try:
            found = hashlib.sha256((candidate / "tokenizer.json").read_bytes()).hexdigest()
        except OSError:
            continue
        if digest in (None, found):
            return candidate
    return None


def _run_config(path: Path) -> Config | None:
    """The configuration in the run's folder, two above; None where the folder lies in no run."""
    file = path.absolute().parent.parent / "config.yaml"
    if path.absolute().parent.name not in ("weights", "checkpoints") or not file.is_file():
        return None
    try:
        return resolve_precision(from_dict(read_yaml_file(file) or {}))
    except (OSError, ValueError, YamlError, PretrainError) as error:
        raise CheckpointError(
            f"{file}: expected a run's configuration, found: {' '.join(str(error).split())}"
        ) from error


def _step(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else _json(path / "best.json").get("step")


def _json(file: Path) -> dict[str, Any]:
    """Content of a JSON file that need not be there; empty where it is not."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, found: {error}") from error
    return content if isinstance(content, dict) else {}
