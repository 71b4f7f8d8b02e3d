"""Hyper-connections: the other published way to widen a residual stream, as a baseline.

    H: (n, d), n streams         h̃ = norm(H)
    A = A₀ + s_α tanh(h̃ W_α)     (n, n + 1): column 0 reads the input, the others mix the streams
    b = b₀ + s_β tanh(h̃ w_β)     (n,): the weight of the sublayer's output in each stream
    [h | H'] = Aᵀ H              H ← H' + b F(norm(h))ᵀ

Source: D. Zhu et al., "Hyper-Connections", arXiv 2409.19606, eq. 10 to 13 and algorithm 2 (dynamic
hyper-connections). Plain PyTorch: a comparison, not something that this package makes fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .additions import AddingStream, Addition
from .history import History

__all__ = ["HyperConnection", "HyperStream"]

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

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map H (B, T, n, d) to the input h (B, T, d), the mixed H' (B, T, n, d), b (B, T, n)."""
        mix, join = self.weights(state)
        mixed = mix.transpose(-1, -2).to(state.dtype) @ state
        return mixed[..., 0, :], mixed[..., 1:, :], join

    def weights(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A (B, T, n, n + 1) and b (B, T, n) of H (B, T, n, d)."""
        normalised = self.norm(state)
        mix = self.mix + self.mix_scale * torch.tanh(self.mix_map(normalised))
        join = self.join + self.join_scale * torch.tanh(self.join_map(normalised)).squeeze(-1)
        return mix, join


class HyperStream(AddingStream):
    """n streams joined by hyper-connections, with a final norm of their sum."""

    def __init__(
        self, hidden_size: int, sublayers: Iterable[nn.Module], *, streams: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.streams = streams
        self.sublayers = nn.ModuleList(sublayers)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, norm_eps) for _ in self.sublayers)
        self.connections = nn.ModuleList(
            HyperConnection(hidden_size, streams, index) for index in range(len(self.sublayers))
        )
        self.readout = nn.RMSNorm(hidden_size, norm_eps)

    def reset_parameters(self) -> None:
        for module in (*self.norms, *self.connections, self.readout):
            module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *args: Any,
        history: History | None = None,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); arguments as in DeltaStream."""
        state = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1])
        parts = zip(self.norms, self.sublayers, self.connections, strict=True)
        for i, (norm, sublayer, connection) in enumerate(parts):
            before = state if self.hooks else None
            h, state, join = connection(state)
            written = sublayer(norm(h), *args)
            if before is not None:
                mix = connection.weights(before)[0][..., 1:]  # type: ignore[operator]
                self.show(Addition(i, before.transpose(-1, -2), written, mix, join, keep))
            state = state + join.unsqueeze(-1).to(state.dtype) * written.unsqueeze(-2)
        return self.readout(state.sum(-2))
