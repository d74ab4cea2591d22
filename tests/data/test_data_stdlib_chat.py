"""Conversations are made of every documented public definition of the standard library."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from llm_pretrain.data.documents import parse_record
from llm_pretrain.data.inputs import STDLIB_CHAT
from llm_pretrain.data.readers import conversations, read_records

SOURCE = '''
"""A module."""

def shout(text: str, *, times: int = 1) -> str:
    """Say it loudly.

    More of this is not asked for.
    """

def silent(): ...

def _private():
    """Nobody asks."""

class Horn(Base):
    """Makes noise."""

    async def blow(self, *notes):
        """Blow
        once."""
'''


def talk(path: Path, name: str = "sound/__init__.py") -> list[list[str]]:
    records = [json.loads(data) for _, data in conversations(name, path)]
    assert all([m["role"] for m in r["messages"]] == ["user", "assistant"] * 2 for r in records)
    return [[message["content"] for message in record["messages"]] for record in records]


def test_every_documented_public_definition_becomes_a_conversation(tmp_path: Path):
    file = tmp_path / "sound.py"
    file.write_text(SOURCE)
    assert talk(file) == [
        [
            "What does the function `sound.shout` do?",
            "Say it loudly.",
            "How is it written?",
            "`def shout(text: str, *, times: int=1)`",
        ],
        ["What does the class `sound.Horn` do?", "Makes noise.", "How is it written?", "`class Horn(Base)`"],
        [
            "What does the function `sound.Horn.blow` do?",
            "Blow once.",
            "How is it written?",
            "`async def blow(self, *notes)`",
        ],
    ]


def test_a_file_that_cannot_be_parsed_has_no_conversations(tmp_path: Path):
    file = tmp_path / "new.py"
    file.write_text("def broken(:\n")
    assert talk(file) == []


@pytest.mark.parametrize("records", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_input_yields_conversations_with_ascending_lines(records: int):
    lines: dict[str, int] = {}
    count = 0
    for record in islice(read_records([STDLIB_CHAT]), records):
        document = parse_record(record)
        assert document.messages is not None
        assert record.line > lines.get(record.name, 0)
        lines[record.name] = record.line
        count += 1
    assert count == records
