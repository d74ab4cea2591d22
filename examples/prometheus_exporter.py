"""Hands the figures of runs to Prometheus, from the files in their folders.

    python examples/prometheus_exporter.py runs --port 9464            # to be scraped
    python examples/prometheus_exporter.py runs --textfile FILE.prom   # for the node exporter, every 15 s

It needs `pip install prometheus-client`, and runs beside the training, which it cannot disturb. For each run
`llm_pretrain_state` is 1 for the state that `llm-pretrain top` shows, of which `failed` and `diverged`
deserve an alert. On the machine (and in the container) of rank 0 a run that is gone is `killed`; elsewhere it
stays `running`, so alert on the age of `llm_pretrain_time`, the time of its newest row, as well.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from llm_pretrain.errors import PretrainError
from llm_pretrain.runs.record import read_run
from llm_pretrain.tracking.top import newest_numbers, runs_in

SECONDS = 15
"""Time between two writes of a text file."""
PART = re.compile(r"(source)/([^/]+)/|(layer)_(\d+)/")
"""What becomes a label: `eval/source/code/loss` is `llm_pretrain_eval_source_loss{source="code"}`."""


class Runs(Collector):
    """The newest value of each metric of each run. Runs may appear, and be deleted, at any time.

    Args:
        paths: Folders of runs, or folders of such folders.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the state of each run, then each metric; those of sources and layers with their label."""
        state = GaugeMetricFamily("llm_pretrain_state", "1 for the state of a run.", labels=["run", "state"])
        families: dict[str, GaugeMetricFamily] = {}
        for folder in self._folders():
            # a run that is deleted meanwhile, or damaged, of which `verify` tells
            with suppress(PretrainError, OSError):
                record = read_run(folder, metrics=False)
                state.add_metric([str(folder), record.state], 1)
                for key, value in newest_numbers(folder / "metrics.jsonl", record.problems).items():
                    part = PART.search(key)
                    name = re.sub(r"\W", "_", PART.sub(r"\1\3/", key))
                    if name not in families:
                        families[name] = GaugeMetricFamily(
                            f"llm_pretrain_{name}", "Newest value.", labels=["run", "source", "layer"]
                        )
                    source, layer = part.group(2, 4) if part else (None, None)
                    if value is not None:
                        families[name].add_metric([str(folder), source or "", layer or ""], value)
        yield from [state, *families.values()]

    def _folders(self) -> Iterator[Path]:
        found: dict[Path, None] = {}  # a run may be in two paths
        for path in self.paths:
            with suppress(PretrainError, OSError):  # there is no run yet
                found |= dict.fromkeys(runs_in(path))
        yield from found


def main() -> None:
    """Serve or write the figures until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--port", type=int, help="serve http://…:PORT/metrics; 0 takes a free one")
    output.add_argument("--textfile", type=Path, help=f"write a file every {SECONDS} s, atomically")
    options = parser.parse_args()
    registry = CollectorRegistry()
    registry.register(Runs(options.paths))
    if options.textfile is None:
        server, thread = start_http_server(options.port, registry=registry)
        print(f"http://localhost:{server.server_port}/metrics", flush=True)
        thread.join()
    else:
        while True:
            write_to_textfile(str(options.textfile), registry)
            time.sleep(SECONDS)


if __name__ == "__main__":
    main()
