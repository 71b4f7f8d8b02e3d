"""Samples of large parameter tables: `make test` runs a sample, `make test-all` every case.

`@pytest.mark.table` on a parametrized test runs a sample in which every pair of parameter values
still occurs; `@pytest.mark.table(1)` one in which every value does, and `@pytest.mark.table(0)` the
first case alone. `@pytest.mark.exhaustive` leaves a test, or one case, to `make test-all`, and
`sampled` is for tests that another file imports to run them on something slower.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

MARKERS = (
    "table(strength=2): run a sample of the cases, with every pair of values; all with --all",
    "exhaustive: run with --all only",
)
Case = Mapping[str, object]  # names of parameters → values
Combination = tuple[tuple[str, str], ...]


def few(values: Sequence[str], *usual: str) -> list[Any]:
    """The values of a parameter, of which a run without --all has the usual ones."""
    return [
        pytest.param(value, marks=() if value in usual else pytest.mark.exhaustive)
        for value in values
    ]


def sampled(test: Callable[..., None], strength: int = 2) -> Callable[..., None]:
    """The same test with `@pytest.mark.table(strength)`; the one given stays as it is."""
    assert isinstance(test, types.FunctionType)
    same = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    same.__dict__.update(test.__dict__)
    return pytest.mark.table(strength)(same)


def covering_sample(cases: Sequence[Case], strength: int) -> set[int]:
    """Return case numbers such that every value combination of `strength` parameters still occurs.

    Greedy: the next case has the most missing combinations. Of equals it is the first, so that the
    sample is the same everywhere.
    """
    covers: dict[int, frozenset[Combination]] = {
        number: frozenset(combinations(_values(case), min(strength, len(case))))
        for number, case in enumerate(cases)
    }
    missing = set().union(*covers.values())
    chosen = set()
    while missing:
        best = max(covers, key=lambda number: len(covers[number] & missing))
        chosen.add(best)
        missing -= covers.pop(best)
    return chosen


def _values(case: Case) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in case.items())


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the collected tests that a run without --all skips."""
    tables: dict[tuple[str, int], list[pytest.Function]] = {}
    out = set()
    for item in items:
        table = item.get_closest_marker("table")
        if item.get_closest_marker("exhaustive"):
            out.add(item)
        elif table and isinstance(item, pytest.Function):
            strength = table.args[0] if table.args else 2
            tables.setdefault((item.nodeid.partition("[")[0], strength), []).append(item)
    for (_, strength), rows in tables.items():
        chosen = covering_sample([row.callspec.params for row in rows], strength)
        out.update(row for number, row in enumerate(rows) if number not in chosen)
    return out
