"""Configuration trees for property tests, generated from the dataclasses: a new field is covered by itself.

Mostly plausible values around a tiny run, so that many trees are accepted; the rest are edges of the types.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from llm_pretrain.config.loading import to_dict
from llm_pretrain.config.optimizers import OPTIMIZERS
from llm_pretrain.config.schema import field_types
from llm_pretrain.config.tree import Config, SourceConfig, WeightChange

TINY = {
    "model": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 128,
    },
    "training": {"sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 12, "max_steps": 2},
    "logging": {"wandb_mode": "disabled", "report": False, "logging_steps": 1},
    "distributed": {"cpu_threads": 1},
    "evaluation": {"max_batches": 1, "sample_tokens": 4},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}

NOT_DRAWN = {
    *("run.output_dir", "checkpoint.resume", "model.init_from"),  # of the test's own file system
    *("logging.wandb_mode", "logging.report", "data.num_workers"),  # servers, megabytes, processes
    "optimizer.options",  # of a class
}
"""What a training in this process may not have."""

_INTEGERS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 0]
_EDGE_INTEGERS = [0, -1, 7, 1000, 2**31 - 1, 2**31, 2**40, 2**53 + 1, 2**62, 2**63 - 1, -(2**62)]
_NUMBERS = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 1e-3, 1e-4, 1e-6, 1e-8, 10.0, 32.0, 10000.0]
_EDGE_NUMBERS = [5e-324, 1e-300, 1e-45, 1e-38, 1e-30, 1 - 2**-53, 1e6, 1e20, 1e38, 1e300, -1.0, -1e-9]
_EDGE_NUMBERS += [float("nan"), float("inf"), -float("inf")]
_TEXTS = ["a", "b.c", "run-1", "../x", "/x", "", " ", "é", "a/b", "-x", "x" * 200, "null", "\u202e", "a\nb"]


def usually(plausible: SearchStrategy[Any], edge: SearchStrategy[Any], *, edges: int = 1) -> Any:
    """The first `20 - edges` times in 20."""
    return st.integers(0, 19).flatmap(lambda draw: edge if draw < edges else plausible)


def values_of(kind: Any, default: Any = None) -> SearchStrategy[Any]:
    """Values of a field's type."""
    if get_origin(kind) in (Union, types.UnionType):
        parts = [values_of(part, default) for part in get_args(kind) if part is not type(None)]
        return usually(st.one_of(*parts), st.none(), edges=4)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is list:
        return st.lists(values_of(get_args(kind)[0]), max_size=3)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return st.fixed_dictionaries({name: values_of(field) for name, field in field_types(kind).items()})
    if kind is bool:
        return st.booleans()
    if kind is str:
        texts = st.sampled_from([default or "a", "a", "run-1", "b.c"])
        return usually(texts, st.sampled_from(_TEXTS))
    plausible, extreme = (_INTEGERS, _EDGE_INTEGERS) if kind is int else (_NUMBERS, _EDGE_NUMBERS)
    if default is not None:
        plausible = [default] * 3 + plausible
    return usually(st.sampled_from(plausible), st.sampled_from(extreme))


@st.composite
def trees(draw: Any, *, stores: list[str]) -> dict[str, dict[str, Any]]:
    """A tiny run, dense or with experts, with up to eight settings of any section drawn anew."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in field_types(Config)}
    for section, fields in TINY.items():
        tree[section] = copy.deepcopy(fields)
    if draw(st.booleans()):
        tree["model"] |= EXPERTS
    tree["data"]["sources"] = [{"store": stores[0]}]
    defaults = to_dict(Config())
    names = [
        (section, name)
        for section, cls in field_types(Config).items()
        for name in field_types(cls)
        if f"{section}.{name}" not in NOT_DRAWN
    ]
    for section, name in draw(st.lists(st.sampled_from(names), max_size=8, unique=True)):
        kind = field_types(field_types(Config)[section])[name]
        default = tree[section].get(name, defaults[section][name])
        if kind == list[SourceConfig]:
            tree[section][name] = draw(_sources(stores))
        elif (section, name) == ("optimizer", "name"):
            tree[section][name] = draw(st.sampled_from([*OPTIMIZERS, "torch.optim.NAdam"]))
        elif kind == list[WeightChange]:
            tree[section][name] = draw(_weight_changes(len(tree["data"]["sources"])))
        else:
            default = None if isinstance(default, list | dict) else default
            tree[section][name] = draw(values_of(kind, default))
    return tree


def _sources(stores: list[str]) -> SearchStrategy[Any]:
    entry = st.fixed_dictionaries(
        {"store": st.sampled_from(stores), "weight": values_of(float, 1.0)},
        optional={"name": values_of(str)},
    )
    plain = st.lists(st.sampled_from(stores), min_size=1, max_size=3).map(
        lambda chosen: [{"store": store, "name": f"s{k}"} for k, store in enumerate(chosen)]
    )
    return st.one_of(plain, st.lists(entry, min_size=1, max_size=3))


def _weight_changes(sources: int) -> SearchStrategy[Any]:
    weights = st.lists(values_of(float, 1.0), min_size=sources, max_size=sources)
    entry = st.fixed_dictionaries({"step": values_of(int), "weights": weights})
    return st.lists(entry, max_size=2).map(lambda changes: sorted(changes, key=lambda each: each["step"]))
