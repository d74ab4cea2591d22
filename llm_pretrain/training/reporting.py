"""The report at the end of a run: worth a warning when it fails, never an error.

What the report shows is in `tracking`.
"""

from __future__ import annotations

import sys

from llm_pretrain.tracking import write_report
from llm_pretrain.training.run_folder import RunFolder


def report_run(folder: RunFolder) -> None:
    """Write the run's `report.html`, if it has come to any metrics; a failure is one line of warning."""
    if not folder.metrics.exists():
        return
    try:
        write_report([folder.path], folder.report)
    except Exception as error:  # whatever it is, the run itself has ended as its status says
        reason = str(error).partition("\n")[0] or type(error).__name__
        print(f"warning: no report was written: {reason}", file=sys.stderr, flush=True)
