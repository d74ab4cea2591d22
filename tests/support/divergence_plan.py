"""Cases of `rank_cases.py` about one rank whose loss or gradient is not finite at one step."""

from __future__ import annotations

from support.faults import OWN_LOSSES, Fault, Patch
from support.rank_cases import Case
from support.spoiling import spoil_class

SPOILT_STEP = 2
CHANGES = {"model": {"router_bias_update_rate": 0.125}, "training": {"global_batch_size": 8, "max_steps": 3}}


def spoiling(kind: str) -> Fault:
    """The fault of `spoil_class` at one step."""

    def fault(patch: Patch, engine: type) -> None:
        patch.setattr(engine, "forward", engine.forward)  # to be restored  # type: ignore[attr-defined]
        spoil_class(engine, kind, SPOILT_STEP, SPOILT_STEP)

    return fault


KINDS_OF = {"torchrun": ("both", "loss"), "accelerate": ("gradient", "loss")}
CASES = {
    f"{path} {kind}": Case(path, (spoiling(kind),), CHANGES)
    for path, kinds in KINDS_OF.items()
    for kind in kinds
} | {"own loss": Case("torchrun", (spoiling("loss"), OWN_LOSSES), CHANGES)}
