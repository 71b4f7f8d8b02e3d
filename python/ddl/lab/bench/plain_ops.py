"""The operators in plain PyTorch, with the signatures of `ddl.functional`, built from plain.py.

Values and gates arrive in float32 and stay so. Where a matrix product needs its operands in one
dtype, it is the state's, as a careful user would choose.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.results import ReadResult, RewriteReadResult

from . import plain
from .plain import Style


def rewrite(
    state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, *, eps_k: float, style: Style
) -> Tensor:
    """X (…, d, m), k (…, d), v (…, m), β (…,) → X' (…, d, m)."""
    stream = state.squeeze(-1) if state.shape[-1] == 1 else state
    k = direction.to(state.dtype)
    return plain.rewrite(stream, k, value, gate[..., None], eps_k, style).reshape(state.shape)


def read(
    state: Tensor,
    *,
    norm_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    value_weight: Tensor,
    value_bias: Tensor,
    compress: Tensor | None = None,
    context_dtype: torch.dtype | None = None,
    style: Style,
) -> ReadResult:
    """X (B, T, d, m) → h (B, T, d), v (B, T, m), β (B, T)."""
    x = plain.compress(state, compress, style) if compress is not None else state.squeeze(-1)
    h = F.rms_norm(x, x.shape[-1:], norm_weight, 1e-5)
    # One product with both weights, so that the context is read once.
    weight = torch.cat((gate_weight[None], value_weight))
    both = F.linear(h, weight, torch.cat((gate_bias[None], value_bias)))
    gate, value = 2 * torch.sigmoid(both[..., 0]), both[..., 1:]
    return ReadResult(h.to(context_dtype or h.dtype), value, gate)


def rewrite_read(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    style: Style,
    **parameters: Any,
) -> RewriteReadResult:
    """`rewrite`, then `read` of X'."""
    new = rewrite(state, direction, value, gate, eps_k=eps_k, style=style)
    return RewriteReadResult(new, *read(new, style=style, **parameters))


def expand(x: Tensor, weight: Tensor | None = None, *, value_channels: int, style: Style) -> Tensor:
    """x (B, T, d) → X (B, T, d, m)."""
    state = plain.expand(x, weight, value_channels, style)
    return state.reshape(*x.shape, value_channels)
