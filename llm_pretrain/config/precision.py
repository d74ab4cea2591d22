"""What `training.precision: auto` stands for on this machine.

Worked out once, where a configuration is loaded; whatever reads it later sees `bf16` or `fp32`. torch is
imported only when it is asked.
"""

from __future__ import annotations

import platform
from dataclasses import replace

from llm_pretrain.config.tree import Config


def resolve_precision(config: Config, has_bf16: bool | None = None) -> Config:
    """The configuration with precision `auto` replaced: `bf16` where products are fast in it, else `fp32`.

    Args:
        has_bf16: Whether the device multiplies in it; None asks this machine.
    """
    if config.training.precision != "auto":
        return config
    precision = "bf16" if (multiplies_in_bf16() if has_bf16 is None else has_bf16) else "fp32"
    return replace(config, training=replace(config.training, precision=precision))


def multiplies_in_bf16() -> bool:
    """Whether the device that trains here, a GPU or else the CPU, has bf16 products; emulated ones count not.

    `_is_mkldnn_bf16_supported` alone is true of every x86 CPU with AVX-512, where oneDNN converts to fp32
    and back and is slower than fp32. On Arm it asks for the bf16 instructions themselves.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
