"""What a run tells about itself: metrics.jsonl, console, trackers, report, `top`, the hardware's peak."""

from llm_pretrain.tracking.console import Console
from llm_pretrain.tracking.hardware import device_peak_flops, memory_bytes, size_text
from llm_pretrain.tracking.metrics import MetricsWriter, read_metrics, read_rows
from llm_pretrain.tracking.report import write_report
from llm_pretrain.tracking.top import watch_runs
from llm_pretrain.tracking.trackers import Trackers

__all__ = [
    "Console",
    "MetricsWriter",
    "Trackers",
    "device_peak_flops",
    "memory_bytes",
    "read_metrics",
    "read_rows",
    "size_text",
    "watch_runs",
    "write_report",
]
