"""A row of the result: one thing that was timed beside its baseline, in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import Clock
from .measure import gb_per_second, interleave, ratio, ratio_interval

Stages = Sequence[Callable[[], Any]]


@dataclass
class Row:
    """A measurement, whether its result was right, and its times. `red` says why it has none."""

    part: str
    what: str
    baseline: str
    red: str | None = None
    worst: float | None = None  # the largest error in the check, divided by its tolerance
    bytes: int | None = None  # that must move (traffic.py); None where that is not defined
    tokens: int | None = None  # that one call makes, in generation
    seconds: list[float] = field(default_factory=list)
    baseline_seconds: list[float] = field(default_factory=list)
    copy_gb_s: float | None = None  # of a copy in the same rounds

    @property
    def name(self) -> str:
        return f"{self.part} {self.what}"

    def to_json(self) -> dict[str, Any]:
        """The row as JSON types. A row that is red has no times."""
        made: dict[str, Any] = {
            "part": self.part,
            "what": self.what,
            "baseline": self.baseline,
            "gate": {"red": self.red, "worst": self.worst},
        }
        if self.red is not None or not self.seconds:
            return made
        made |= {
            "median": statistics.median(self.seconds),
            "p95": percentile_95(self.seconds),
            "baseline_median": statistics.median(self.baseline_seconds),
            "ratio": ratio(self.baseline_seconds, self.seconds),
            "interval": list(ratio_interval(self.baseline_seconds, self.seconds)),
            "copy_gb_s": self.copy_gb_s,
        }
        made["p95_over_baseline"] = made["p95"] / made["baseline_median"]
        if self.tokens is not None:
            made["tokens_per_second"] = self.tokens / made["median"]
        if self.bytes is not None and self.copy_gb_s:
            rate = gb_per_second(self.bytes, self.seconds)
            made |= {"bytes": self.bytes, "gb_s": rate, "of_copy": rate / self.copy_gb_s}
        return made | {"seconds": self.seconds, "baseline_seconds": self.baseline_seconds}


def percentile_95(seconds: Sequence[float]) -> float:
    """The 95th percentile, between the two nearest times."""
    if len(seconds) < 2:
        return seconds[0]
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def time_stages(
    stages: Mapping[str, Stages], clock: Clock, rounds: int, what: str
) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of the copy and of every stage, a tuple for each round, by name; interleaved."""
    if not stages or not rounds:
        return {}
    timed = {name: clock.timed(*each) for name, each in stages.items()}
    return interleave(timed, rounds, what=what)


def copy_rate(taken: Mapping[str, list[tuple[float, ...]]], clock: Clock) -> float:
    """GB/s of all copies of these rounds."""
    seconds = [times[0] for rounds in taken.values() for times in rounds]
    return gb_per_second(clock.copied_bytes, seconds)
