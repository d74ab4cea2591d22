"""Rows of a data set on the Hugging Face hub, streamed by the `datasets` library.

`hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]` is the one spelling; the split is `train` where none is named.
Nothing is written to disk but what the library keeps of the set's description.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from llm_pretrain.errors import DataError

HUB_PREFIX = "hf://"
TIMEOUT_SECONDS = 10.0
"""How long the hub may take to answer at first."""
BATCH_ROWS = 256

_SPELLING = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^/:]+))?(/(?P<config>[^:/]+))?(:(?P<split>[^:]+))?"
)


class HubInterruptedError(DataError):
    """The hub broke off amid a data set; what was read before it is sound."""


@dataclass(frozen=True)
class HubSet:
    """A data set's repository `name`, and which part of it."""

    name: str
    revision: str | None
    config: str | None
    split: str


def parse_hub_name(name: str) -> HubSet:
    """The parts of `hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`. Raises DataError for another spelling."""
    match = _SPELLING.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: expected hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT], found another form")
    revision = match["revision"] and unquote(match["revision"])
    return HubSet(match["name"], revision, match["config"], match["split"] or "train")


@functools.cache
def hub_revision(name: str) -> str:
    """The commit that `name` stands for now, asked of the hub once. Raises DataError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    parts = parse_hub_name(name)
    where = f"the data set {parts.name} on {constants.ENDPOINT}"
    try:
        found = HfApi().dataset_info(parts.name, revision=parts.revision, timeout=TIMEOUT_SECONDS)
    except RevisionNotFoundError as error:
        raise DataError(
            f"{name}: expected {where} at revision {parts.revision}, found no such one"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        advice = "check its name, or log in with `hf auth login` if it is private"
        raise DataError(f"{name}: expected {where}, found none; {advice}") from error
    except Exception as error:  # no network shows in many kinds, of several libraries
        advice = "try again with a network, or fetch its files elsewhere and give their folder"
        raise DataError(
            f"{name}: expected {where}, found no answer within {TIMEOUT_SECONDS:.0f} s "
            f"({_one_line(error)}); {advice}"
        ) from error
    return found.sha or "main"


def hub_tables(name: str) -> Iterator[Any]:
    """`pyarrow.Table` after table of the set's rows, in order. Raises DataError."""
    parts = parse_hub_name(name)
    rows = _open(name, parts, hub_revision(name))
    try:
        yield from rows.with_format("arrow").iter(batch_size=BATCH_ROWS)
    except Exception as error:  # the hub, its files and their decoding fail in many kinds
        raise HubInterruptedError(
            f"{name}: expected to read on, found {_one_line(error)}; start again to continue"
        ) from error


def _open(name: str, parts: HubSet, revision: str) -> Any:
    import datasets

    config = datasets.DownloadConfig(max_retries=2)
    try:
        return datasets.load_dataset(
            parts.name,
            parts.config,
            split=parts.split,
            revision=revision,
            streaming=True,
            download_config=config,
        )
    except Exception as error:  # as above; a config or split that does not exist is a ValueError among them
        part = f"split {parts.split}" + (f" of config {parts.config}" if parts.config else "")
        raise DataError(f"{name}: expected {part}, found {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
