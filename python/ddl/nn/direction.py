"""Directions that are no sublayer's output: those of the v-Map, and further ones of the k-Map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddl.ops.checks import autocast_dtype, gate_dtype
from ddl.options import Direction

from .linear import Projection, project, projection_of
from .pool import NORM_EPS, Pool

__all__ = ["FurtherDirections", "make_direction"]


class LinearDirection(Projection):
    """k = W_k h."""

    def __init__(self, hidden_size: int, **factory: Any) -> None:
        super().__init__(hidden_size, hidden_size, bias=False, **factory)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        """Map the context h (…, d) to k (…, d); the state is ignored."""
        if autocast_dtype(context) is None:
            context = context.to(self.weight.dtype)
        return super().forward(context)


class FurtherDirections(nn.Module):
    """k₂ … k_n = W k₁: directions of further rewrites, linear maps of the first.

    W is (n − 1)·d × d, or a product of rank `rank`: (n − 1)·d × rank times rank × d.
    """

    def __init__(self, hidden_size: int, rewrites: int, rank: int | None, **factory: Any) -> None:
        super().__init__()
        self.rewrites, self.rank = rewrites, rank
        self.down = None
        if rank is not None:
            self.down = Projection(hidden_size, rank, bias=False, **factory)
        size_out = (rewrites - 1) * hidden_size
        self.up = Projection(rank or hidden_size, size_out, bias=False, **factory)

    def forward(self, direction: Tensor) -> Tensor:
        """Map k₁ (…, d) to k₁ … k_n (…, n, d), in its dtype."""
        k = direction.to(self.up.weight.dtype)
        further = self.up(k if self.down is None else self.down(k)).to(direction.dtype)
        further = torch.unflatten(further, -1, (self.rewrites - 1, direction.shape[-1]))
        return torch.cat((direction.unsqueeze(-2), further), dim=-2)

    def extra_repr(self) -> str:
        return f"rewrites={self.rewrites}" + ("" if self.rank is None else f", rank={self.rank}")


class PooledDirection(nn.Module):
    """k = W₂ tanh(W₁ z): an MLP over the pooled state z, the mean of the value channels or all.

    The matrix products run in the dtype of the parameters, or in autocast's.

    Source: DDL (arXiv 2601.00417), MLP parameterization of the reflection direction.
    """

    def __init__(self, pool: Pool, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.pool = pool
        self.hidden = Projection(pool.width, hidden, bias=False, **factory)
        self.out = Projection(hidden, pool.hidden_size, bias=False, **factory)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """Map the state X (…, d, m) to k (…, d); the context is ignored."""
        z = self.pool(state).to(self.hidden.weight.dtype)
        return self.out(torch.tanh(self.hidden(z)))


class AttentionDirection(nn.Module):
    """k = W_o Σ_j a_j x̂_j, a = softmax over the value channels of (W_q h)ᵀ(W_k x̂_j)/√c.

    The query is the context; keys and values are the m columns x̂_j of the state, each normalised to
    root mean square 1. Weights are computed in float32 as (W_kᵀ W_q h)ᵀ x̂_j, which needs one vector
    per token instead of m keys. Equal channels get equal weights for any W_q and W_k; so if the
    stream is expanded by repetition, the first sublayer's W_q and W_k have no effect.

    Source: DDL (arXiv 2601.00417) names attention over the value dimension without a formula. This
    is one head of scaled dot-product attention, of width c.
    """

    def __init__(self, hidden_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.query = Projection(hidden_size, width, bias=False, **factory)
        self.key = Projection(hidden_size, width, bias=False, **factory)
        self.out = Projection(hidden_size, hidden_size, bias=False, **factory)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """Map the state X (…, d, m) and the context h (…, d) to k (…, d).

        Raises TypeError if `query` or `key` was wrapped: they are not called.
        """
        query, key = (
            projection_of(f"direction.{name}", getattr(self, name)) for name in ("query", "key")
        )
        x = state.to(gate_dtype(state))
        x = x * torch.rsqrt(x.square().mean(-2, keepdim=True) + NORM_EPS)
        q = project(project(context, query.weight, None), key.weight.mT, None)  # (…, d)
        logits = (q.unsqueeze(-1) * x).sum(-2) / math.sqrt(query.weight.shape[0])  # (…, m)
        attended = (x * logits.softmax(-1).unsqueeze(-2)).sum(-1)  # (…, d)
        return self.out(attended.to(self.out.weight.dtype))


def make_direction(
    direction: Direction, hidden_size: int, value_channels: int, hidden: int, **factory: Any
) -> LinearDirection | PooledDirection | AttentionDirection:
    """Return the branch for an option of DeltaResidual; call it as branch(state, context)."""
    if direction == "linear":
        return LinearDirection(hidden_size, **factory)
    if direction == "attention":
        return AttentionDirection(hidden_size, hidden, **factory)
    return PooledDirection(Pool(hidden_size, value_channels, direction), hidden, **factory)
