"""Any file, tree or command line is a configuration or a ConfigError, and a dump goes round."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import fuzzed
from support.launching import ROOT
from support.mutating import damaged_bytes

from llm_pretrain.config.loading import (
    check_tree,
    dump_yaml,
    from_dict,
    load_config,
    resolve_precision,
    to_dict,
)
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import YamlError, read_yaml, read_yaml_file
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
@fuzzed(60)
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


@given(name=text.filter(lambda value: value not in ("null", "~")))
@fuzzed(25)
def test_any_text_survives_the_dump(tmp_path: Path, name: str):
    try:
        config = from_dict({"run": {"output_dir": name}, "data": {"sources": [{"store": name}]}})
    except ConfigError:
        assert "\0" in name or any("\ud800" <= character <= "\udfff" for character in name)
        return
    file = tmp_path / "text.yaml"
    file.write_text(dump_yaml(config, comments=True), encoding="utf-8", newline="")
    result = outcome(["--config", str(file)])
    if isinstance(result, Config):
        assert result == resolve_precision(config)
    else:
        assert [line for line in result.problems if "store" not in line and "output_dir" not in line] == []


CPU_SECONDS = 3.0
TRUE = (ROOT / "configs" / "tiny-moe.yaml").read_bytes()

pieces = st.sampled_from(
    [
        *("&a ", "*a", "*b", "&b ", "!!", "!!python/name:os.system ", "!!binary ", "!!set ", "!!merge <<: "),
        *("<<: ", "? ", ": ", "- ", "{", "}", "[", "]", ",", "\n", "\n  ", "---\n", "...\n", "|\n", ">-\n"),
        *("run", "seed", "1", "0x10", "0o7", "1_000", "1e9", ".inf", "~", "'", '"', "#", "\t", "\ufeff"),
        "%YAML 1.1\n",
    ]
)


def cpu_seconds_of(file: Path) -> float:
    before = time.process_time()
    try:
        _, problems = check_tree(read_yaml_file(file))
    except (YamlError, ValueError):
        return time.process_time() - before
    assert not [problem for problem in problems if "\n" in problem or ": " not in problem]
    return time.process_time() - before


@pytest.mark.fuzz
def test_any_damaged_file_is_accepted_or_refused_soon(tmp_path: Path):
    file = tmp_path / "damaged.yaml"

    @given(
        content=damaged_bytes(TRUE) | st.lists(pieces, max_size=60).map("".join).map(str.encode) | st.binary()
    )
    @example(b"run: {name: '\x85'}")
    @example(b"? [a]\n: 1")
    @example(b"? {a: 1}\n: 1")
    @example(b"run: {seed: 2024-99-99}")
    @example(b"[" * 5000)
    @example(b"a: &a {b: *a}")
    @fuzzed(80)
    def check(content: bytes) -> None:
        file.write_bytes(content)
        assert cpu_seconds_of(file) < CPU_SECONDS

    check()


@pytest.mark.fuzz
def test_nothing_but_plain_values_is_constructed():
    @given(text=st.lists(pieces, max_size=60).map("".join))
    @fuzzed(100)
    def check(text: str) -> None:
        try:
            value = read_yaml(text)
        except YamlError:
            return
        assert plain(value), value

    check()


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(plain(key) and plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):  # a tuple as a key
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "[" * 260_000,
        "{" * 260_000,
        "- " * 130_000,
        "? " * 130_000,
        "a" * 260_000,
        "a: " * 80_000,
        "'" + "x\n" * 130_000 + "'",
        "[" + "1," * 130_000 + "]",
        "&a " * 80_000,
        "#" * 260_000,
        "!" * 260_000,
        "\n" * 260_000,
        "--- \n" * 50_000,
        "x: &a [1]\n" + "".join(f"y{i}: *a\n" for i in range(8_000)),
    ],
    ids=lambda text: repr(text[:6]),
)
def test_the_largest_files_of_one_kind_take_seconds(tmp_path: Path, text: str):
    file = tmp_path / "large.yaml"
    file.write_text(text)
    assert file.stat().st_size <= 1 << 18
    assert cpu_seconds_of(file) < CPU_SECONDS
