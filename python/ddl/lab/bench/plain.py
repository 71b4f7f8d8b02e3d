"""The delta stream in plain PyTorch, written to be fast: the baseline of the fused operators.

`ddl.reference` is written to be read. This is the code that a careful user would write without
ddl-rs, in one of two styles: "products" are matrix products and convolutions, which avoid
temporaries in eager mode; "broadcasts" are elementwise products and sums, which torch.compile
fuses. Each contraction has the form that was fastest on a CPU among those tried (LOG.md lists
them). Nothing here is timed before it agrees with the fused stream or the reference.
"""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.models import GPT
from ddl.nn import DeltaResidual, Read

Style = Literal["products", "broadcasts"]


def rewrite(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    eps_k: float,
    style: Style | None = None,
) -> Tensor:
    """X' = X + β k̂ (v − k̂ᵀX)ᵀ. X (…, d, m), or (…, d) for m = 1; k (…, d); v (…, m); β (…, 1)."""
    r = torch.rsqrt(direction.square().sum(-1, keepdim=True) + eps_k**2)  # (…, 1)
    if state.ndim == direction.ndim:
        p = r * (direction * state).sum(-1, keepdim=True)
        return torch.addcmul(state, (gate * r * (value - p)).to(state.dtype), direction)
    if style is None:
        style = "broadcasts" if torch.compiler.is_compiling() else "products"
    k = r * direction
    if style == "broadcasts":
        p = (k[..., None] * state).sum(-2)
        return state + k[..., None] * (gate * (value - p)).to(state.dtype)[..., None, :]
    p = (k[..., None, :] @ state).squeeze(-2)  # (…, m)
    return state + k[..., None] @ (gate * (value - p)).to(state.dtype)[..., None, :]


def write(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps_k: float) -> Tensor:
    """X' = X + β k̂ vᵀ, which erases nothing. Shapes as in `rewrite`."""
    k = torch.rsqrt(direction.square().sum(-1, keepdim=True) + eps_k**2) * direction
    written = k[..., None] * (gate * value)[..., None, :]
    return state + (written.squeeze(-1) if state.ndim == direction.ndim else written)


def compress(state: Tensor, weight: Tensor | None, style: Style = "products") -> Tensor:
    """x (B, T, d) of a state (B, T, d, m). Weights as in `ddl.Read`; None returns the state."""
    if weight is None:
        return state
    if weight.ndim == 2:
        return (state * weight).sum(-1)
    if style == "products":
        return _causal_conv(state.flatten(2), weight, groups=len(weight))
    terms = (_later((state * w).sum(-1), steps) for steps, w in enumerate(weight.unbind(-1)))
    return reduce(torch.add, terms)


def expand(
    x: Tensor, weight: Tensor | None, value_channels: int, style: Style = "products"
) -> Tensor:
    """x (B, T, d) to a state (B, T, d, m); x itself for m = 1 without a weight."""
    if weight is not None and style == "products":
        state = _causal_conv(x, weight.flatten(0, 1).unsqueeze(1), groups=x.shape[-1])
        return torch.unflatten(state, -1, weight.shape[:2])
    if weight is not None:
        taps = enumerate(weight.unbind(-1))
        return reduce(torch.add, (_later(x, steps)[..., None] * w for steps, w in taps))
    if value_channels == 1:
        return x
    return x.unsqueeze(-1).repeat(1, 1, 1, value_channels)


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


class PlainStream(nn.Module):
    """A `DeltaStream` without the fused operators, on the very modules and parameters of `stream`.

    It covers the model variants: k-Map with value and gate read from the context. Any other stream
    is a ValueError.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        for residual in stream.residuals:
            assert isinstance(residual, DeltaResidual)
            sources = {residual.value_from, residual.gate_from}
            linear = residual.mapping == "k" and residual.value is not None
            once = (residual.rewrites, residual.branch_scale) == (1, 1)
            if not (linear and once) or sources != {"context"}:
                expected = "map k, write once, read value and gate from h and have branch_scale=1"
                raise ValueError(f"`stream` must {expected}, got {residual}")
        self.sublayers, self.expand, self.reads = stream.sublayers, stream.expand, stream.reads
        self.residuals, self.readout = stream.residuals, stream.readout

    def forward(
        self,
        x: Tensor,
        *args: Any,
        history: None = None,
        keep: None = None,
        document_starts: None = None,
    ) -> Tensor:
        """x (B, T, d) → the normalised final read (B, T, d); one document each, no padding."""
        channels = self.expand.value_channels
        state = expand(x, self.expand.weight, channels)
        if channels == 1 and state.ndim > x.ndim:  # from the convolution
            state = state.squeeze(-1)
        parts: Any = zip(self.reads, self.sublayers, self.residuals, strict=True)
        for read, sublayer, residual in parts:
            h = _read(read, state)
            value = residual.value(h)
            if residual.value_kind == "sigmoid":
                value = residual.value_scale * torch.sigmoid(value)
            gate = 2 * torch.sigmoid(residual.gate(h))
            operands = (sublayer(h, *args), value, gate, residual.eps_k)
            state = (write if residual.erase == "none" else rewrite)(state, *operands)
        return _read(self.readout, state)


def _read(read: Read, state: Tensor) -> Tensor:
    weight = read.effective_weight()
    if weight is not None and state.ndim == 3:  # m = 1, but compressed
        state = state.unsqueeze(-1)
    x = compress(state, weight)
    return F.rms_norm(x, x.shape[-1:], read.norm_weight, read.norm_eps)


def peer(model: GPT) -> GPT:
    """The same model on the same parameters, with its trunk in plain PyTorch."""
    other: Any = copy.copy(model)
    other._modules = dict(model._modules)  # the shallow copy shares the table of submodules
    other.trunk = PlainStream(model.trunk)
    return other
