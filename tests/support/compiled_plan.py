"""Compiled layers on meshes of two ranks that `rank_cases.py` runs, and the same layers uncompiled."""

from __future__ import annotations

from typing import Any

from support.faults import Patch
from support.rank_cases import Case

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "cp": {"cp_size": 2},
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
    "ep": {"ep_size": 2},
}
STEPS = 6


def _few_graphs(patch: Patch, engine: type[Any]) -> None:
    """An error where a graph is compiled after the third step, or none before."""
    from torch._dynamo.utils import counters

    train_step, counted = engine.train_step, [counters["stats"]["unique_graphs"]]

    def counting(self: Any, step: Any) -> None:
        train_step(self, step)
        counted.append(counters["stats"]["unique_graphs"])
        assert len(counted) <= 4 or counted[0] < counted[3] == counted[-1], counted

    patch.setattr(engine, "train_step", counting)


def _case(mesh: dict[str, Any], choice: str) -> Case:
    """Documents of every length, and a dense layer beside those of experts."""
    return Case(
        "torchrun",
        (_few_graphs,) if choice == "on" else (),
        {
            "data": {"packing": "best_fit"},
            "training": {"compile": choice, "max_steps": STEPS, "global_batch_size": 16},
            "model": {"num_hidden_layers": 4, "first_k_dense_replace": 2},
            "distributed": {"strategy": "fsdp"} | mesh,
        },
    )


CASES = {
    f"{mesh} {choice}": _case(sizes, choice) for mesh, sizes in MESHES.items() for choice in ("on", "off")
}
