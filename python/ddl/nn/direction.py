"""Directions of the v-Map: branches that say where the sublayer's output is written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddl.ops.outputs import gate_dtype
from ddl.options import Direction

from .linear import Projection, project, projection_of, reset_
from .pool import NORM_EPS, Pool

__all__ = [
    "AttentionDirection",
    "LinearDirection",
    "PooledDirection",
    "make_direction",
]


class LinearDirection(Projection):
    """k = W_k h."""

    def __init__(self, hidden_size: int, **factory: Any) -> None:
        super().__init__(hidden_size, hidden_size, bias=False, **factory)

    def reset_parameters(self) -> None:
        reset_(self)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        """h (…, d) → k (…, d); the state is not looked at."""
        return super().forward(context)


class PooledDirection(nn.Module):
    """k = W₂ tanh(W₁ z), z the pooled state: an MLP over the mean of the value channels, or all.

    Matrix products of the model's own kind, in the dtype of the parameters or autocast's.

    Source: DDL (arXiv 2601.00417), MLP parameterization of the reflection direction.
    """

    def __init__(self, pool: Pool, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.pool = pool
        self.hidden = Projection(pool.width, hidden, bias=False, **factory)
        self.out = Projection(hidden, pool.hidden_size, bias=False, **factory)

    def reset_parameters(self) -> None:
        reset_(self.hidden)
        reset_(self.out)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """X (…, d, m) → k (…, d); the context is not looked at."""
        z = self.pool(state).to(self.hidden.weight.dtype)
        return self.out(torch.tanh(self.hidden(z)))


class AttentionDirection(nn.Module):
    """k = W_o Σ_j a_j x̂_j, a = softmax over the value channels of (W_q h)ᵀ(W_k x̂_j)/√c.

    The context asks, and the m columns of the state, each of root mean square one, answer. Weights
    are computed in float32, (W_kᵀ W_q h)ᵀ x̂_j: one vector per token instead of m keys. Channels
    that are copies of each other get the same weight whatever W_q and W_k are: a stream that opens
    with repetition leaves those of its first sublayer unused.

    Source: DDL (arXiv 2601.00417) names attention over the value dimension without a formula. Here
    it is one head of scaled dot products, of width c.
    """

    def __init__(self, hidden_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.query = Projection(hidden_size, width, bias=False, **factory)
        self.key = Projection(hidden_size, width, bias=False, **factory)
        self.out = Projection(hidden_size, hidden_size, bias=False, **factory)

    def reset_parameters(self) -> None:
        for projection in (self.query, self.key, self.out):
            reset_(projection)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """X (…, d, m), h (…, d) → k (…, d).

        Raises TypeError for a `query` or `key` that was wrapped: they are not called.
        """
        query, key = (
            projection_of(f"direction.{name}", getattr(self, name)) for name in ("query", "key")
        )
        x = state.to(gate_dtype(state))
        x = x * torch.rsqrt(x.square().mean(-2, keepdim=True) + NORM_EPS)
        asked = project(project(context, query.weight, None), key.weight.mT, None)  # (…, d)
        logits = (asked.unsqueeze(-1) * x).sum(-2) / math.sqrt(query.weight.shape[0])  # (…, m)
        answer = (x * logits.softmax(-1).unsqueeze(-2)).sum(-1)  # (…, d)
        return self.out(answer.to(self.out.weight.dtype))


def make_direction(
    direction: Direction, hidden_size: int, value_channels: int, hidden: int, **factory: Any
) -> LinearDirection | PooledDirection | AttentionDirection:
    """The branch, called as branch(state, context)."""
    if direction == "linear":
        return LinearDirection(hidden_size, **factory)
    if direction == "attention":
        return AttentionDirection(hidden_size, hidden, **factory)
    return PooledDirection(Pool(hidden_size, value_channels, direction), hidden, **factory)
