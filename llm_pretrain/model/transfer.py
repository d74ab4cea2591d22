"""What a parameter is to the width of the model, and how its initial values and rates follow the width.

Only factors; who applies them are `initialization.py` and the optimizer's groups. With the width at which
rates were found as the base, all factors are 1 there, and its best rates stay the best at other widths.

How they follow, with n the width and r = base / n, while inner sizes grow in proportion to n, and the number
of heads rather than `head_dim`. After arXiv:2203.03466, table 8 (Adam), and spectrally arXiv:2310.17813:

- A map of n features to n sums n products. Independent at the start, they add up like sqrt(n), so entries
  are drawn narrower by sqrt(r). An update of AdamW has entries of one size whose signs follow the inputs:
  its products add up like n, so its rate is multiplied by r. Decoupled decay takes `rate · weight_decay`
  off in a step; the factor 1 / r on `weight_decay` leaves that as it was (arXiv:2405.13698).
- An embedding's row is looked up, not summed: nothing changes.
- The head sums n products into a logit, and its updates, a tied embedding's too, follow the features: the
  sum grows like n. A factor 1 / n belongs to it; ours stands where a parameter can hold it, before the
  head: the last norm's weight starts at r instead of 1 and its rate is multiplied by r, which is a weight
  that starts at 1 behind a constant r. The head itself stays as it is, tied or not.
- A router is a head whose outputs are experts: its entries and its rate are multiplied by r.
- Other norms act on one feature each: nothing changes.
- Muon's update has singular values lr · sqrt(max(1, out / in)) whatever the width, and a map drawn narrower
  by sqrt(r) keeps singular values near a constant times sqrt(out / in): the rate stays.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

Role = Literal["table", "map", "router", "last norm", "vector"]


def parameter_role(name: str, parameter: Tensor) -> Role:
    """What a parameter of the decoder does, by its name.

    A table has a row for each token; a map is a matrix, or a stack of them, between two spaces of features.
    """
    if name == "model.norm.weight":
        return "last norm"
    if parameter.dim() < 2:
        return "vector"
    if name.endswith("mlp.gate.weight"):
        return "router"
    return "map" if ".layers." in name else "table"


def initial_factor(name: str, parameter: Tensor, hidden_size: int, base_hidden_size: int | None) -> float:
    """On the standard deviation of a matrix, or on the initial value of a norm; 1 without a base."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    role = parameter_role(name, parameter)
    if role == "map":
        return math.sqrt(ratio)
    return ratio if role in ("router", "last norm") else 1.0


def adamw_factor(role: Role, hidden_size: int, base_hidden_size: int | None) -> float:
    """On the learning rate of what AdamW updates; 1 without a base."""
    ratio = (base_hidden_size or hidden_size) / hidden_size
    return ratio if role in ("map", "router", "last norm") else 1.0
