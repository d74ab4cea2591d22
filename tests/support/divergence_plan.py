"""Cases of `rank_cases.py` about one rank whose loss or gradient is not finite at one step."""

from __future__ import annotations

from support.mutation import Edit
from support.rank_cases import Case
from support.rank_plan import ACCELERATE, TORCHRUN
from support.spoiling import KINDS

SPOILT_STEP = 2
CHANGES = {"model": {"router_bias_update_rate": 0.125}, "training": {"global_batch_size": 8, "max_steps": 4}}

CASES: dict[str, Case] = {}
for path, file, engine in (
    ("torchrun", TORCHRUN, "TorchrunEngine"),
    ("accelerate", ACCELERATE, "AccelerateEngine"),
):
    for kind in KINDS:
        spoiling = Edit(
            file,
            "def main(argv",
            "from support.spoiling import spoil_class\n\n"
            f"spoil_class({engine}, {kind!r}, {SPOILT_STEP}, {SPOILT_STEP})\n\n\n"
            "def main(argv",
        )
        CASES[f"{path} {kind}"] = Case(path, (spoiling,), CHANGES)
    own_loss = Edit(file, "sums.reduced(self.reduce_sum)", "sums.reduced(lambda own: own)")
    CASES[f"{path} own loss"] = Case(path, (CASES[f"{path} loss"].edits[0], own_loss), CHANGES)
