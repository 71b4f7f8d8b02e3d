"""`ddl.record`: statistics of every rewrite that a model does, or of every addition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite, installed

from .moments import Moments
from .quantities import (
    ADDED,
    BINS,
    KEPT,
    PER_CHANNEL,
    QUANTITIES,
    REGIMES,
    bins,
    measure,
    measure_addition,
)
from .sublayers import has_rewrites, hooks_of

__all__ = ["Recording", "Statistics", "record"]


class Statistics(NamedTuple):
    """A quantity's statistics over tokens, per sublayer, in order of execution.

    mean, std, min, max: (L,) for L sublayers, (L, m) for a quantity with one number per value
    channel; float64, on the CPU. A sublayer without tokens has NaN.
    """

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor


class Recording:
    """Statistics of all that `ddl.record` has seen so far.

    sublayers: names of the residuals, in order of execution; none before the first pass, and then
    statistics have no rows. One with n > 1 rewrites stands there n times, with the numbers
    0 … n − 1 of its rewrites behind its name: whatever has a row for each sublayer has one for each
    rewrite. Statistics leave out padding.
    quantities: those that the model has: QUANTITIES of one with rewrites, ADDED of another.
    """

    def __init__(
        self, tokens: Sequence[str] = (), quantities: Sequence[str] = tuple(QUANTITIES)
    ) -> None:
        self.sublayers: list[str] = []
        self.quantities = tuple(quantities)
        self._wanted = tuple(dict.fromkeys(tokens))
        self._moments: dict[tuple[str, str], Moments] = {}
        self._counts: dict[str, Tensor] = {}  # histogram of the eigenvalues of each sublayer
        self._kept: dict[tuple[str, str], list[Tensor]] = {}
        self._last: Tensor | None = None  # k̂ of the sublayer before

    def __len__(self) -> int:
        """Number of tokens that the first sublayer has seen."""
        return self._count_of(self.sublayers[0]) if self.sublayers else 0

    def __repr__(self) -> str:
        return (
            f"<Recording: sublayers={len(self.sublayers)}, tokens={len(self)}, kept={self._wanted}>"
        )

    def statistics(self, quantity: str) -> Statistics:
        """Statistics of one of `quantities`.

        Raises ValueError for another name.
        """
        if quantity not in self.quantities:
            expected = f"one of {', '.join(self.quantities)}"
            raise ValueError(f"`quantity` must be {expected}, got {quantity!r}")
        of = [self._moments.get((name, quantity)) for name in self.sublayers]
        width = max((len(moments.mean) for moments in of if moments), default=1)
        unknown = torch.full((width,), torch.nan, dtype=torch.float64)

        def rows(field: str) -> Tensor:
            found = [unknown if m is None else getattr(m, field).cpu() for m in of]
            stacked = torch.stack(found) if found else unknown.new_empty(0, width)
            return stacked if quantity in PER_CHANNEL else stacked.squeeze(-1)

        return Statistics(rows("mean"), rows("std"), rows("min"), rows("max"))

    def eigenvalue_counts(self) -> Tensor:
        """Histogram of λ = 1 − sα|k̂|² in 40 equal bins over [−1, 1] → (L, 40) int64.

        Eigenvalues outside, which `branch_scale` s outside [0, 1] can give, are in the outermost
        bins. Those that are NaN, as of a model whose training has diverged, are in none. Raises
        ValueError for a model without rewrites, as `regimes` does.
        """
        if "eigenvalue" not in self.quantities:
            raise ValueError(
                "the model must have rewrites, which have eigenvalues, got one without"
            )
        counts = [self._counts[name].cpu() for name in self.sublayers]
        return torch.stack(counts) if counts else torch.zeros(0, BINS, dtype=torch.int64)

    def regimes(self) -> dict[str, Tensor]:
        """The share of tokens in each of `ddl.recording.REGIMES`, (L,) float64.

        They sum to 1, less the share of tokens whose eigenvalue is NaN. An eigenvalue above 1
        counts as near-identity, one below −1 as reflection.
        """
        counts = self.eigenvalue_counts()
        edge = {bound: round((bound + 1) * BINS / 2) for pair in REGIMES.values() for bound in pair}
        tokens = torch.tensor([self._count_of(name) for name in self.sublayers]).double()
        return {
            name: counts[:, edge[lower] : edge[upper]].sum(1) / tokens
            for name, (lower, upper) in REGIMES.items()
        }

    def tokens(self, quantity: str) -> Tensor:
        """A quantity that was kept for every token: (L, B, T, …), float32 or float64, on the CPU.

        The last axes are the quantity's own: m for one per value channel, d for a direction, (d, m)
        for a state; none for the others. B counts the sequences of all forward passes, one pass
        after the other. "coherence" has L − 1 rows, because nothing comes before the first
        sublayer.

        Raises ValueError if `tokens` of `ddl.record` does not name it, if the passes differ in
        length, or if a sublayer ran more often than another.
        """
        if quantity not in self._wanted:
            expected = f"among the `tokens` of record, {', '.join(self._wanted) or 'none'}"
            raise ValueError(f"`quantity` must be {expected}, got {quantity!r}")
        shapes = {
            tuple(t.shape[1:]) for name in self.sublayers for t in self._parts(name, quantity)
        }
        if len(shapes) > 1:
            got = ", ".join(map(str, sorted(shapes)))
            raise ValueError(
                f"`tokens` needs passes of one length, got the shapes {got} per row: record each"
                " pass alone, or use `statistics`"
            )
        rows = [torch.cat(self._parts(name, quantity)) for name in self._recorded(quantity)]
        if len({len(row) for row in rows}) > 1:
            got = ", ".join(str(len(row)) for row in rows)
            raise ValueError(
                f"`tokens` needs sublayers that run equally often, got {got} rows: one is shared,"
                " or was left out in a pass"
            )
        return torch.stack(rows) if rows else torch.empty(0)

    def summary(self) -> dict[str, Any]:
        """All statistics as JSON's values: for each sublayer its name and quantities, and the
        regimes of rewrites."""
        statistics = {name: self.statistics(name) for name in self.quantities}
        found: list[dict[str, Any]] = [
            {
                "name": sublayer,
                **{
                    quantity: {
                        field: null_if_unknown(all_of[i].tolist())
                        for field, all_of in s._asdict().items()
                    }
                    for quantity, s in statistics.items()
                },
            }
            for i, sublayer in enumerate(self.sublayers)
        ]
        if "eigenvalue" in self.quantities:
            regimes, counts = self.regimes(), self.eigenvalue_counts()
            for i, made in enumerate(found):
                made["regimes"] = {name: float(shares[i]) for name, shares in regimes.items()}
                made["eigenvalue_counts"] = counts[i].tolist()
        return {"tokens": len(self), "sublayers": found}

    def _add(self, sublayer: str, seen: Rewrite | Addition) -> None:
        if sublayer not in self.sublayers:
            self.sublayers.append(sublayer)
        if isinstance(seen, Rewrite):
            measured = measure(seen, self._before(sublayer, seen.direction))
        else:
            measured = measure_addition(seen, self._before(sublayer, seen.written))
        self._last = measured["direction"]
        counted = slice(None) if seen.keep is None else seen.keep.bool()
        for quantity in self.quantities:
            if quantity in measured:
                self._count(sublayer, quantity, measured[quantity], counted)
        if "eigenvalue" in measured:
            found = bins(measured["eigenvalue"][counted])
            self._counts[sublayer] = self._counts.get(sublayer, 0) + found
        for quantity in self._wanted:
            if quantity in measured:
                kept = measured[quantity].detach().cpu()
                self._kept.setdefault((sublayer, quantity), []).append(kept)

    def _before(self, sublayer: str, direction: Tensor) -> Tensor | None:
        """The direction of the sublayer before in the same pass; None for the first."""
        last = self._last
        if last is None or sublayer == self.sublayers[0]:
            return None
        return last if last.shape == direction.shape else None

    def _count(self, sublayer: str, quantity: str, values: Tensor, counted: Any) -> None:
        chosen = values[counted]
        samples = chosen.reshape(-1, values.shape[-1] if quantity in PER_CHANNEL else 1)
        if len(samples) == 0:
            return
        moments, key = Moments.of(samples), (sublayer, quantity)
        self._moments[key] = self._moments[key].join(moments) if key in self._moments else moments

    def _count_of(self, sublayer: str) -> int:
        """Number of tokens that a sublayer has seen."""
        found = self._moments.get((sublayer, "write_norm"))
        return 0 if found is None else found.count

    def _parts(self, sublayer: str, quantity: str) -> list[Tensor]:
        return self._kept.get((sublayer, quantity), [])

    def _recorded(self, quantity: str) -> list[str]:
        return [name for name in self.sublayers if self._parts(name, quantity)]


def null_if_unknown(numbers: Any) -> Any:
    """A number, or nested lists of numbers, as JSON's values: null for NaN and ±∞."""
    if isinstance(numbers, list):
        return [null_if_unknown(number) for number in numbers]
    return numbers if math.isfinite(numbers) else None


@contextmanager
def record(model: nn.Module, *, tokens: Sequence[str] = ()) -> Iterator[Recording]:
    """Record what every rewrite does while `model` runs.

        with ddl.record(model) as recording:
            model(idx)
        recording.statistics("beta").mean  # (L,), one per sublayer

    Works on every model with DeltaResiduals: DeltaStream, DeltaResidual by hand, a nanoGPT from
    `ddl.nanogpt.convert`, ddl's GPT and Hugging Face's classes. Of a baseline among the last two it
    records what each sublayer adds: the quantities of `ddl.recording.ADDED`.
    Statistics are accumulated as the tokens pass, on their device, and nothing else is kept.
    Gradients, random numbers and results stay as they are. Outside the context the model runs as if
    this did not exist; inside, compiled models run uncompiled, and each rewrite is done once more.
    With activation checkpointing the backward runs each rewrite again, which counts its tokens
    twice.

    Args:
        model: the model, also if torch.compile or DistributedDataParallel wraps it.
        tokens: quantities to keep for every token besides: names of `ddl.recording.QUANTITIES` (or
            ADDED) or `ddl.recording.KEPT` ("direction", "state", "state_after").
            `recording.tokens(name)` returns them; a state takes 4·d·m bytes per token and sublayer.

    Raises:
        TypeError, ValueError: `model` has neither a DeltaResidual nor a stream of ddl's GPT; a name
            in `tokens` is unknown.
    """
    quantities = QUANTITIES if has_rewrites(model) else ADDED
    known = [*quantities, *KEPT]
    if isinstance(tokens, str):
        tokens = (tokens,)
    for name in tokens:
        if name not in known:
            raise ValueError(f"`tokens` must be among {', '.join(known)}, got {name!r}")
    recording = Recording(tokens, tuple(quantities))

    @torch.no_grad()
    def see(name: str, seen: Rewrite | Addition) -> None:
        if isinstance(seen, Addition) or seen.is_single:
            recording._add(name, seen)
        else:
            for number, single in enumerate(seen.singles()):
                recording._add(f"{name}.{number}", single)

    with installed(hooks_of(model, see)):
        yield recording
