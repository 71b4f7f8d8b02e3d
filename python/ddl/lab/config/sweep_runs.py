"""The runs of a sweep. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .training import TrainConfig

__all__ = ["Sweep", "SweepRun"]


class SweepRun(NamedTuple):
    """One run of a sweep.

    name: of its directory. variant: the name without the seed. config: its options; `out` is the
    directory, and `resume` is "auto".
    """

    name: str
    variant: str
    config: TrainConfig


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in the order of training: every variant with the first seed, then with
    the second and so on, so that an unfinished sweep already compares all variants.
    """

    out: Path
    runs: tuple[SweepRun, ...]

    def by_variant(self) -> list[SweepRun]:
        """The runs in the order of the variants, and of the seeds within each."""
        order = list(dict.fromkeys(run.variant for run in self.runs))
        return sorted(self.runs, key=lambda run: order.index(run.variant))
