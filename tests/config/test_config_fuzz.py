"""Any tree or command line is a configuration or a ConfigError, and a dump goes round."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzed

from llm_pretrain.config.loading import (
    dump_yaml,
    from_dict,
    load_config,
    to_dict,
)
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError

BASE = to_dict(Config()) | {"data": {"sources": [{"store": "x", "weight": 1.0}], "packing": "concat"}}
NAMES = [(section, field) for section, fields in BASE.items() for field in fields]

words = st.sampled_from(
    ["auto", "on", "yes", "null", "~", "1e-3", "010", "1:30", "2024-01-01", "=", "<<", "x"]
)
numbers = st.integers(-3, 9) | st.integers() | st.just(10**400) | st.floats()
text = st.text(st.characters(codec=None), max_size=8) | words
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.just("store"), inner, max_size=3),
    max_leaves=5,
)
known = st.sampled_from(NAMES)
places = known | st.tuples(text, text) | known.flatmap(lambda name: st.tuples(st.just(name[0]), text))


@st.composite
def trees(draw) -> dict:
    """The default tree with a few settings replaced, added, or a section replaced."""
    tree = {section: dict(fields) for section, fields in BASE.items()}
    for section, field in draw(st.lists(places, min_size=1, max_size=4)):
        if draw(st.integers(0, 9)) == 0 or not isinstance(tree.get(section, {}), dict):
            tree[section] = draw(values)
        else:
            tree.setdefault(section, {})[field] = draw(values)
    return tree


def outcome(argv: list[str], *, needs_data: bool = True) -> Config | ConfigError:
    try:
        return load_config(argv, needs_data=needs_data)
    except ConfigError as error:
        refusal = error
    assert refusal.problems
    for line in refusal.problems:
        assert "\n" not in line
        assert ": " in line
    return refusal


@given(tree=trees())
@fuzzed(40)
def test_any_tree_is_accepted_or_refused(tmp_path: Path, tree: dict):
    """As a file, whose dump goes round, and as plain values, which the configuration holds."""
    file = tmp_path / "tree.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    result = outcome(["--config", str(file)])
    if isinstance(result, Config):
        file.write_text(dump_yaml(result, comments=True), encoding="utf-8")
        assert load_config(["--config", str(file)]) == result
    try:
        config = from_dict(tree)
    except ConfigError:
        return
    again = to_dict(config)
    for section, fields in tree.items():
        for field, value in (fields or {}).items():
            if (section, field) == ("data", "sources"):
                assert [{"weight": 1.0, "name": None} | entry for entry in value] == again[section][field]
            else:
                assert again[section][field] == value or value != value
    assert from_dict(again) == config or "nan" in repr(again)


@given(
    argv=st.lists(
        text
        | st.sampled_from(["--config", "--print_confi", "--model", "--", "-x", "--data.sources"])
        | st.builds("--{0[0]}.{0[1]}".format, known)
        | st.builds("--{0[0]}.{0[1]}={1!r}".format, known, values),
        max_size=6,
    ).filter(lambda argv: not {"-h", "--help"} & set(argv))
)
@fuzzed(60)
def test_any_command_line_is_accepted_or_refused(argv: list[str]):
    outcome(argv, needs_data=False)
