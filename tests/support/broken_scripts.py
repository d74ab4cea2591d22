"""Folders with the two scripts, a known mistake put into both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fork_server import ROOT, SCRIPTS

_SCRIPT = """import sys

sys.path[:0] = [{root!r}, {tests!r}]
import {script} as script
from support.fork_server import resolve

main, exit_process = script.main, script.exit_process
if __name__ == "__main__":
    for target, arguments in {before!r}:
        resolve(target)(*arguments)
    exit_process(main())
"""


def write_scripts(folder: Path, *before: tuple[str, list[Any]]) -> Path:
    """Both scripts, written into `folder`; they call `before` (`module:function`, arguments) first."""
    folder.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS.values():
        text = _SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), script=script, before=list(before))
        (folder / f"{script}.py").write_text(text)
    return folder
