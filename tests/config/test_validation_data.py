"""Sources, their names and weights: what cannot be is named by its field, one line each."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llm_pretrain.config.loading import from_dict, validate

NAN, INFINITY = float("nan"), float("inf")


def lines_of(sources: list[dict[str, Any]], changes: list[dict[str, Any]] | None = None) -> list[str]:
    data = {"sources": sources, "weight_changes": changes or []}
    return validate(from_dict({"data": data}))


def two(*weights: float) -> list[dict[str, Any]]:
    return [{"store": name, "weight": weight} for name, weight in zip("ab", weights or (1, 1), strict=True)]


@pytest.mark.parametrize(
    ("field", "sources", "changes"),
    [
        ("data.sources[1].name", [{"store": "x/same"}, {"store": "y/same"}], []),
        ("data.sources[1].name", [{"store": "x/b"}, {"store": "y/c", "name": "b"}], []),
        ("data.sources[0].name", [{"store": "my store"}, {"store": "b"}], []),
        ("data.sources[0].name", [{"store": "über"}, {"store": "b"}], []),
        ("data.sources[0].name", [{"store": "/"}, {"store": "b"}], []),
        ("data.sources[0].name", [{"store": "a", "name": "x/y"}], []),
        ("data.sources[0].name", [{"store": "a", "name": ""}], []),
        ("data.sources[0].name", [{"store": "a", "name": "x" * 65}, {"store": "b"}], []),
        ("data.sources[0].name", [{"store": "a", "name": ".."}, {"store": "b"}], []),
        ("data.sources[0].weight", two(0, 1), []),
        ("data.sources[0].weight", two(0, 1), [{"step": 3, "weights": [0, 1]}]),
        ("data.sources[1].weight", two(1, NAN), []),
        ("data.sources[1].weight", two(1, -1), [{"step": 3, "weights": [1, 1]}]),
        ("data.sources", two(0, 0), [{"step": 3, "weights": [1, 1]}]),
        ("data.sources[0].weight", two(1.5e308, 1), []),
        ("data.weight_changes[0].step", two(), [{"step": -1, "weights": [1, 1]}]),
        ("data.weight_changes[1].step", two(), [{"step": s, "weights": [1, 1]} for s in (5, 5)]),
        ("data.weight_changes[1].step", two(), [{"step": s, "weights": [1, 1]} for s in (5, 4, 6)]),
        ("data.weight_changes[0].weights", two(), [{"step": 5, "weights": [1]}]),
        ("data.weight_changes[0].weights", two(), [{"step": 5, "weights": [1, 1, 1]}]),
        ("data.weight_changes[0].weights", two(), [{"step": 5, "weights": []}]),
        ("data.weight_changes[0].weights", two(), [{"step": 5, "weights": [0, 0]}]),
        ("data.weight_changes[0].weights[0]", two(), [{"step": 5, "weights": [1.5e308, 1]}]),
        ("data.weight_changes[0].weights[1]", two(), [{"step": 5, "weights": [1, -0.5]}]),
        ("data.weight_changes[0].weights[0]", two(), [{"step": 5, "weights": [INFINITY, 1]}]),
        ("data.weight_changes[0].weights[0]", two(), [{"step": 5, "weights": [NAN, 1]}]),
    ],
)
def test_one_wrong_value_is_one_line_that_names_it(field: str, sources: list, changes: list):
    lines = lines_of(sources, changes)
    assert len(lines) == 1
    assert re.match(rf"{re.escape(field)}: expected .*, found ", lines[0])


def test_a_name_that_stands_twice_is_reported_with_both_places():
    (line,) = lines_of([{"store": "x/same"}, {"store": "b"}, {"store": "y/same"}])
    assert line.startswith("data.sources[2].name: ")
    assert "data.sources[0]" in line
    assert "'same'" in line


@pytest.mark.parametrize(
    ("sources", "changes"),
    [
        ([{"store": "x/same"}, {"store": "y/same", "name": "other"}], []),
        ([{"store": "my store"}], []),
        ([{"store": "my store", "name": "mine"}, {"store": "b.2-x_"}], []),
        (two(1, 0), [{"step": 5, "weights": [0, 1]}]),
        (two(), [{"step": 0, "weights": [1, 2]}, {"step": 10**9, "weights": [0.0, 3]}]),
        ([{"store": "a"}], [{"step": 5, "weights": [2]}]),
    ],
)
def test_what_makes_sense_passes(sources: list, changes: list):
    assert lines_of(sources, changes) == []


def test_samples_fit_into_the_model():
    evaluation = {"sample_prompts": ["a"], "sample_tokens": 64}
    tree = {"evaluation": evaluation, "model": {"max_position_embeddings": 64}}
    tree |= {"training": {"sequence_length": 32}, "data": {"sources": [{"store": "x"}]}}
    (line,) = validate(from_dict(tree))
    assert re.match(r"evaluation\.sample_tokens: expected less than .* = 64, found 64", line)
    assert validate(from_dict(tree | {"evaluation": evaluation | {"sample_tokens": 63}})) == []
    assert validate(from_dict(tree | {"evaluation": evaluation | {"sample_prompts": []}})) == []
