"""Initial weights as the papers' published code draws them: `initial_weights="paper-code"`.

Of that code's two versions this is the newest one (docs/papers.md has both).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ddl.nn.linear import Projection
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual

from .sublayers import HIDDEN_STD_FACTOR


def std_of(weight: Tensor) -> float:
    """Standard deviation of the elements of a matrix (size out, size in)."""
    size_out, size_in = weight.shape
    return HIDDEN_STD_FACTOR / math.sqrt(size_in) * min(1.0, math.sqrt(size_out / size_in))


@torch.no_grad()
def draw_stream(trunk: nn.Module) -> None:
    """Draw what the rewrites and reads have, after they were reset.

    β's bias and the read vectors stay as they are: there both codes are the same.
    """
    for module in trunk.modules():
        if isinstance(module, DeltaResidual):
            for projection in module.modules():
                if isinstance(projection, Projection):
                    nn.init.normal_(projection.weight, std=std_of(projection.weight))
            if module.value is not None and module.value.bias is not None:
                bound = 1 / math.sqrt(module.value.weight.shape[1])
                nn.init.uniform_(module.value.bias, -bound, bound)
        elif isinstance(module, Read):  # which shall read the mean over the taps of its convolution
            if module.compress_kernel is not None:
                nn.init.constant_(module.compress_kernel, 1 / module.kernel_size)
            elif module.compress_weight is not None and module.compress == "token":
                start = module.compress_weight[..., :1] / module.kernel_size
                module.compress_weight.copy_(start.expand_as(module.compress_weight))
