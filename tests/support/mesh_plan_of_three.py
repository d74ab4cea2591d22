"""The meshes that `rank_cases.py` runs in three processes, where a mean is no power of two."""

from __future__ import annotations

from support.mesh_plan import FLOAT64, in_float64, meshed
from support.rank_cases import Case

MESHES = {"ddp": None, "fsdp": {}, "ep": {"ep_size": 3}}
KINDS = {
    kind: changes | {"model": changes["model"] | {"num_experts": 6}} for kind, changes in FLOAT64.items()
}
CASES = {
    f"{mesh} {kind}": Case("torchrun", (in_float64,), meshed(changes, sizes))
    for kind, changes in KINDS.items()
    for mesh, sizes in MESHES.items()
}
