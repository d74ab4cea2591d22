"""`report.html`: what one run did, or several beside each other, on one page that needs nothing else.

This is the face; data, charts, tables and page have a file each. Training is never held up by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Writes the page of some runs; it replaces an older one when it is whole.

    Args:
        runs: Run folders, at least one; they may still be running.
        output: The page's file; its folder is made when missing.

    Returns:
        `output`.

    Raises:
        ConfigError: a folder is missing or no run's.
        CheckpointError: a run's `metrics.jsonl` is damaged or cannot be read.
        OutputError: the page cannot be written.
    """
    # jinja2 and plotly's script are for this alone
    from llm_pretrain.tracking.report_page import render, write
    from llm_pretrain.tracking.run_files import read_run

    return write(render([read_run(Path(run)) for run in runs]), Path(output))
