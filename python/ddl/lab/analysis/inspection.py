"""Inspection: what the sublayers of a model do to its stream over depth, measured on text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddl.errors import NEWER
from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite, installed
from ddl.recording import Recording, record
from ddl.recording.recorder import null_if_unknown
from ddl.recording.sublayers import evaluating, has_rewrites, hooks_of

from . import spectra
from .additions import AddedPass, Figures, survival
from .arrays import Array, finite, rows

__all__ = ["FILE", "Inspection", "inspect", "read_summary"]

FILE = "inspection.json"  # of `Inspection.summary`
FORMAT = 1
QUANTILES = (0.1, 0.5, 0.9)


class Inspection(NamedTuple):
    """The measurements of `inspect`, for L sublayers; means over tokens unless said otherwise.

    A sublayer with several rewrites counts as several, as in `ddl.record`.

    recording: statistics of every rewrite, or of every addition of a model without rewrites.
    coherence: (L, L), |cos| between the directions of two sublayers at the same token. Without
        rewrites the direction is that of the sublayer's output.
    effective_rank: (L + 1,), of the state before each sublayer and after the last.
    singular_values: (3, min(L, d)), the tenth, fiftieth and ninetieth percentile over tokens of the
        singular values, in falling order, of the product of all rewrites' operators I − αk̂k̂ᵀ, α
        being β, or 0 of a rewrite that erases nothing; all others are 1. None without rewrites.
    survival: (L + 1, L + 1), the mean norm of what is left of source s after sublayer n, over its
        mean norm when it was written; NaN before. Source 0 is the embedding, source s the write of
        sublayer s; column 0 is before the first sublayer.
    shares: (L + 1,), each source's share of the last state, ⟨what is left, X⟩/|X|²; they sum to 1.

    An additive stream keeps all that is written, in one channel: its survival and its effective
    rank are None, because they would be 1 throughout.
    """

    recording: Recording
    coherence: Array
    effective_rank: Array | None
    singular_values: Array | None
    survival: Array | None
    shares: Array

    def summary(self) -> dict[str, Any]:
        """Everything as JSON's values; null for what is unknown, and no key for what is None."""
        arrays = {
            "coherence": self.coherence,
            "effective_rank": self.effective_rank,
            "singular_values": self.singular_values,
            "survival": self.survival,
            "shares": self.shares,
        }
        return {
            "format": FORMAT,
            **self.recording.summary(),
            **{
                name: null_if_unknown(array.tolist())
                for name, array in arrays.items()
                if array is not None
            },
        }


def read_summary(file: Path) -> dict[str, Any]:
    """The summary in an inspection.json; only its format is checked.

    Raises OSError if the file cannot be read, ValueError if it is not JSON or of another format.
    """
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not isinstance(summary, dict):
        raise ValueError("no object")
    written = summary.get("format")
    if written != FORMAT:
        raise ValueError(f"format {written!r} instead of {FORMAT}; {NEWER}")
    return summary


@torch.no_grad()
def inspect(
    model: nn.Module, windows: Iterable[Tensor], *, progress: Callable[[], object] | None = None
) -> Inspection:
    """Run `model`, in evaluation mode, on token windows (B, T) and measure what its rewrites do, or
    what its sublayers add.

    Memory: the directions of one window, 4·L·B·T·d bytes, and a few states. progress: called after
    every window.

    Raises:
        TypeError, ValueError: as `ddl.record`; `windows` is empty; a state is not finite.
    """
    made = _Pass if has_rewrites(model) else AddedPass
    found: list[Figures] = []
    with evaluating(model), record(model) as recording:
        for idx in windows:
            captured: Any = made()
            with installed(hooks_of(model, captured.see)):
                model(idx)
            found.append(captured.figures())
            if progress is not None:
                progress()
    if not found:
        raise ValueError("`windows` must have at least one window, got none")
    tokens = [figures.tokens for figures in found]
    coherence, ranks, norms, shares = (
        np.average(means, axis=0, weights=tokens)
        for means in zip(*(figures.means for figures in found), strict=True)
    )
    values = [f.singular_values for f in found if f.singular_values is not None]
    several = found[0].several
    return Inspection(
        recording,
        coherence,
        ranks if several else None,
        np.quantile(np.concatenate(values), QUANTILES, axis=0) if values else None,
        survival(norms) if several else None,
        shares,
    )


class _Pass:
    """One window's rewrites: direction, gate β, what is erased (α) and value of every rewrite."""

    def __init__(self) -> None:
        self.embedding: Array | None = None
        self.directions: list[Array] = []
        self.betas: list[Array] = []
        self.alphas: list[Array] = []
        self.values: list[Array] = []
        self.ranks: list[Array] = []
        self.last: Rewrite | None = None

    def see(self, name: str, seen: Rewrite | Addition) -> None:
        assert isinstance(seen, Rewrite)
        for single in seen.singles():
            self._add(single)
        self.last = seen

    def _add(self, rewrite: Rewrite) -> None:
        state = finite(rows(rewrite.state, 2), len(self.ranks))
        if self.embedding is None:
            self.embedding = state
        self.directions.append(rows(rewrite.unit_direction(), 1))
        self.betas.append(rewrite.scale * rows(rewrite.gate, 0))
        self.alphas.append(rewrite.scale * rows(rewrite.alpha, 0))
        self.values.append(rows(rewrite.value, 1))
        self.ranks.append(spectra.effective_rank(state))

    def figures(self) -> Figures:
        assert self.embedding is not None
        assert self.last is not None
        directions = np.stack(self.directions, axis=1)  # (N, L, d)
        betas, alphas, values = (
            np.stack(given, axis=1) for given in (self.betas, self.alphas, self.values)
        )
        after = finite(rows(self.last.after(), 2), len(self.ranks))
        ranks = [*self.ranks, spectra.effective_rank(after)]
        left = spectra.write_survival(
            directions, betas, values, self.embedding, erase=alphas, mean=True
        )
        means = (
            spectra.coherence_matrix(directions),
            np.mean(ranks, axis=1),
            left.norms.T,  # [source, after]
            left.shares,
        )
        singular = spectra.product_singular_values(directions, alphas)
        return Figures(len(directions), means, singular)
