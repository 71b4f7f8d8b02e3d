"""Additions to all value channels: the control of width, with the reads of channel compression.

    h = norm(Σ_j w_j ∘ X_j)                      X (d, m), m copies of the embedding at first
    b = β v,  β = 2 sigmoid(u · h + c),  v = W h + a    (m,)
    X ← X + s F(h) bᵀ

Consecutive sublayers share w (d, m), as in DDL-CC. β and a start as 1, w as 1/m.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition
from ddl.nn.checks import require_exact_type
from ddl.nn.gate import reset_gate, squash
from ddl.nn.linear import Projection, form_parameters, project, projection_of, reset_
from ddl.nn.read import Read, make_reads

from ..sublayers import wide

__all__ = ["ExpandedStream"]


class ChannelWeights(nn.Module):
    """b = β v of a context, the weight of the sublayer's output in each value channel."""

    def __init__(self, hidden_size: int, value_channels: int) -> None:
        super().__init__()
        self.gate = Projection(hidden_size, 1)  # u and c
        self.value = Projection(hidden_size, value_channels)  # W and a
        self.reset_parameters()

    def never_decayed(self) -> Iterator[nn.Parameter]:
        """Zero is not a neutral value for any of the parameters, as in DeltaResidual."""
        return self.parameters()

    def reset_parameters(self) -> None:
        reset_(self.value, bias=1.0)
        reset_gate(self.gate, beta_init=1.0)

    def forward(self, h: Tensor) -> Tensor:
        """Map h (…, d) to b (…, m), in float32 (float64 for float64)."""
        gate, value = projection_of("gate", self.gate), projection_of("value", self.value)
        beta = squash(project(h, gate.weight, gate.bias))
        return beta.unsqueeze(-1) * project(h, value.weight, value.bias)


class ExpandedStream(AddingStream):
    """Additions to a stream of m value channels, with a weight for each channel.

    value_channels: m. sublayers_per_compressor: consecutive sublayers that share a read's weights.
    branch_scale: s. options: of Read.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Iterable[nn.Module],
        *,
        value_channels: int,
        sublayers_per_compressor: int,
        norm_eps: float,
        branch_scale: float,
        **options: Any,
    ) -> None:
        super().__init__()
        self.value_channels, self.branch_scale = value_channels, branch_scale
        self.sublayers = nn.ModuleList(sublayers)
        common: dict[str, Any] = {"compress": "channel", "norm_eps": norm_eps}
        self.reads = make_reads(
            hidden_size,
            value_channels,
            sublayers=len(self.sublayers),
            sublayers_per_compressor=sublayers_per_compressor,
            own=options,
            **common,
        )
        self.residuals = nn.ModuleList(
            ChannelWeights(hidden_size, value_channels) for _ in self.sublayers
        )
        self.readout = Read(hidden_size, value_channels, **options, **common)

    def reset_parameters(self) -> None:
        for module in (*self.reads, *self.residuals, self.readout):
            module.reset_parameters()

    def forward(self, x: Tensor, *args: Any, keep: Tensor | None = None, **_: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); as AdditiveStream."""
        state = x.unsqueeze(-1).expand(*x.shape, self.value_channels)
        parts = zip(self.reads, self.sublayers, self.residuals, strict=True)
        for i, (read, sublayer, residual) in enumerate(parts):
            h = plain_read(f"reads[{i}]", read, state)
            written, join = sublayer(h, *args), self.branch_scale * residual(h)
            if self.hooks:
                self.show(Addition(i, state, written, None, join, keep))
            state = (state + written.unsqueeze(-1) * join.unsqueeze(-2)).to(state.dtype)
        return self.read_out(state)

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, m) to the final read (B, T, d)."""
        return plain_read("readout", self.readout, state)


def plain_read(name: str, read: nn.Module, state: Tensor) -> Tensor:
    """Read X (…, d, m) as a channel `Read` does, without the operator: h (…, d), in X's dtype."""
    read = require_exact_type(name, read, Read)
    form_parameters(read)
    weight, norm_weight = read.effective_weight(), read.norm_weight
    assert weight is not None
    assert norm_weight is not None
    x = (wide(state) * wide(weight)).sum(-1)
    return F.rms_norm(x, x.shape[-1:], wide(norm_weight), read.norm_eps).to(state.dtype)
