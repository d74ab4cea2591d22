"""Hypothesis strategies that alter what is valid: JSON by its structure, and bytes."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def fuzzed(examples: int, *, per_cent: int = 100) -> settings:
    """`examples`, always the same ones, in `make test`; where FUZZ_EXAMPLES is set, `per_cent` of it, new."""
    wanted = int(os.environ.get("FUZZ_EXAMPLES", "0"))
    return settings(
        max_examples=max(examples, wanted * per_cent // 100),
        derandomize=not wanted,
        database=None,
        deadline=None,
        suppress_health_check=[
            *(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
            *(HealthCheck.large_base_example, HealthCheck.function_scoped_fixture),
        ],
    )


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([-1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**4000]),
    st.floats(),
)
WORDS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "\0", "\ud800", "../..", "</s>", "<s>", "NaN", "text"])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=5,
)


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    found = [place] if place else []
    if isinstance(value, dict):
        for key in value:
            found += _places(value[key], (*place, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 40)):
            found += _places(value[index], (*place, index))
    return found


@st.composite
def altered_json(draw: st.DrawFn, original: Any) -> Any:
    """`original` with one to three of its values replaced, exchanged, doubled or taken away."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(value)
        if not places:
            return draw(VALUES)
        # the few values near the top must not drown in thousands of leaves
        depth = draw(st.integers(1, max(map(len, places))))
        *way, last = draw(st.sampled_from([each for each in places if len(each) == depth]))
        holder = value
        for step in way:
            holder = holder[step]
        kind = draw(st.sampled_from(["replace", "nudge", "remove", "double", "other", "wrap", "add"]))
        if kind == "remove":
            del holder[last]
        elif kind == "double" and isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        elif kind == "nudge" and type(holder[last]) is int:
            holder[last] += draw(st.sampled_from([-1, 1, 2, -holder[last], 256]))
        elif kind == "wrap":
            holder[last] = [holder[last]]
        elif kind == "add" and isinstance(holder[last], dict):
            holder[last][draw(WORDS)] = draw(VALUES)
        elif kind == "other":
            holder[last] = copy.deepcopy(_at(value, draw(st.sampled_from(places))))
        else:
            holder[last] = draw(VALUES)
    return value


def _at(value: Any, place: tuple) -> Any:
    try:
        for step in place:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def dumped(value: Any) -> bytes:
    """As JSON, lone surrogates, NaN and numbers of any length included."""
    return json.dumps(value).encode()


@st.composite
def altered_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """`original` with one to four stretches of it overwritten, cut out, repeated or filled up."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        if draw(st.booleans()):  # headers and footers are where structure is
            start = min(start, 64) if draw(st.booleans()) else max(len(data) - start % 256 - 1, 0)
        stop = min(len(data), start + draw(st.integers(1, 16)))
        kind = draw(st.sampled_from(["overwrite", "flip", "cut", "end", "insert", "zero", "repeat"]))
        if kind == "overwrite":
            data[start:stop] = draw(st.binary(min_size=stop - start, max_size=stop - start))
        elif kind == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[start:stop]
        elif kind == "end":
            del data[start:]
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=16))
        elif kind == "zero":
            data[start:stop] = bytes(stop - start)
        elif kind == "repeat":
            data[start:start] = data[start:stop] * draw(st.sampled_from([1, 2, 50]))
    return bytes(data)
