"""The commands that documents show, cut out of their `sh` blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
TUTORIAL = ROOT / "docs" / "tutorial.md"
NIGHT = ROOT / "docs" / "ladder.md"
PAGES = tuple(sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *PAGES)


def blocks(document: Path) -> list[str]:
    """The `sh` blocks of a document, as they stand."""
    return re.findall(r"^```sh\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[list[str]]:
    """Every command of a document's `sh` blocks as words; comments are left out, continued lines joined."""
    lines = "".join(blocks(document)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
