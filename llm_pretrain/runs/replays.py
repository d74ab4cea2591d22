"""Reads `replays.jsonl` of a run's folder: the results of `llm-pretrain replay`, a line for each call."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_pretrain.runs.rows import Row, readable_rows

REPLAYS_FILE = "replays.jsonl"
HELD = ("identical", "within bound")
"""Verdicts of a segment whose steps follow from the run's settings, data and seed."""


def read_replays(folder: Path, problems: list[str] | None = None) -> list[Row]:
    """The recorded replays of a run, oldest first; each line that is no replay is added to `problems`."""
    found = readable_rows(folder / REPLAYS_FILE, [] if problems is None else problems, _parse, "a replay")
    return [replay for _, replay in found]


def _parse(line: bytes) -> Row | None:
    """The replay in a line; None if the line has none."""
    try:
        replay = json.loads(line)
        time.gmtime(replay["time"])  # verify shows the time
        segments = replay["segments"]
        is_sound = all(0 <= each["start"] < each["end"] and each["verdict"] for each in segments)
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        return None
    return replay if is_sound else None


def replay_differences(replays: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The segments in which a replay and the run differ, oldest first.

    If a later replay finds all steps of such a segment identical, the earlier replay was wrong. The later one
    must have compared a checkpoint too if the earlier one did.
    """
    found: list[Row] = []
    for segment in _segments(replays):
        if segment["verdict"] == "identical":
            found = [each for each in found if not _clears(segment, each)]
        elif segment["verdict"] == "differs":
            found.append(segment)
    return found


def difference_lines(replays: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each segment of `replay_differences`, with the first step and number that differ."""
    lines = []
    for each in replay_differences(replays):
        first = each.get("first")
        at = f", first at step {first.get('step')}: {first.get('name')}" if isinstance(first, dict) else ""
        lines.append(f"steps {each['start'] + 1}-{each['end']} differ{at}")
    return lines


def replay_summary(replays: Sequence[Mapping[str, Any]], last: int | None) -> str:
    """How many of the run's steps up to `last` were replayed, and with which verdicts, in words."""
    spans: list[tuple[int, int, str]] = []
    again = [*_segments(replays), *replay_differences(replays)]
    for new in (each for each in again if each["verdict"] in (*HELD, "differs")):
        start, end, kept = new["start"], new["end"], list[tuple[int, int, str]]()
        for a, b, verdict in spans:
            pieces = ((a, min(b, start), verdict), (max(a, end), b, verdict))
            kept += [piece for piece in pieces if piece[0] < piece[1]]
        spans = [*kept, (start, end, new["verdict"])]
    counts = {word: sum(b - a for a, b, verdict in spans if verdict == word) for word in (*HELD, "differs")}
    counts = {word: count for word, count in counts.items() if count}
    of = "" if last is None else f" of {last:,}"
    numbers = len(counts) > 1
    words = [f"{count:,} " * numbers + word.replace("differs", "differ") for word, count in counts.items()]
    return f"{sum(counts.values()):,}{of} steps replayed" + (f": {', '.join(words)}" if words else "")


def replay_status(replays: Sequence[Mapping[str, Any]]) -> Row:
    """The entries of `status.json` about recorded replays; empty if there are none."""
    if not replays:
        return {}
    last = {key: replays[-1].get(key) for key in ("time", "verdict")}
    return {"replays": {"count": len(replays), "last": last, "differences": difference_lines(replays)}}


def _segments(replays: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [segment for replay in replays for segment in replay["segments"]]


def _clears(later: Row, found: Row) -> bool:
    covers = later["start"] <= found["start"] and found["end"] <= later["end"]
    return covers and (later.get("tensors") is not None or found.get("tensors") is None)
