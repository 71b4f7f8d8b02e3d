"""Results of the read operators, shared by `ddl.reference`, `ddl.functional` and the modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Chain", "Link", "ReadResult", "RewriteReadResult"]

Link = tuple[Tensor, Tensor, Tensor, Tensor]  # direction, value, gate and statistics of a rewrite


class ReadResult(NamedTuple):
    """Result of `read`: the next sublayer's input, and value and gate of the rewrite after it.

    context: h (…, d), in `context_dtype` (by default the state's dtype).
    value: v (…, m), float32 (float64 for a float64 state); None without `value_weight`.
    gate: β (…,) in [0, 2], float32 (float64 for a float64 state); None without `gate_weight`.
    For n rewrites to come, value and gate are (…, n, m) and (…, n).
    """

    context: Tensor
    value: Tensor | None
    gate: Tensor | None


class RewriteReadResult(NamedTuple):
    """Result of `rewrite_read`: the rewritten state and its read (see ReadResult).

    state: X' (…, d, m), in the input state's dtype.
    """

    state: Tensor
    context: Tensor
    value: Tensor | None
    gate: Tensor | None


class Chain(NamedTuple):
    """The rewrites since the last state that is stored, from which a backward computes the others.

    Every N-th state is stored, the anchor. A backward applies the rewrites since then to it again,
    with the bits of the forward, so gradients are the same to the bit. Start with
    `Chain(anchor_every=N)`; each call of `functional.rewrite_read_chained` returns the next one.

    anchor_every: N. anchor: X (…, d, m); None if the next state is stored. links: direction, value,
    gate and saved statistics of each rewrite since.
    """

    anchor_every: int
    anchor: Tensor | None = None
    links: tuple[Tensor, ...] = ()

    def before(self, direction: Tensor) -> Chain:
        """The chain for rewrites along `direction`: empty if their dtypes or numbers differ."""
        if self.links:
            first = self.links[0]
            if first.dtype != direction.dtype or first.shape != direction.shape:
                return Chain(self.anchor_every)
        return self

    def after(self, state: Tensor, link: Link) -> Chain:
        """The chain after a rewrite of `state`."""
        links = (*self.links, *link)
        if len(links) == len(link) * self.anchor_every:
            return Chain(self.anchor_every)
        return Chain(self.anchor_every, state if self.anchor is None else self.anchor, links)
