"""What each part of a manifest must look like before anything relies on it.

The digest says that a manifest is as it was written, not that this package wrote it: a file that somebody
else made, or mended by hand, must not lead to a traceback, a foreign file or an endless allocation.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
_NUMBERS = {"int": int, "float": (int, float), "bool": bool}
_LONGEST = 1 << 62


def wrong_part(manifest: Any) -> str | None:
    """What the first part that is none should be, with what was found; None where all are."""
    for owner in (manifest.run, manifest):
        hints = get_type_hints(type(owner))
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if not dataclasses.is_dataclass(hints[field.name]) and not _matches(hints[field.name], value):
                return f"{field.name} as {hints[field.name]}, found {value!r:.60}"
    run = manifest.run
    least = {"step": 0, "tokens_seen": 0, "world_size": 1, "global_batch_size": 1}
    for name, bound in least.items():
        if not bound <= getattr(run, name) < _LONGEST:
            return f"{name} from {bound} on, found {getattr(run, name)!r:.60}"
    for name, check in {"tensors": _tensor, "scalars": _scalar, "files": _file}.items():
        for key, entry in getattr(manifest, name).items():
            if wrong := check(entry):
                return f"{name} {key!r:.80} with {wrong}, found {entry!r:.80}"
    return _optimizer(manifest.optimizer) or _scaler(manifest.scaler)


def _matches(hint: Any, value: object) -> bool:
    """Whether plain JSON has the type; enough of `typing` for the manifest's own fields."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_matches(part, value) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint) if isinstance(value, str) else False
    if origin is dict:
        inner = get_args(hint)[1]
        return isinstance(value, Mapping) and all(_matches(inner, each) for each in value.values())
    if origin is list:
        return isinstance(value, list) and all(_matches(get_args(hint)[0], each) for each in value)
    if hint is int:
        return _whole(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor(entry: Mapping[str, Any]) -> str | None:
    shape = entry.get("shape")
    if entry.get("dtype") not in _DTYPES:
        return "a dtype of torch's"
    if not isinstance(shape, list) or not all(_whole(size) and 0 <= size < _LONGEST for size in shape):
        return "a shape of whole numbers"
    return None if math.prod(shape) < _LONGEST else "a shape that some memory could hold"


def _scalar(entry: Mapping[str, Any]) -> str | None:
    dtype, value = entry.get("dtype"), entry.get("value")
    if dtype not in _DTYPES | _NUMBERS.keys():
        return "a dtype"
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _LONGEST):
        return "a number"
    if "int" in str(dtype) and not _whole(value):
        return "a whole number"
    return None


def _file(entry: Mapping[str, Any]) -> str | None:
    digest = entry.get("sha256")
    if not _whole(entry.get("bytes")) or entry["bytes"] < 0:
        return "a number of bytes"
    is_digest = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return None if is_digest else "a SHA-256"


def _optimizer(entry: Mapping[str, Any]) -> str | None:
    """Class, groups with the names of their parameters, and the parameters without state."""
    groups = entry.get("groups")
    if not isinstance(entry.get("class"), str) or not isinstance(groups, list):
        return f"an optimizer with its class and groups, found {entry!r:.60}"
    for group in groups:
        if not isinstance(group, Mapping) or not _matches(list[str], group.get("params")):
            return f"the names of parameters in each of the optimizer's groups, found {group!r:.60}"
        for key, value in group.items():
            if key != "params" and not _setting(value):
                return f"a number or text as the optimizer's {key!r:.40}, found {value!r:.60}"
    if not _matches(list[str], entry.get("without_state")):
        return f"the optimizer's parameters without state, found {entry.get('without_state')!r:.60}"
    return None


def _setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_setting, value))
    return value is None or isinstance(value, bool | int | float | str)


def _scaler(entry: Mapping[str, Any] | None) -> str | None:
    if entry is not None and not (
        all(isinstance(value, int | float) for value in entry.values())
        and entry.get("scale", 0) > 0
        and _matches(int, entry.get("growth_interval", 1))
    ):
        return f"a gradient scaler's numbers, found {entry!r:.60}"
    return None
