"""The operators in plain PyTorch, written to be fast: the baseline of the fused ones.

`ddl.reference` is written to be read. This is the code that a careful user would write without
ddl-rs, with the signatures of `ddl.reference`, in one of two styles: "products" are matrix products
and convolutions, which avoid temporaries in eager mode; "broadcasts" are elementwise products and
sums, which torch.compile fuses. Each contraction has the form that was fastest on a CPU among those
tried (LOG.md lists them). Values and gates arrive in float32 and stay so; where a matrix product
needs its operands in one dtype, it is the state's. Nothing here is timed before it agrees with the
fused operators or the reference.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.results import ReadResult, RewriteReadResult

Style = Literal["products", "broadcasts"]


def rewrite(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    erase: str = "tied",
    style: Style | None = None,
) -> Tensor:
    """X' = X + β k̂ (v − k̂ᵀX)ᵀ; erase="none" leaves out k̂ᵀX.

    X (…, d, m), k (…, d), v (…, m), β (…). style: None for broadcasts while torch.compile traces,
    products otherwise.
    """
    direction, gate = direction.to(state.dtype), gate.unsqueeze(-1)
    r = torch.rsqrt(direction.square().sum(-1, keepdim=True) + eps_k**2)  # (…, 1)
    if state.shape[-1] == 1:
        X = state.squeeze(-1)
        p = r * (direction * X).sum(-1, keepdim=True) if erase == "tied" else 0.0
        written = (gate * r * (value - p)).to(state.dtype)
        return torch.addcmul(X, written, direction).unsqueeze(-1)
    if style is None:
        style = "broadcasts" if torch.compiler.is_compiling() else "products"
    k = r * direction
    if erase == "none":
        p = torch.zeros_like(value)
    elif style == "broadcasts":
        p = (k[..., None] * state).sum(-2)  # (…, m)
    else:
        p = (k[..., None, :] @ state).squeeze(-2)
    written = (gate * (value - p)).to(state.dtype)[..., None, :]
    return state + (k[..., None] * written if style == "broadcasts" else k[..., None] @ written)


def read(
    state: Tensor,
    *,
    norm_weight: Tensor,
    norm_eps: float = 1e-5,
    compress: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
    value_scale: float | None = None,
    value_from: str = "context",
    context_dtype: torch.dtype | None = None,
    style: Style = "products",
) -> ReadResult:
    """X (B, T, d, m) → h (B, T, d), v (B, T, m), β (B, T); gate and value both, or neither."""
    if value_from != "context":
        raise ValueError(f"values come from the context alone, got {value_from}")
    x = state.squeeze(-1) if compress is None else _compress(state, compress, style)
    h = F.rms_norm(x, x.shape[-1:], norm_weight, norm_eps)
    context = h.to(context_dtype or h.dtype)
    if gate_weight is None or gate_bias is None or value_weight is None or value_bias is None:
        return ReadResult(context, None, None)
    # One product with both weights, so that the context is read once.
    weight = torch.cat((gate_weight[None], value_weight))
    both = F.linear(h, weight, torch.cat((gate_bias[None], value_bias)))
    gate, value = 2 * torch.sigmoid(both[..., 0]), both[..., 1:]
    if value_scale is not None:
        value = value_scale * torch.sigmoid(value)
    return ReadResult(context, value, gate)


def rewrite_read(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    style: Style = "products",
    **parameters: Any,
) -> RewriteReadResult:
    """`rewrite`, then `read` of X'."""
    new = rewrite(state, direction, value, gate, eps_k=eps_k, style=style)
    return RewriteReadResult(new, *read(new, style=style, **parameters))


def expand(
    x: Tensor, weight: Tensor | None = None, *, value_channels: int, style: Style = "products"
) -> Tensor:
    """x (B, T, d) → X (B, T, d, m)."""
    if weight is None:
        return x.unsqueeze(-1).repeat(1, 1, 1, value_channels)
    if style == "broadcasts":
        taps = enumerate(weight.unbind(-1))
        return reduce(torch.add, (_later(x, steps)[..., None] * w for steps, w in taps))
    state = _causal_conv(x, weight.flatten(0, 1).unsqueeze(1), groups=x.shape[-1])
    return torch.unflatten(state, -1, weight.shape[:2])


def _compress(state: Tensor, weight: Tensor, style: Style) -> Tensor:
    """x (B, T, d) of a state (B, T, d, m) by weights (d, m), or (d, m, K) over time."""
    if weight.ndim == 2:
        return (state * weight).sum(-1)
    if style == "products":
        return _causal_conv(state.flatten(2), weight, groups=len(weight))
    terms = (_later((state * w).sum(-1), steps) for steps, w in enumerate(weight.unbind(-1)))
    return reduce(torch.add, terms)


def _later(x: Tensor, steps: int) -> Tensor:
    """x (B, T, d) shifted later in time by `steps` tokens; zeros come first."""
    return F.pad(x, (0, 0, steps, 0))[:, : x.shape[1]]


def _causal_conv(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """y_t = Σ_s W_s x_{t−s} over time: x (B, T, channels), weight (outputs, channels/groups, K).

    A 2-d convolution of height one, because (B, T, channels) is its channels-last layout already; a
    1-d convolution transposes twice and takes twice as long.
    """
    kernel = weight.flip(-1).unsqueeze(2)  # PyTorch's last tap is the current token
    image = x.transpose(1, 2).unsqueeze(2)  # (B, channels, 1, T)
    y = F.conv2d(image, kernel, groups=groups, padding=(0, weight.shape[-1] - 1))
    return y[:, :, 0, : x.shape[1]].transpose(1, 2)
