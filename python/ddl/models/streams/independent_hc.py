"""Independent hyper-connections: the streams are not mixed.

    X: (n, d), n streams             z = W rms(vec X)        (2n,), in float32
    a = sigmoid(s₁ z_a + c_a) + ε    (n,): x = Xᵀ a is the sublayer's input
    b = 2 sigmoid(s₂ z_b + c_b) + ε  (n,): the weight of its output in each stream
    X ← X + b F(norm(x))ᵀ            in float32

In the end x = Xᵀ a is read once more, with an `a` of its own. W starts as N(0, 0.02²), s as 0.01,
c_b as 0 and c_a as −log(n − 1), so that a is 1/n (n > 1) and a new model nearly adds.

Source: HY-V4 (transformers, hy_v4), with its ε and magnitude 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .connected import Connected, map_of_streams
from .mhc import EPS, MAP_STD

__all__ = ["SCALE", "IndependentConnection", "even_base"]

SCALE = 0.01  # s at first


def even_base(streams: int) -> float:
    """c_a at first, whose sigmoid is 1/n for n > 1."""
    return -math.log(max(streams - 1, 1))


class IndependentConnection(nn.Module):
    """The reading and writing around one sublayer. norm_eps: ε of rms."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float) -> None:
        super().__init__()
        self.streams, self.norm_eps = streams, norm_eps
        self.map = nn.Parameter(torch.empty(2 * streams, streams * hidden_size))  # W
        self.base = nn.Parameter(torch.empty(2 * streams))  # c
        self.scale = nn.Parameter(torch.empty(2))  # s
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.map, std=MAP_STD)
        nn.init.zeros_(self.base)
        self.base[: self.streams] = even_base(self.streams)
        nn.init.constant_(self.scale, SCALE)

    def forward(self, state: Tensor) -> Connected:
        """Connect X (B, T, n, d)."""
        z = map_of_streams(state, self.map, self.norm_eps)
        z = torch.unflatten(z, -1, (2, self.streams))
        scaled = z * self.scale.unsqueeze(-1) + self.base.view(2, self.streams)
        reads, joins = torch.sigmoid(scaled).unbind(-2)
        read = (reads + EPS).unsqueeze(-1) * state
        return Connected(read.sum(-2).to(state.dtype), state, 2 * joins + EPS, None)
