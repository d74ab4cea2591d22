"""What a run records and shows: metrics.jsonl, console, trackers, report, `top`; peak FLOPS and memory."""

from llm_pretrain.tracking.console import Console, time_text
from llm_pretrain.tracking.machine import DEFAULT_MFU, GPU_GB, MACHINES, Machine
from llm_pretrain.tracking.metrics import (
    MetricsWriter,
    device_peak_flops,
    finite_number,
    memory_bytes,
    read_metrics,
    read_rows,
    size_text,
)
from llm_pretrain.tracking.replays import (
    HELD,
    REPLAYS_FILE,
    difference_lines,
    read_replays,
    replay_status,
    replay_summary,
)
from llm_pretrain.tracking.report import Table, render_page, write_page, write_report
from llm_pretrain.tracking.run_files import attempt_starts, fault_lines, metric_values, quantity
from llm_pretrain.tracking.trackers import Trackers

__all__ = [
    "DEFAULT_MFU",
    "GPU_GB",
    "HELD",
    "MACHINES",
    "REPLAYS_FILE",
    "Console",
    "Machine",
    "MetricsWriter",
    "Table",
    "Trackers",
    "attempt_starts",
    "device_peak_flops",
    "difference_lines",
    "fault_lines",
    "finite_number",
    "memory_bytes",
    "metric_values",
    "quantity",
    "read_metrics",
    "read_replays",
    "read_rows",
    "render_page",
    "replay_status",
    "replay_summary",
    "size_text",
    "time_text",
    "write_page",
    "write_report",
]
