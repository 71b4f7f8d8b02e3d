"""Hyper-connections whose reads and writes are sigmoids: manifold-constrained and independent ones.

    X: (n, d), n streams                  z = W rms(vec X), in float32
    a = sigmoid(s₁ z_a + c_a) + ε         (n,): x = Xᵀ a is the sublayer's input
    b = 2 sigmoid(s₂ z_b + c_b) [+ ε]     (n,): the weight of its output in each stream
    X ← Mᵀ X + b F(norm(x))ᵀ

Manifold-constrained, without the ε of b: the mixing M (n, n) is doubly stochastic,
sinkhorn(softmax(s₃ z_M + c_M) + ε) with the softmax over rows. Sinkhorn's iterations divide by the
sums of the columns, and then, in turn, of rows and columns. c starts as 0, s as 1.

Independent: M is the identity. s starts as 0.01, c_b as 0 and c_a as −log(n − 1), so that a is 1/n
(n > 1) and a new model nearly adds. X is added to in float32.

In the end x = Xᵀ a is read once more, with an `a` of its own. W starts as N(0, 0.02²).

Sources: Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, in the form
of DeepSeek-V4 (transformers, deepseek_v4), with its ε and number of iterations; HY-V4
(transformers, hy_v4), with its ε and magnitude 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ddl.reference import without_autocast

from ..sublayers import wide
from .connected import Connected

EPS = 1e-6
ITERATIONS = 20
MAP_STD = 0.02


def independent_start(streams: int) -> dict[str, float]:
    """c_a, whose sigmoid is 1/n for n > 1, and s of independent connections at first."""
    return {"base": -math.log(max(streams - 1, 1)), "scale": 0.01}


class _Weights(nn.Module):
    """The parameters W, c and s.

    norm_eps: ε of rms. sizes: of the parts of z, each with a number of s. base: c_a at first.
    scale: s at first.
    """

    def __init__(
        self,
        hidden_size: int,
        streams: int,
        norm_eps: float,
        sizes: tuple[int, ...],
        *,
        base: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.streams, self.norm_eps = streams, norm_eps
        self.sizes, self.start = sizes, (base, scale)
        self.map = nn.Parameter(torch.empty(sum(sizes), streams * hidden_size))  # W
        self.base = nn.Parameter(torch.empty(sum(sizes)))  # c
        self.scale = nn.Parameter(torch.empty(len(sizes)))  # s
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        base, scale = self.start
        nn.init.normal_(self.map, std=MAP_STD)
        nn.init.zeros_(self.base)
        self.base[: self.streams] = base
        nn.init.constant_(self.scale, scale)

    def mapped(self, state: Tensor) -> Tensor:
        """z of X (…, n, d), float32 (float64 for float64)."""
        flat = wide(state.flatten(-2))
        normalised = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        with without_autocast(state):
            return nn.functional.linear(normalised, wide(self.map))


class ManifoldConnection(_Weights):
    """The reading, mixing and writing around one sublayer, with a doubly stochastic mixing."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float) -> None:
        super().__init__(hidden_size, streams, norm_eps, (streams, streams, streams**2))

    def forward(self, state: Tensor) -> Connected:
        """Connect X (B, T, n, d)."""
        n = self.streams
        scales = torch.cat([s.expand(size) for s, size in zip(self.scale, self.sizes, strict=True)])
        reads, joins, mixes = (self.mapped(state) * scales + self.base).split(self.sizes, -1)
        read = (torch.sigmoid(reads) + EPS).unsqueeze(-1) * state
        join = 2 * torch.sigmoid(joins)
        mix = sinkhorn(torch.softmax(torch.unflatten(mixes, -1, (n, n)), -1) + EPS).to(state.dtype)
        with without_autocast(state):
            mixed = mix.transpose(-1, -2) @ state
        return Connected(read.sum(-2).to(state.dtype), mixed, join.to(mixed.dtype), mix)


class IndependentConnection(_Weights):
    """The reading and writing around one sublayer; the streams are not mixed."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float) -> None:
        start = independent_start(streams)
        super().__init__(hidden_size, streams, norm_eps, (streams, streams), **start)

    def forward(self, state: Tensor) -> Connected:
        """Connect X (B, T, n, d)."""
        z = torch.unflatten(self.mapped(state), -1, (2, self.streams))
        scaled = z * self.scale.unsqueeze(-1) + self.base.view(2, self.streams)
        reads, joins = torch.sigmoid(scaled).unbind(-2)
        read = (reads + EPS).unsqueeze(-1) * state
        return Connected(read.sum(-2).to(state.dtype), state, 2 * joins + EPS, None)


class WeightedHead(_Weights):
    """The last read, x = Xᵀ a. start: base and scale."""

    def __init__(self, hidden_size: int, streams: int, norm_eps: float, **start: float) -> None:
        super().__init__(hidden_size, streams, norm_eps, (streams,), **start)

    def forward(self, state: Tensor) -> Tensor:
        """Map X (B, T, n, d) to x (B, T, d)."""
        a = torch.sigmoid(self.scale * self.mapped(state) + self.base) + EPS
        return (a.unsqueeze(-1) * state).sum(-2).to(state.dtype)


def sinkhorn(weights: Tensor) -> Tensor:
    """Positive weights (…, n, n), scaled towards sums of 1 over rows and columns."""
    weights = weights / (weights.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        weights = weights / (weights.sum(-2, keepdim=True) + EPS)
    return weights
