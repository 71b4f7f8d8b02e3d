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

__all__ = ["draw_stream", "std_of"]


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
            _draw_residual(module)
        elif isinstance(module, Read):
            _spread(module)


def _draw_residual(residual: DeltaResidual) -> None:
    for module in residual.modules():
        if isinstance(module, Projection):
            nn.init.normal_(module.weight, std=std_of(module.weight))
    if residual.value is not None and residual.value.bias is not None:
        bound = 1 / math.sqrt(residual.value.weight.shape[1])
        nn.init.uniform_(residual.value.bias, -bound, bound)


def _spread(read: Read) -> None:
    """Have a compressor read the mean over the taps of its convolution."""
    if read.compress_kernel is not None:
        nn.init.constant_(read.compress_kernel, 1 / read.kernel_size)
    elif read.compress_weight is not None and read.compress == "token":
        start = read.compress_weight[..., :1] / read.kernel_size
        read.compress_weight.copy_(start.expand_as(read.compress_weight))
