"""A weights folder written anew in transformers' format: another type, or out of our own format.

Reads and writes whole models; a run's own exports are in `weights.py`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from llm_pretrain import export
from llm_pretrain.checkpoints import folders, weights
from llm_pretrain.errors import CheckpointError

_ALSO_COPIED = ("generation_config.json", "README.md")


def convert_weights(source: Path, output: Path, dtype: str) -> None:
    """Write the weights in `source` as `output/`, whole or not at all; an older `output` is replaced.

    Args:
        source: A weights folder, ours or transformers'.
        output: The folder to write.
        dtype: `bf16`, `fp16` or `fp32`.

    Raises:
        ConfigError: Naming each field that no architecture of transformers has.
        CheckpointError: Broken weights, a value that does not fit in `dtype`, or writing failed.
    """
    content = export.read_config(source)
    model = export.model_config_from_huggingface(content)
    bos, eos, pad = (content.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    config = export.huggingface_config(
        model, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, dtype=dtype
    )
    decoder = export.load_pretrained(source)
    temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
    try:
        folders.make_parent(output.parent)
        temporary.mkdir()
        tensors = export.to_huggingface(decoder.state_dict(), model, weights.DTYPES[dtype])
        weights.write_tensors(temporary, tensors)
        weights.write_json(temporary / "config.json", config)
        weights.copy_tokenizer(source, temporary)
        for name in _ALSO_COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        _replace(temporary, output)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise CheckpointError(f"{output}: writing failed: {reason}") from error
    finally:
        folders.discard(temporary)


def _replace(temporary: Path, output: Path) -> None:
    """Give the finished folder its name; what had it before goes last."""
    before = output.with_name(f".{output.name}.old-{uuid.uuid4().hex}")
    if os.path.lexists(output):
        os.rename(output, before)
    try:
        os.rename(temporary, output)
    except OSError:
        if os.path.lexists(before):
            os.rename(before, output)
        raise
    folders.discard(before)
