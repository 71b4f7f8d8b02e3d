"""Hyper-connections: the first published way to widen a residual stream, as a baseline.

    H: (n, d), n streams         h̃ = norm(H)
    A = A₀ + s_α tanh(h̃ W_α)     (n, n + 1): column 0 reads the input, the others mix the streams
    b = b₀ + s_β tanh(h̃ w_β)     (n,): the weight of the sublayer's output in each stream
    [h | H'] = Aᵀ H              H ← H' + b F(norm(h))ᵀ

Source: D. Zhu et al., "Hyper-Connections", arXiv 2409.19606, eq. 10 to 13 and algorithm 2 (dynamic
hyper-connections).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddl.reference import without_autocast

from .connected import Connected

SCALE = 0.01  # s_α and s_β at first, as in the paper


class HyperConnection(nn.Module):
    """The mixing around one sublayer.

    index: of the sublayer; stream `index` mod n is its input at first. With equal streams a new
    connection is the plain residual.
    """

    def __init__(self, hidden_size: int, streams: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.mix = nn.Parameter(torch.empty(streams, streams + 1))  # A₀
        self.join = nn.Parameter(torch.empty(streams))  # b₀
        self.norm = nn.LayerNorm(hidden_size)
        self.mix_map = nn.Linear(hidden_size, streams + 1, bias=False)  # W_α
        self.join_map = nn.Linear(hidden_size, 1, bias=False)  # w_β
        self.mix_scale = nn.Parameter(torch.empty(1))
        self.join_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def never_decayed(self) -> Iterator[nn.Parameter]:
        """The static mixing, which an optimizer should not decay (arXiv 2409.19606)."""
        return self.parameters(recurse=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        streams = len(self.join)
        self.norm.reset_parameters()
        self.mix.zero_()
        self.mix[self.index % streams, 0] = 1
        self.mix[:, 1:].fill_diagonal_(1)
        nn.init.ones_(self.join)
        for weight in (self.mix_map.weight, self.join_map.weight):
            nn.init.zeros_(weight)
        for scale in (self.mix_scale, self.join_scale):
            nn.init.constant_(scale, SCALE)

    def forward(self, state: Tensor) -> Connected:
        """Connect H (B, T, n, d)."""
        normalised = self.norm(state)
        mix = self.mix + self.mix_scale * torch.tanh(self.mix_map(normalised))
        join = self.join + self.join_scale * torch.tanh(self.join_map(normalised)).squeeze(-1)
        with without_autocast(state):
            mixed = mix.transpose(-1, -2).to(state.dtype) @ state
        join = join.to(mixed.dtype)
        return Connected(mixed[..., 0, :], mixed[..., 1:, :], join, mix[..., 1:])
