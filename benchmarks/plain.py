"""The delta stream in plain PyTorch, written to be fast: the peer of the fused operators.

`ddl.reference` is written to be read; this is what a careful user would write without ddl-rs. Every
contraction takes the form that was fastest on a CPU among those tried (LOG.md has the candidates).
It differs between eager mode, where matrix products avoid temporaries, and torch.compile, which
fuses what is elementwise. Nothing here is timed before it agreed with the fused stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import DeltaStream, Read
from ddl.models import GPT


def rewrite(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps_k: float) -> Tensor:
    """X' = X + β k̂ (v − k̂ᵀX)ᵀ. X (…, d, m), or (…, d) for m = 1; k (…, d); v (…, m); β (…, 1)."""
    r = torch.rsqrt(direction.square().sum(-1, keepdim=True) + eps_k**2)  # (…, 1)
    if state.ndim == direction.ndim:
        p = r * (direction * state).sum(-1, keepdim=True)
        return torch.addcmul(state, gate * r * (value - p), direction)
    k = r * direction
    if torch.compiler.is_compiling():
        p = (k[..., None] * state).sum(-2)
        return state + k[..., None] * (gate * (value - p))[..., None, :]
    p = (k[..., None, :] @ state).squeeze(-2)  # (…, m)
    return state + k[..., None] @ (gate * (value - p))[..., None, :]


def compress(state: Tensor, weight: Tensor | None) -> Tensor:
    """x (B, T, d) of a state (B, T, d, m). Weights as in `ddl.Read`; None returns the state."""
    if weight is None:
        return state
    if weight.ndim == 3:
        return _causal_conv(state.flatten(2), weight, groups=len(weight))
    return (state * weight).sum(-1)


def expand(x: Tensor, weight: Tensor | None, value_channels: int) -> Tensor:
    """x (B, T, d) to a state (B, T, d, m); x itself for m = 1 without a weight."""
    if weight is not None:
        state = _causal_conv(x, weight.flatten(0, 1).unsqueeze(1), groups=x.shape[-1])
        return state.unflatten(-1, weight.shape[:2])
    if value_channels == 1:
        return x
    return x.unsqueeze(-1).repeat(1, 1, 1, value_channels)


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

    k-Map with a value read from the context, which is what the model variants are; ValueError else.
    """

    def __init__(self, stream: DeltaStream) -> None:
        super().__init__()
        for residual in stream.residuals:
            served = residual.mapping == "k" and residual.value_from == "context"
            if not served or residual.value is None:
                raise ValueError(f"`stream` must map k and read its value from h, got {residual}")
        self.sublayers, self.expand, self.reads = stream.sublayers, stream.expand, stream.reads
        self.residuals, self.readout = stream.residuals, stream.readout

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (B, T, d) → the normalised readout (B, T, d)."""
        channels = self.expand.value_channels
        state = expand(x, self.expand.weight, channels)
        if channels == 1 and state.ndim > x.ndim:  # from the convolution
            state = state.squeeze(-1)
        for read, sublayer, residual in zip(
            self.reads, self.sublayers, self.residuals, strict=True
        ):
            h = _read(read, state)
            value = residual.value(h)
            if residual.value_kind == "sigmoid":
                value = residual.value_scale * torch.sigmoid(value)
            gate = 2 * torch.sigmoid(residual.gate(h))
            state = rewrite(state, sublayer(h, *args, **kwargs), value, gate, residual.eps_k)
        return _read(self.readout, state)


def _read(read: Read, state: Tensor) -> Tensor:
    weight = read.effective_weight()
    if weight is not None and state.ndim == 3:  # m = 1, but compressed
        state = state.unsqueeze(-1)
    x = compress(state, weight)
    return F.rms_norm(x, x.shape[-1:], read.norm_weight, read.norm_eps)


def peer(model: GPT) -> GPT:
    """The same model on the same parameters, its trunk in plain PyTorch."""
    other = GPT(model.config)
    other.wte, other.trunk = model.wte, PlainStream(model.trunk)
    return other
