"""n streams that every sublayer reads and writes through a connection of its own.

    X (n, d)      x = connection(X)      X ← Mᵀ X + b F(norm(x))ᵀ

The connections differ: `hyper`, `mhc` and `gated` have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition


class Connected(NamedTuple):
    """The read and the mixing of X (B, T, n, d) by a connection.

    read: x (B, T, d). mixed: Mᵀ X (B, T, n, d). join: b (B, T, n), the weight of the sublayer's
    output in each stream. mix: M (B, T, n, n); None for the identity.
    """

    read: Tensor
    mixed: Tensor
    join: Tensor
    mix: Tensor | None


class ConnectedStream(AddingStream):
    """n streams, equal at first, with a connection around each sublayer.

    streams: n. connections: one for each sublayer, maps X to Connected. head: maps X (B, T, n, d)
    to the final read. norm: makes the norm before each sublayer, and the one after the head; the
    identity if the reads are normalised already.
    """

    def __init__(
        self,
        sublayers: Iterable[nn.Module],
        streams: int,
        *,
        connections: Iterable[nn.Module],
        norm: Callable[[], nn.Module],
        head: nn.Module,
    ) -> None:
        super().__init__(sublayers)
        self.streams = streams
        self.norms = nn.ModuleList(norm() for _ in self.sublayers)
        self.connections = nn.ModuleList(connections)
        self.head = head
        self.readout = norm()

    def forward(self, x: Tensor, *args: Any, keep: Tensor | None = None, **_: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); as AdditiveStream."""
        state = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1])
        parts = zip(self.norms, self.sublayers, self.connections, strict=True)
        for i, (norm, sublayer, connection) in enumerate(parts):
            read, mixed, join, mix = connection(state)
            written = sublayer(norm(read), *args)
            if self.hooks:
                self.show(Addition(i, state.transpose(-1, -2), written, mix, join, keep))
            state = (mixed + join.unsqueeze(-1) * written.unsqueeze(-2)).to(mixed.dtype)
        return self.readout(self.head(state))

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, n) to the final read (B, T, d)."""
        h: Tensor = self.readout(self.head(state.transpose(-1, -2)))
        return h


class SumOfStreams(nn.Module):
    """The sum of n streams (…, n, d)."""

    def forward(self, state: Tensor) -> Tensor:
        return state.sum(-2)
