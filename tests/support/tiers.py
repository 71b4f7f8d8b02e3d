"""Tiers of the tests by what they cost: `make test` is the fast one, `make test-slow` the rest.

tests/durations.json has the seconds of every case that takes more than `FAST`, and
`make durations` records it. The fast tier has all other cases, and of each file of tests the
cheapest of its slow ones, up to `DEAREST`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

FAST = 0.15  # seconds
DEAREST = 0.5  # seconds of a case in the fast tier
RECORD = Path(__file__).parents[1] / "durations.json"


def recorded() -> dict[str, float]:
    """Seconds of the slow cases."""
    seconds: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return seconds


def representatives(seconds: Mapping[str, float]) -> set[str]:
    """Of each file the cheapest slow case, up to `DEAREST`; of equals the first by name."""
    cheapest: dict[str, tuple[float, str]] = {}
    for name, taken in seconds.items():
        file = name.partition("::")[0]
        cheapest[file] = min(cheapest.get(file, (taken, name)), (taken, name))
    return {name for taken, name in cheapest.values() if taken <= DEAREST}


def in_tier(tier: str, names: Sequence[str], seconds: Mapping[str, float]) -> list[bool]:
    """Whether each case is in a tier, "fast" or "slow"."""
    chosen = representatives(seconds)
    fast = [name not in seconds or name in chosen for name in names]
    return fast if tier == "fast" else [not one for one in fast]


def stale(
    arguments: Sequence[str], seconds: Mapping[str, float], names: Collection[str]
) -> list[str]:
    """Recorded cases that are gone. arguments: of pytest; only whole runs, of "tests", can tell."""
    return sorted(seconds.keys() - set(names)) if list(arguments) == ["tests"] else []


class Durations:
    """A plugin that adds up what each case takes, names those that are slow for the fast tier, and
    records them if that is asked for.

    Whoever comes first in a file pays for what its cases share. So `make durations` records both
    tiers, and then the fast one by itself, which adds the cases that now come first.
    """

    def __init__(self, tier: str | None, *, record: bool) -> None:
        self.tier, self.record = tier, record
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def late(self, limit: float) -> dict[str, float]:
        return {name: round(taken, 2) for name, taken in self.seconds.items() if taken > limit}

    def pytest_sessionfinish(self) -> None:
        if not self.record:
            return
        slow = recorded() | self.late(DEAREST) if self.tier == "fast" else self.late(FAST)
        text = json.dumps(dict(sorted(slow.items())), indent=0, ensure_ascii=False)
        RECORD.write_text(text + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        late = sorted(self.late(DEAREST).items()) if self.tier == "fast" else []
        for name, taken in late:
            terminalreporter.write_line(f"SLOW for the fast tier, {taken:.2f} s: {name}")
