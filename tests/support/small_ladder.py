"""`llm-pretrain` with ladders of a few seconds: fewer steps, a small store, no waiting for a speed."""

from __future__ import annotations

import sys

from llm_pretrain import __main__
from llm_pretrain.commands import _ladder_runs
from llm_pretrain.ladder import budget

budget.MIN_STEPS = 10
budget.MAX_EPOCHS = 1000.0
_ladder_runs.MEASURED_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(__main__.main())
