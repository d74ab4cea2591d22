"""docs/configuration.md says what the dataclasses say, of every setting."""

from __future__ import annotations

import re
from pathlib import Path

from llm_pretrain.config.loading import settings
from llm_pretrain.config.reference import reference

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_reference_is_up_to_date():
    assert FILE.read_text() == reference(), "run `make docs`"


def test_the_reference_has_every_setting_once():
    found = re.findall(r"^\| `(\w+\.\w+)` \|", FILE.read_text(), flags=re.MULTILINE)
    assert sorted(found) == sorted(settings())
