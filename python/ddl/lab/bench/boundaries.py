"""The step between two sublayers, as modules: rewrite, read and norm, or addition and norm.

Each maps what a sublayer leaves to what the next one needs, and takes the operators as an argument:
`ddl.functional`, or `ddl.reference` to check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import functional
from ddl.nn import DeltaResidual, Read

EPS = 1e-5


class FusedRead(nn.Module):
    """One operator: it rewrites, reads, normalises (RMS), and returns gate and value."""

    def __init__(self, hidden_size: int, value_channels: int) -> None:
        super().__init__()
        compress: Any = "identity" if value_channels == 1 else "channel"
        self.read = Read(hidden_size, value_channels, compress=compress)
        self.residual = DeltaResidual(hidden_size, value_channels)

    def forward(
        self, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, ops: Any = functional
    ) -> Sequence[Tensor]:
        """X (B, T, d, m), k (B, T, d), v (B, T, m), β (B, T) → X', h, v, β of the next sublayer."""
        parameters = self.read.parameters_of(self.read.effective_weight())
        arguments = self.residual.added_to(parameters).keywords()
        return ops.rewrite_read(
            state, direction, value, gate, eps_k=self.residual.eps_k, **arguments
        )


class LayerNormOutside(FusedRead):
    """The operator without its norm, a LayerNorm, and one product for gate and value.

    This is what `ddl.nanogpt` does, because a converted model keeps its norms.
    """

    def forward(
        self, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, ops: Any = functional
    ) -> Sequence[Tensor]:
        """As in FusedRead."""
        residual, weight = self.residual, self.read.effective_weight()
        state, x, *_ = ops.rewrite_read(
            state, direction, value, gate, eps_k=residual.eps_k, compress=weight, norm_eps=None
        )
        h = F.layer_norm(x, x.shape[-1:], self.read.norm_weight, eps=EPS)
        next_value, next_gate = residual.value_and_gate(h, x)
        assert next_value is not None  # value and gate are of the default kinds
        assert next_gate is not None
        return state, h, next_value, next_gate


class Additive(nn.Module):
    """The baseline: y = x + F(h), and its norm. norm: "rms" or "layer"."""

    def __init__(self, hidden_size: int, norm: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.norm = F.rms_norm if norm == "rms" else F.layer_norm

    def forward(self, x: Tensor, direction: Tensor, ops: Any = functional) -> Sequence[Tensor]:
        """x, F(h) (B, T, d) → y, h (B, T, d)."""
        y = x + direction
        return y, self.norm(y, y.shape[-1:], self.weight, eps=EPS)


def inputs(
    batch: int, time: int, d: int, m: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Random float32 state, direction, value and gate, for FusedRead and LayerNormOutside."""
    g = torch.Generator(device).manual_seed(0)
    lead = (batch, time)
    shapes = {"state": (*lead, d, m), "direction": (*lead, d), "value": (*lead, m)}
    made = {name: torch.randn(s, generator=g, device=device) for name, s in shapes.items()}
    made["gate"] = torch.rand(lead, generator=g, device=device)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def additive_inputs(
    batch: int, time: int, d: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Random float32 x and direction, for Additive."""
    made = inputs(batch, time, d, 1, device)
    return {
        "x": made["state"].detach().squeeze(-1).requires_grad_(),
        "direction": made["direction"],
    }
