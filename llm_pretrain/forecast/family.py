"""A family of models from one base configuration: hidden_size determines all other sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from llm_pretrain.config.loading import validate
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.sizes import count_parameters, flops_per_token

MIN_LAYERS = 2
"""A model with one layer cannot copy from its context (arXiv:2209.11895); its loss follows another law."""
WIDTH_MULTIPLE = 32
"""Feed-forward widths are multiples of this number, which matrix kernels prefer."""
MIN_HEADS = 3
"""Heads of the smallest size: models with fewer hardly gain from more tokens (docs/log.md#ladders)."""


def member(base: Config, hidden_size: int) -> Config:
    """The configuration of another size of `base`'s family.

    Heads keep their width. The numbers of heads and layers and the feed-forward widths are proportional to
    `hidden_size`. The numbers of experts and top-k stay. `optimizer.base_hidden_size` scales learning rates
    and initial values (muP, arXiv:2203.03466), and leaves those of `base` itself unchanged. All other
    settings, also the run's length and folder, are those of `base`.

    Args:
        base: Any configuration without `model.init_from`.
        hidden_size: A multiple of `width_step(base)`.

    Raises:
        ConfigError: `base` has no family, or the family no such size.
    """
    model = base.model
    if model.init_from is not None:
        raise ConfigError(
            "model.init_from: expected none in the base of a family of sizes, found "
            f"{model.init_from!r}; its weights have one size"
        )
    step = width_step(base)
    if hidden_size < step or hidden_size % step:
        raise ConfigError(
            f"model.hidden_size: expected a multiple of {step}, the width of whole heads, found {hidden_size}"
        )
    tuned_for = base.optimizer.base_hidden_size or model.hidden_size
    config = dataclasses.replace(
        base, optimizer=dataclasses.replace(base.optimizer, base_hidden_size=tuned_for)
    )
    if hidden_size == model.hidden_size:
        return config
    heads = model.num_attention_heads * hidden_size // model.hidden_size
    layers = round(model.num_hidden_layers * hidden_size / model.hidden_size)
    layers = max(min(MIN_LAYERS, model.num_hidden_layers), layers)
    every = min(model.decoder_sparse_step, layers)
    widths = {"intermediate_size": _width(model.intermediate_size, hidden_size / model.hidden_size)}
    if model.moe_intermediate_size:
        widths["moe_intermediate_size"] = _width(model.moe_intermediate_size, hidden_size / model.hidden_size)
    shape = dataclasses.replace(
        model,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_key_value_heads(heads, model.num_attention_heads // model.num_key_value_heads),
        decoder_sparse_step=every,
        # the last layer that can have experts keeps them
        first_k_dense_replace=min(model.first_k_dense_replace, layers // every * every - 1),
        **widths,
    )
    config = dataclasses.replace(config, model=shape)
    if problems := validate(config, needs_data=False):
        raise ConfigError(*problems)
    return config


def width_step(base: Config) -> int:
    """The least hidden size of the family: all hidden sizes are multiples of this width of whole heads."""
    return base.model.hidden_size // math.gcd(base.model.hidden_size, base.model.num_attention_heads)


class Size(NamedTuple):
    """A member of a family.

    Args:
        config: Configuration of the member.
        flops_per_token: FLOPs of training on one token.
        total_parameters: Number of all parameters.
        active_parameters: Number of parameters that a token uses, with embedding and head.
    """

    config: Config
    flops_per_token: float
    total_parameters: int
    active_parameters: int

    @property
    def hidden_size(self) -> int:
        """`model.hidden_size`."""
        return self.config.model.hidden_size

    @property
    def step_flops(self) -> float:
        """FLOPs of an optimizer step."""
        return self.flops_per_token * self.config.training.tokens_per_step


class Sizes:
    """The members of a base configuration's family; each is counted once, at its first use."""

    def __init__(self, base: Config):
        self.base, self.width_step = base, width_step(base)
        self._counted: dict[int, Size] = {}

    def size(self, number: int) -> Size:
        """The `number`-th member, from 1 on."""
        if number not in self._counted:
            config = member(self.base, number * self.width_step)
            flops = flops_per_token(config.model, config.training.sequence_length)
            counted = count_parameters(config.model)
            self._counted[number] = Size(config, flops, counted.total, counted.active)
        return self._counted[number]

    def of(self, hidden_size: int) -> Size:
        """The member of this hidden size, a multiple of `width_step`."""
        return self.size(hidden_size // self.width_step)

    @property
    def least_number(self) -> int:
        """The number of the smallest member with `MIN_HEADS` heads."""
        heads = self.base.model.num_attention_heads * self.width_step // self.base.model.hidden_size
        return math.ceil(MIN_HEADS / heads)

    def ascending(self) -> Iterator[Size]:
        """Members from the smallest on: the next one or, if that is wider, one about 10 % wider."""
        number = self.least_number
        while True:
            yield self.size(number)
            number = max(number + 1, round(number * 1.1))


def _width(base: int, ratio: float) -> int:
    return max(1, round(base * ratio / WIDTH_MULTIPLE)) * WIDTH_MULTIPLE


def _key_value_heads(heads: int, group: int) -> int:
    """The divisor of `heads` that is nearest to `heads / group`; of two such divisors the larger."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return min(divisors, key=lambda count: (abs(count - heads / group), -count))
