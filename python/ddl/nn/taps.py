"""Taps: functions that see a rewrite before it is done, and may change it.

`ddl.record` and `ddl.edit` install them. Every trunk passes its rewrites through
`DeltaResidual.tapped`, since it runs the rewrite fused with the next read, where no forward hook
fires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ddl import functional

__all__ = ["Rewrite", "Tap", "generation", "installed"]


class Rewrite(NamedTuple):
    """A rewrite that is about to be done: X' = X + β k̂ (vᵀ − k̂ᵀX).

    state: X (…, d, m). direction: k (…, d), of any norm. value: v (…, m). gate: β (…,), float32 or
    float64. eps_k: ε_k.
    keep: (…,) bool, False for padding; None without padding.
    continues: True if the tokens continue those of a history or cache.
    """

    state: Tensor
    direction: Tensor
    value: Tensor
    gate: Tensor
    eps_k: float
    keep: Tensor | None
    continues: bool

    def unit_direction(self) -> Tensor:
        """k̂ = k/√(|k|² + ε_k²) (…, d), in the gate's dtype."""
        k = self.direction.to(self.gate.dtype)
        return k / (k.square().sum(-1, keepdim=True) + self.eps_k**2).sqrt()

    def after(self) -> Tensor:
        """X' (…, d, m), in the state's dtype."""
        arguments = (self.state, self.direction, self.value, self.gate)
        return functional.rewrite(*arguments, eps_k=self.eps_k)


Tap = Callable[[Rewrite], Rewrite]


class Tapped(Protocol):
    """A DeltaResidual. Each of `taps` gets what the one before it returned."""

    taps: tuple[Tap, ...]


_changes = 0


def generation() -> int:
    """A number that changes whenever a tap is installed or removed."""
    return _changes


@contextmanager
def installed(taps: Iterable[tuple[Tapped, Tap]]) -> Iterator[None]:
    """Install each tap in its residual, after those it has; remove it at the end.

    Meanwhile compiled models run uncompiled, because their compiled code calls no taps.
    """
    pairs = list(taps)
    with torch.compiler.set_stance("force_eager"):
        _note_a_change()
        for residual, tap in pairs:
            residual.taps = (*residual.taps, tap)
        try:
            yield
        finally:
            _note_a_change()
            for residual, tap in pairs:
                residual.taps = tuple(other for other in residual.taps if other is not tap)


def _note_a_change() -> None:
    global _changes
    _changes += 1
