"""The remains of additions: the figures of `inspect` for a model without rewrites.

A sublayer adds F bᵀ to n streams, X' = X M + F bᵀ (`ddl.nn.additions.Addition`). So what is left of
source s after more sublayers is F_s cᵀ, where c starts as b and each sublayer makes it c M. The
embedding's c starts as its weight in each stream: ones in all of them, or, among the sums of
attention residuals, one in the first alone. In an additive stream n and c are 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite

from . import spectra
from .arrays import Array, finite, rows

__all__ = ["AddedPass", "Figures", "survival"]


class Figures(NamedTuple):
    """The figures of one window of so many tokens.

    means: over tokens, coherence (L, L), effective rank (L + 1,), norms of what is left of each
    source after each sublayer (L + 1, L + 1), and shares of the last state (L + 1,).
    singular_values: of every token; None without rewrites. several: False for a single stream of
    additions, which keeps all that is written.
    """

    tokens: int
    means: tuple[Array, Array, Array, Array]
    singular_values: Array | None = None
    several: bool = True


class AddedPass:
    """One window's additions, for N tokens: F (N, d), M (N, n, n) and b (N, n) of every sublayer.

    embedding: (N, d). last: the state (N, d, n) after the last one so far.
    """

    def __init__(self) -> None:
        self.embedding: Array | None = None
        self.first: Array = np.empty(0)  # c of the embedding
        self.last: Array = np.empty(0)
        self.written: list[Array] = []
        self.mixes: list[Array | None] = []
        self.joins: list[Array] = []
        self.ranks: list[Array] = []

    def see(self, name: str, seen: Rewrite | Addition) -> None:
        assert isinstance(seen, Addition)
        if self.embedding is None:
            state = finite(rows(seen.state, 2), 0)
            self.embedding, self.ranks = state[..., 0], [spectra.effective_rank(state)]
            self.first = (np.abs(state).sum(1) > 0).astype(np.float64)
        self.written.append(rows(seen.written, 1))
        self.mixes.append(None if seen.mix is None else rows(seen.mix, 2))
        self.joins.append(rows(seen.weights(), 1))
        self.last = finite(rows(seen.after(), 2), len(self.written))
        self.ranks.append(spectra.effective_rank(self.last))

    def left(self) -> tuple[Array, Array]:
        """Norms (L + 1, L + 1), a row for each source and a column after each sublayer, and shares
        of the last state (L + 1,): means over tokens."""
        assert self.embedding is not None
        sources = [self.embedding, *self.written]
        lengths = [np.linalg.norm(source, axis=1) for source in sources]
        weights = [self.first]
        norms = np.zeros((len(sources), len(sources)))
        norms[0, 0] = (lengths[0] * np.linalg.norm(weights[0], axis=1)).mean()
        for after, (mix, join) in enumerate(zip(self.mixes, self.joins, strict=True), start=1):
            if mix is not None:
                weights = [np.einsum("ni,nij->nj", c, mix) for c in weights]
            weights.append(join.astype(np.float64))
            for source, c in enumerate(weights):
                norms[source, after] = (lengths[source] * np.linalg.norm(c, axis=1)).mean()
        squared = np.square(self.last, dtype=np.float64).sum((1, 2))
        along = [
            np.einsum("nd,ndj,nj->n", source, self.last, c)
            for source, c in zip(sources, weights, strict=True)
        ]
        return norms, np.array([(each / squared).mean() for each in along])

    def figures(self) -> Figures:
        written = torch.from_numpy(np.stack(self.written, axis=1))  # (N, L, d)
        directions = torch.nn.functional.normalize(written, dim=-1).numpy()
        means = (spectra.coherence_matrix(directions), np.mean(self.ranks, axis=1), *self.left())
        return Figures(len(directions), means, several=self.last.shape[-1] > 1)


def survival(norms: Array) -> Array:
    """Norms (sources, after) over those when they were written; NaN before, and without a write."""
    written = np.diag(norms)[:, None]
    with np.errstate(invalid="ignore"):  # nothing is left of what was never written
        found: Array = np.where(np.tri(len(norms)).T > 0, norms / written, np.nan)
    return found
