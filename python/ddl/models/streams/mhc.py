"""Manifold-constrained hyper-connections: the mixing of the streams is doubly stochastic.

    X: (n, d), n streams                      z = W rms(vec X)        (2n + n²,), in float32
    a = sigmoid(s₁ z_a + c_a) + ε             (n,): x = Xᵀ a is the sublayer's input
    b = 2 sigmoid(s₂ z_b + c_b)               (n,): the weight of its output in each stream
    M = sinkhorn(softmax(s₃ z_M + c_M) + ε)   (n, n), softmax over rows
    X ← Mᵀ X + b F(norm(x))ᵀ

Sinkhorn's iterations divide by the sums of the columns, and then, in turn, of rows and columns. In
the end x = Xᵀ a is read once more, with an `a` of its own. W starts as N(0, 0.02²), c as 0, s as 1.

Source: Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, in the form
of DeepSeek-V4 (transformers, deepseek_v4), with its ε and number of iterations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddl.reference import without_autocast

from .connected import Connected, map_of_streams

__all__ = ["EPS", "MAP_STD", "ManifoldConnection", "WeightedHead"]

EPS = 1e-6
ITERATIONS = 20
MAP_STD = 0.02


class ManifoldConnection(nn.Module):
    """The reading, mixing and writing around one sublayer. norm_eps: ε of rms."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float) -> None:
        super().__init__()
        self.streams, self.norm_eps = streams, norm_eps
        numbers = streams * (2 + streams)
        self.map = nn.Parameter(torch.empty(numbers, streams * hidden_size))  # W
        self.base = nn.Parameter(torch.empty(numbers))  # c
        self.scale = nn.Parameter(torch.empty(3))  # s
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.map, std=MAP_STD)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, state: Tensor) -> Connected:
        """Connect X (B, T, n, d)."""
        n = self.streams
        sizes = [n, n, n * n]
        scales = torch.cat([s.expand(size) for s, size in zip(self.scale, sizes, strict=True)])
        z = map_of_streams(state, self.map, self.norm_eps) * scales + self.base
        reads, joins, mixes = z.split(sizes, -1)
        read = (torch.sigmoid(reads) + EPS).unsqueeze(-1) * state
        join = 2 * torch.sigmoid(joins)
        mix = sinkhorn(torch.softmax(torch.unflatten(mixes, -1, (n, n)), -1) + EPS).to(state.dtype)
        with without_autocast(state):
            mixed = mix.transpose(-1, -2) @ state
        return Connected(read.sum(-2).to(state.dtype), mixed, join.to(mixed.dtype), mix)


def sinkhorn(weights: Tensor) -> Tensor:
    """Positive weights (…, n, n), scaled towards sums of 1 over rows and columns."""
    weights = weights / (weights.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        weights = weights / (weights.sum(-2, keepdim=True) + EPS)
    return weights


class WeightedHead(nn.Module):
    """The last read, Σ_j a_j X_j with a = sigmoid(s W rms(vec X) + c) + ε.

    base, scale: c and s at first.
    """

    def __init__(
        self, hidden_size: int, streams: int, norm_eps: float, *, base: float, scale: float
    ) -> None:
        super().__init__()
        self.norm_eps, self.starts = norm_eps, (base, scale)
        self.map = nn.Parameter(torch.empty(streams, streams * hidden_size))
        self.base = nn.Parameter(torch.empty(streams))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        base, scale = self.starts
        nn.init.normal_(self.map, std=MAP_STD)
        nn.init.constant_(self.base, base)
        nn.init.constant_(self.scale, scale)

    def forward(self, state: Tensor) -> Tensor:
        """Map X (B, T, n, d) to x (B, T, d)."""
        z = map_of_streams(state, self.map, self.norm_eps)
        a = torch.sigmoid(self.scale * z + self.base) + EPS
        return (a.unsqueeze(-1) * state).sum(-2).to(state.dtype)
