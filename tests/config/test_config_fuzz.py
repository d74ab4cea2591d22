"""Configuration files as bytes: a true one damaged, and structures that YAML alone has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import fuzzed
from support.launching import ROOT
from support.mutating import damaged_bytes

from llm_pretrain.config.loading import check_tree
from llm_pretrain.config.yaml_text import YamlError, read_yaml, read_yaml_file

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

    @given(content=damaged_bytes(TRUE) | st.lists(pieces, max_size=60).map("".join).map(str.encode))
    @example(b"run: {name: '\x85'}")
    @example(b"? [a]\n: 1")
    @example(b"? {a: 1}\n: 1")
    @example(b"run: {seed: 2024-99-99}")
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
