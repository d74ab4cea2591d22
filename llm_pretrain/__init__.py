"""Pretrain language models: two launch paths over one core.

The names below are for programs and notebooks (`import llm_pretrain as lp`); docs/api.md has examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llm_pretrain.version import __version__

if TYPE_CHECKING:
    from llm_pretrain.api import (
        batches,
        compare_runs,
        evaluate,
        generate,
        load_config,
        open_model,
        open_run,
        train,
    )

__all__ = [
    "__version__",
    "batches",
    "compare_runs",
    "evaluate",
    "generate",
    "load_config",
    "open_model",
    "open_run",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the API when it is first used: what it needs takes seconds."""
    if name in __all__:
        return getattr(import_module("llm_pretrain.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
