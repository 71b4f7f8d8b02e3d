"""Gated residuals: each sublayer reads the streams through a gate for every feature.

    X: (n, d), n streams               X̃_j = rms(X_j) ∘ γ_j,  z = vec X̃
    A = sigmoid(U silu(D z / n))       (n, d), of rank r: x = mean_j A_j ∘ X̃_j
    b = 2 sigmoid(B z / n)             (n,): the weight of the sublayer's output in each stream
    X ← X + b F(x)ᵀ

The sublayer has no norm of its own, and the last read is a gated one with weights of its own. U, D
and B start as N(0, 0.02²), γ as 1; so a new model reads about half the mean of the normalised
streams and writes to each with a weight of about 1. It is not the additive stream, whose read has
no factor ½.

Source: Qwen4 (transformers, qwen4_exp), whose r is 320 at d = 2,048.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.nn.checks import require_own_forward

from ..sublayers import wide
from .connected import Connected

MAP_STD = 0.02


class GatedRead(nn.Module):
    """The read x of X. norm_eps: ε of rms. rank: r."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float, rank: int) -> None:
        super().__init__()
        self.streams, self.norm_eps = streams, norm_eps
        width = streams * hidden_size
        self.norm_weight = nn.Parameter(torch.empty(width))  # γ
        self.down = nn.Linear(width, rank, bias=False)  # D
        self.up = nn.Linear(rank, width, bias=False)  # U
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.norm_weight)
        for weight in (self.down.weight, self.up.weight):
            nn.init.normal_(weight, std=MAP_STD)

    def forward(self, state: Tensor) -> Tensor:
        """Map X (B, T, n, d) to x (B, T, d)."""
        return self.gated(self.normalised(state))

    def normalised(self, state: Tensor) -> Tensor:
        """z (B, T, n·d) of X, in its dtype."""
        x = wide(state)
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        return (unit.flatten(-2) * wide(self.norm_weight)).to(state.dtype)

    def gated(self, z: Tensor) -> Tensor:
        """x (B, T, d) of z."""
        gate = torch.sigmoid(self.up(F.silu(self.down(z) / self.streams)))
        return torch.unflatten(gate * z, -1, (self.streams, -1)).mean(-2)


class GatedConnection(nn.Module):
    """The read before a sublayer, and the writing of its output."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float, rank: int) -> None:
        super().__init__()
        self.streams = streams
        self.read = GatedRead(hidden_size, streams, norm_eps, rank)
        self.join_map = nn.Linear(streams * hidden_size, streams, bias=False)  # B
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.read.reset_parameters()
        nn.init.normal_(self.join_map.weight, std=MAP_STD)

    def forward(self, state: Tensor) -> Connected:
        """Connect X (B, T, n, d)."""
        read = require_own_forward("read", self.read, GatedRead)
        z = read.normalised(state)
        join = 2 * torch.sigmoid(self.join_map(z) / self.streams)
        return Connected(read.gated(z), state, join.to(state.dtype), None)
