"""Ways in which a tensor may lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("transposed", "expanded", "sliced", "shifted")  # besides packed


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return `x` with other strides, or packed if it has too few axes for them.

    expanded: every row along the last axis repeats its first number, with stride 0; all other
    layouts keep the values. shifted: packed, but aligned to one element only.
    """
    if layout == "transposed" and x.ndim > 1:
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "expanded" and 0 not in x.shape and x.ndim > 0:
        return x[..., :1].expand(x.shape)
    if layout == "sliced" and x.ndim > 0:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "shifted":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x
