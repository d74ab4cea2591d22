"""The output projection: logits, or with labels the loss sums, by the implementation that is fastest there.

Which one that is, is a pure function of the configuration, the products' type and the vocabulary. The
arithmetic is in `loss_head.py` (whole logits), `loss_head_fused.py` (chunks) and `loss_head_liger.py`.

Shapes: B sequences, S positions, H hidden_size, V vocab_size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from llm_pretrain.model.kernels import AUTO, Kernels
from llm_pretrain.model.layers import Linear, product_dtype
from llm_pretrain.model.loss_head import LossSums, loss_head
from llm_pretrain.model.loss_head_fused import fused_loss_head
from llm_pretrain.model.loss_head_liger import liger_kernel

_FUSED_FROM = 1024
"""Below this vocabulary whole logits cost little memory and no more time."""


def loss_implementation(
    kernels: Kernels, dtype: torch.dtype, vocab_size: int
) -> Literal["full", "fused", "liger"]:
    """What `kernels.loss` means where products run in `dtype`.

    `auto` is `fused` from a vocabulary of 1024 on, on every device. In fp16 it is `full`: a loss scale must
    reach the softmax's gradient before it is rounded to fp16, and arrives after the forward pass.
    """
    if kernels.loss != "auto":
        return kernels.loss
    return "full" if vocab_size < _FUSED_FROM or dtype == torch.float16 else "fused"


class OutputHead(Linear):
    """A linear map to the vocabulary that can take the loss of its logits itself.

    Both go through `forward`: back-ends that shard parameters gather a module's around it alone.
    """

    def __init__(self, hidden_size: int, vocab_size: int, kernels: Kernels = AUTO):
        super().__init__(hidden_size, vocab_size)
        self.kernels = kernels

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (one module, two results: see above)
        self, hidden: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | LossSums:
        """Logits [B, S, V] of `hidden` [B, S, H], or their loss sums; labels and mask as in `loss_head`."""
        if labels is None or mask is None:
            return super().forward(hidden)
        chosen = loss_implementation(self.kernels, product_dtype(hidden), len(self.weight))
        if chosen == "full":
            return loss_head(super().forward(hidden), labels, mask)
        kernel = liger_kernel if chosen == "liger" else None
        return fused_loss_head(hidden, self.weight, labels, mask, self.kernels.z_loss_coef, kernel)
