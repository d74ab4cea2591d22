"""What a configuration changes against the attempt before, so that nothing changes silently on a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llm_pretrain.config import Config, YamlError, read_yaml_file, to_dict

NOT_REPORTED = {"run.output_dir", "checkpoint.resume"}
"""Where a run lies and what it starts from change nothing in it."""


def changed_settings(path: Path, config: Config) -> list[str]:
    """`section.field: old -> new` for each setting that differs from the file that an attempt left at `path`.

    Empty where there is no such file, or none that can be read: it is a report, not a check.
    """
    try:
        before = read_yaml_file(path)
    except (OSError, ValueError, YamlError):
        return []
    lines = []
    for section, fields in to_dict(config).items():
        old: dict[str, Any] = before.get(section) if isinstance(before, dict) else None  # type: ignore[assignment]  # checked below
        if not isinstance(old, dict):
            continue
        for name, value in fields.items():
            setting = f"{section}.{name}"
            if name in old and old[name] != value and setting not in NOT_REPORTED:
                lines.append(f"{setting}: {_as_written(old[name])} -> {_as_written(value)}")
    return lines


def _as_written(value: Any) -> str:
    """As it would stand in a file: `null` and `true`, not Python's words."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
