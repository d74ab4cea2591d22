"""Opens a model for inference from weights, a checkpoint or a run's folder. The run may still be running."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import (
    MANIFEST_NAME,
    Manifest,
    UnsoundError,
    describe,
    find_damage,
    model_fingerprint,
    read_manifest,
    state_differences,
)
from llm_pretrain.checkpoints.state import describe_tensors
from llm_pretrain.checkpoints.tensor_files import read_tensors
from llm_pretrain.checkpoints.weights import BEST_FILE, saved_names
from llm_pretrain.config.loading import from_dict, resolve_precision, shape_problems
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.errors import CheckpointError, PretrainError
from llm_pretrain.export.huggingface import load_pretrained, read_config
from llm_pretrain.files import ids_digest, object_or_empty, open_safetensors
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import configured_kernels
from llm_pretrain.text import reason_of


@dataclass(frozen=True)
class OpenedModel:
    """A decoder and its origin.

    Args:
        model: In fp32, on the CPU, in eval mode. A model from a checkpoint has the kernels of its run.
        path: The folder that the model was read from.
        kind: Exported `weights`, or a full-precision `checkpoint`.
        step: Optimizer steps of training; None if unknown.
        tokenizer_folder: A folder with the model's `tokenizer.json`; None if none was found.
        token_ids: `bos_token_id`, `eos_token_id` (possibly a list) and others from the JSON files of the
            weights; empty for a checkpoint.
        run: Configuration of the model's run; None if the folder is not in a run.
        world_size: Number of processes that saved the checkpoint; None for weights.
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
    """Open the model in `source`.

    Args:
        source: A weights folder (of this package or Hugging Face), a checkpoint, or a folder with several of
            them: `RUN`, `RUN/weights` or `RUN/checkpoints`. Of several, the latest step is opened; if weights
            and a checkpoint have that step, the checkpoint, for its full precision.
        average: Whether to read the parameters' average (EMA) instead, if the checkpoint has one.

    Raises:
        CheckpointError: there is no model, or a file is damaged.
        ConfigError: the decoder does not support the architecture.
    """
    path = _newest(Path(source))
    try:
        return _open_checkpoint(path, average) if is_checkpoint(path) else _open_weights(path)
    except OSError as error:
        raise CheckpointError(f"{path}: expected readable files, found: {error}") from error


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is a full-precision checkpoint, sound or not."""
    return (path / MANIFEST_NAME).is_file()


def _newest(source: Path) -> Path:
    """The folder to read: `source` itself, or the folder of the latest step in `source`."""
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
    content, beside = read_config(path), "generation_config.json"
    if (path / beside).is_file():
        content |= read_config(path, beside)
    return OpenedModel(
        model=load_pretrained(path).eval(),
        path=path,
        kind="weights",
        step=_step(path),
        tokenizer_folder=path if (path / "tokenizer.json").is_file() else None,
        token_ids={key: value for key, value in content.items() if key.endswith("token_id")},
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
    """Read a checkpoint's decoder, after verifying the files and comparing them with the run's config."""
    if problems := find_damage(path, content):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}; name an older checkpoint")
    file, saved = path.parent.parent / "config.yaml", content.run.fingerprints
    for key, value in model_fingerprint(run.model).items():
        if saved.get(key, value) != value:
            raise CheckpointError(
                f"{file}: expected {key} {saved[key]}, as the checkpoint {path.name} has it, found {value}; "
                "it is another run's configuration"
            )
    if problems := shape_problems(run.model):
        raise CheckpointError(f"{file}: {problems[0]}")
    with torch.device("meta"):  # takes no memory before the shapes have been compared
        described = Decoder(run.model).state_dict()
    tensors = describe_tensors({name: each for name, each in described.items() if name not in content.tied})
    if problems := state_differences(content, describe(tensors, {}, content.tied), model_only=True):
        raise CheckpointError(f"{path}: expected the tensors of {file}, found that {problems[0]}")
    kernels = configured_kernels(run)
    if kernels.attention != "sdpa":  # varlen runs on CUDA only
        kernels = replace(kernels, attention="auto")
    model = Decoder(run.model, kernels=kernels)
    saved_as = saved_names(content, average=average)
    parts = {saved_as[name]: value for name, value in model.state_dict().items()}
    read_tensors(parts, path, sorted(content.files))
    return model


class CheckpointTensors(ExitStack):
    """The tensors of one checkpoint, read one at a time; a context manager.

    `problems` has one line per difference between the files' headers and the manifest.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__()
        self.folder, self.manifest = folder, manifest
        files = sorted(
            name for name in manifest.files if name.endswith(".safetensors") and Path(name).name == name
        )
        self._parts: dict[str, dict[str, Any]] = {}
        for name in files:
            file = self.enter_context(open_safetensors(folder / name))
            for tensor in file.keys():  # noqa: SIM118  # the file itself cannot be iterated over
                self._parts.setdefault(tensor, {})[name] = file
        self.problems = self._differences()

    def _differences(self) -> list[str]:
        """Tensors that only the files or only the manifest has, and tensors with missing or extra parts."""
        described = self.manifest.tensors
        problems = [
            f"{name}: expected by the manifest, in no file" for name in described.keys() - self._parts
        ]
        problems += [f"{name}: in a file, not in the manifest" for name in self._parts.keys() - described]
        for name in described.keys() & self._parts.keys():
            shapes = [file.get_slice(name).get_shape() for file in self._parts[name].values()]
            if sum(map(prod, shapes)) != prod(described[name]["shape"]):
                problems.append(f"{name}: expected shape {described[name]['shape']}, found {shapes}")
        return sorted(problems)

    def parts(self, name: str) -> list[Tensor]:
        """A tensor's parts in the files; a tensor that is not sharded has one part."""
        return [file.get_tensor(name) for file in self._parts[name].values()]

    def read(self, name: str) -> Tensor:
        """A whole tensor, put together from its parts."""
        described = self.manifest.tensors[name]
        if len(parts := self.parts(name)) == 1 and list(parts[0].shape) == described["shape"]:
            return parts[0]
        tensor = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]))
        read_tensors({name: tensor}, self.folder, self._parts[name])
        return tensor


def _tokenizer_of(folder: Path, run: Config, digest: str | None) -> Path | None:
    """A folder with the run's tokenizer: in its first token store, or with its exported weights."""
    exported = [*reversed(committed_folders(folder / "weights").values()), folder / "weights" / "best"]
    stores = [Path(source.store) / "tokenizer" for source in run.data.sources[:1]]
    for candidate in [*stores, *exported]:
        spec = object_or_empty(candidate / "tokenizer.json")
        if spec and digest in (None, ids_digest(spec)):
            return candidate
    return None


def _run_config(path: Path) -> Config | None:
    """The configuration in the run's folder, two levels above `path`; None if `path` is not in a run."""
    file = path.absolute().parent.parent / "config.yaml"
    if path.absolute().parent.name not in ("weights", "checkpoints") or not file.is_file():
        return None
    try:
        return resolve_precision(from_dict(read_yaml_file(file) or {}))
    except (OSError, ValueError, PretrainError) as error:
        raise CheckpointError(f"{file}: expected a run's configuration, found: {reason_of(error)}") from error


def _step(path: Path) -> int | None:
    """The step in the name of a weights folder, or in the `best.json` of `weights/best`; None if unknown."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else object_or_empty(path / BEST_FILE).get("step")
