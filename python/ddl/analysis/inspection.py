"""Inspection: what the rewrites of a model do over depth, measured on text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ddl.errors import NEWER, InputError
from ddl.files import read_text
from ddl.nn.taps import Rewrite, Tap, installed
from ddl.recording import Recording, record
from ddl.recording.recorder import null_if_unknown
from ddl.recording.sublayers import evaluating, find_residuals

from . import spectra

__all__ = ["FILE", "Inspection", "inspect", "read_summary"]

FILE = "inspection.json"  # of `Inspection.summary`
FORMAT = 1
Array = npt.NDArray[np.float64]
QUANTILES = (0.1, 0.5, 0.9)


class Inspection(NamedTuple):
    """The measurements of `inspect`, for L sublayers; means over tokens unless said otherwise.

    A sublayer with several rewrites counts as several, as in `ddl.record`.

    recording: statistics of every rewrite.
    coherence: (L, L), |cos| between the directions of two sublayers at the same token.
    effective_rank: (L + 1,), of the state before each sublayer and after the last.
    singular_values: (3, min(L, d)), the tenth, fiftieth and ninetieth percentile over tokens of the
        singular values, in falling order, of the product of all rewrites' operators I − βk̂k̂ᵀ;
        all others are 1.
    survival: (L + 1, L + 1), the mean norm of what is left of source s after sublayer n, over its
        mean norm when it was written; NaN before. Source 0 is the embedding, source s the write of
        sublayer s; column 0 is before the first sublayer.
    shares: (L + 1,), each source's share of the last state, ⟨what is left, X⟩/|X|²; they sum to 1.
    """

    recording: Recording
    coherence: Array
    effective_rank: Array
    singular_values: Array
    survival: Array
    shares: Array

    def summary(self) -> dict[str, Any]:
        """Everything as JSON's values; null for what is unknown."""
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
            **{name: null_if_unknown(array.tolist()) for name, array in arrays.items()},
        }


def read_summary(file: Path) -> dict[str, Any]:
    """The summary in an inspection.json; only its format is checked.

    Raises OSError if the file cannot be read, ValueError if it is not JSON or of another format.
    """
    try:
        summary = json.loads(read_text(file))
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
    """Run `model`, in evaluation mode, on token windows (B, T) and measure what its rewrites do.

    Memory: the directions of one window, 4·L·B·T·d bytes, and a few states. progress: called after
    every window.

    Raises:
        TypeError, ValueError: as `ddl.record`; `windows` is empty; a state is not finite.
    """
    residuals = find_residuals(model)
    sums = _Sums()
    with evaluating(model), record(model) as recording:
        for idx in windows:
            captured = _Pass()
            taps = [(residual, captured.tap()) for residual in residuals.values()]
            with installed(taps):
                model(idx)
            sums.add(captured)
            if progress is not None:
                progress()
    if not sums.tokens:
        raise ValueError("`windows` must have at least one window, got none")
    return sums.inspection(recording)


class _Pass:
    """One window's rewrites: directions, gates and values of every rewrite."""

    def __init__(self) -> None:
        self.embedding: Array | None = None
        self.directions: list[Array] = []
        self.gates: list[Array] = []
        self.values: list[Array] = []
        self.ranks: list[Array] = []
        self.last: Rewrite | None = None

    def tap(self) -> Tap:
        def capture(rewrite: Rewrite) -> Rewrite:
            for single in rewrite.singles():
                self._add(single)
            self.last = rewrite
            return rewrite

        return capture

    def _add(self, rewrite: Rewrite) -> None:
        state = _finite(_rows(rewrite.state, 2), len(self.ranks))
        if self.embedding is None:
            self.embedding = state
        self.directions.append(_rows(rewrite.unit_direction(), 1))
        self.gates.append(_rows(rewrite.gate, 0))
        self.values.append(_rows(rewrite.value, 1))
        self.ranks.append(spectra.effective_rank(state))

    def final_state(self) -> Array:
        assert self.last is not None
        return _finite(_rows(self.last.after(), 2), len(self.ranks))


def _finite(state: Array, sublayers: int) -> Array:
    """The states after so many sublayers; InputError if one is not finite."""
    if not np.isfinite(state).all():
        got = f"NaN or infinity after {sublayers} sublayers, as of training that has diverged"
        raise InputError(f"`model` must have finite states, got {got}")
    return state


def _rows(x: Tensor, own: int) -> Array:
    """All tokens (N, …) of a tensor (…, …) with `own` axes of its own, as a numpy array."""
    x = x if x.dtype == torch.float64 else x.float()
    array: Array = x.flatten(0, x.ndim - own - 1).cpu().numpy()
    return array


class _Sums:
    """Sums over windows."""

    def __init__(self) -> None:
        self.tokens = 0
        self.coherence: Array = np.zeros(())
        self.ranks: Array = np.zeros(())
        self.norms: Array = np.zeros(())
        self.shares: Array = np.zeros(())
        self.singular_values: list[Array] = []

    def add(self, captured: _Pass) -> None:
        assert captured.embedding is not None
        directions = np.stack(captured.directions, axis=1)  # (N, L, d)
        gates = np.stack(captured.gates, axis=1)
        values = np.stack(captured.values, axis=1)
        ranks = [*captured.ranks, spectra.effective_rank(captured.final_state())]
        tokens = len(directions)
        survival = spectra.write_survival(directions, gates, values, captured.embedding, mean=True)
        self.tokens += tokens
        self.coherence = self.coherence + tokens * spectra.coherence_matrix(directions)
        self.ranks = self.ranks + np.sum(ranks, axis=1)
        self.norms = self.norms + tokens * survival.norms.T  # [source, after]
        self.shares = self.shares + tokens * survival.shares
        self.singular_values.append(spectra.product_singular_values(directions, gates))

    def inspection(self, recording: Recording) -> Inspection:
        written = np.diag(self.norms)[:, None]
        with np.errstate(invalid="ignore"):  # nothing is left of what was never written: NaN
            survival = np.where(np.tri(len(written)).T > 0, self.norms / written, np.nan)
        values = np.quantile(np.concatenate(self.singular_values), QUANTILES, axis=0)
        return Inspection(
            recording,
            self.coherence / self.tokens,
            self.ranks / self.tokens,
            values,
            survival,
            self.shares / self.tokens,
        )
