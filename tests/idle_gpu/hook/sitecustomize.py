"""Lets a run train although no kernel computes: Python imports this at its start, on the idle GPU alone."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _even_rows(sent_E: Any, received_Pn: Any, ranks: int) -> tuple[list[int], list[int]]:
    """Equal numbers of rows to and from every rank, where the device has counted none."""
    each = len(sys._getframe(1).f_locals["order"]) // ranks
    return [each] * ranks, [each] * ranks


CHANGES: dict[str, dict[str, Any]] = {
    "llm_pretrain.training.kernel_choice": {"_failures": lambda by_rank, devices: []},
    "llm_pretrain.distributed.expert_parallel": {"_rows_by_rank": _even_rows},
}
"""Module -> functions that take the place of its own."""


class _Changing:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                vars(module).update(CHANGES[name])

            spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _Changing)
