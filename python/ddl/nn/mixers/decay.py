"""The log decay of a gated mixer: g = −exp(a)·softplus(f(h) + b), of each state or of its features.

Source: Gated DeltaNet (arXiv 2412.06464), whose gate is Mamba 2's; Kimi Linear (arXiv 2510.26692)
for a decay per key feature, of low rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linear import Projection, empty_parameter, project, projection_of, reset_

__all__ = ["Decay"]

STEPS = (1e-3, 0.1)  # softplus(b) at initialisation, spread evenly in its logarithm
RATES = (1.0, 16.0)  # exp(a)


class Decay(nn.Module):
    """Map h (B, T, d) to g (B, T, H), or (B, T, H, K), in float32 (float64 for float64).

    rank: of the map to the H·K features; None for one number per state and a full map.
    """

    def __init__(
        self,
        hidden_size: int,
        states: int,
        features: int = 1,
        rank: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.states, self.features = states, features
        width = states * features
        self.down = None
        if rank is not None:
            self.down = Projection(hidden_size, rank, bias=False, **factory)
        self.up = Projection(rank or hidden_size, width, **factory)
        self.log_rate = empty_parameter(states, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rates and steps, as Mamba 2 does."""
        for projection in (self.down, self.up):
            if projection is not None:
                reset_(projection)
        low, high = (math.log(step) for step in STEPS)
        step = torch.empty_like(self.up.bias).uniform_(low, high).exp_()
        self.up.bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.log_rate.uniform_(*RATES).log_()

    def forward(self, h: Tensor) -> Tensor:
        if self.down is not None:
            h = project(h, projection_of("down", self.down).weight, None)
        up = projection_of("up", self.up)
        steps = F.softplus(project(h, up.weight, up.bias))
        rates = self.log_rate.to(steps.dtype).exp()
        if self.features == 1:
            return -rates * steps
        return -rates[:, None] * torch.unflatten(steps, -1, (self.states, self.features))
