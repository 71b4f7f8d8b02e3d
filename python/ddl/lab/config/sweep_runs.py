"""The runs of a sweep, and the steps that make their costs equal. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from .training import TrainConfig

__all__ = ["Equal", "Sweep", "SweepRun"]

Equal = Literal["flops", "seconds"]


class SweepRun(NamedTuple):
    """One run of a sweep.

    name: of its directory. variant: the name without the seed. config: its options; `out` is the
    directory, and `resume` is "auto". baseline: the first variant with the same listed options.
    """

    name: str
    variant: str
    config: TrainConfig
    baseline: str


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in the order of training: every variant with the first seed, then with
    the second and so on, so that an unfinished sweep already compares all variants.

    equal: the cost that all variants share with their baseline. Steps of equal FLOPs are set; those
    of equal seconds have to be measured, and given to `with_costs`.
    """

    out: Path
    runs: tuple[SweepRun, ...]
    equal: Equal | None = None

    def with_costs(self, costs: Mapping[str, float]) -> Sweep:
        """The sweep with as many steps in each run as cost most nearly what its baseline's do.

        costs: of a step, by variant, in any unit.
        """
        steps = {run.variant: run.config.steps for run in self.runs}
        return replace(self, runs=tuple(_with_steps(run, steps, costs) for run in self.runs))

    def by_variant(self) -> list[SweepRun]:
        """The runs in the order of the variants, and of the seeds within each."""
        order = list(dict.fromkeys(run.variant for run in self.runs))
        return sorted(self.runs, key=lambda run: order.index(run.variant))


def _with_steps(run: SweepRun, steps: Mapping[str, int], costs: Mapping[str, float]) -> SweepRun:
    """The run with the steps that cost what those of its baseline do."""
    if run.variant == run.baseline:
        return run
    ratio = costs[run.baseline] / costs[run.variant]
    number = max(1, round(steps[run.baseline] * ratio))
    return run._replace(config=replace(run.config, steps=number))
