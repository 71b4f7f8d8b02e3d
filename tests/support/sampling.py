"""Large tables of cases, sampled: `make test` runs a part of them, `make test-all` every one.

`@pytest.mark.table` on a parametrized test asks for a sample in which every pair of parameter
values still occurs, `@pytest.mark.table(1)` for one in which every value does.
`@pytest.mark.exhaustive` leaves a test, or one case, to `make test-all`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

MARKERS = (
    "table(together=2): run a sample of the cases, with every pair of values; all with --all",
    "exhaustive: run with --all only",
)
Case = Mapping[str, object]  # names of parameters → values
Combination = tuple[tuple[str, str], ...]


def covering_sample(cases: Sequence[Case], together: int) -> set[int]:
    """Numbers of cases in which every combination of `together` parameters' values still occurs.

    Greedy: the case with the most combinations that are still missing comes next, the first of
    equals, so that the sample is the same everywhere.
    """
    covers: dict[int, frozenset[Combination]] = {
        number: frozenset(combinations(_values(case), min(together, len(case))))
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
    """The collected tests that a run without --all does not need."""
    tables: dict[tuple[str, int], list[pytest.Function]] = {}
    out = set()
    for item in items:
        table = item.get_closest_marker("table")
        if item.get_closest_marker("exhaustive"):
            out.add(item)
        elif table and isinstance(item, pytest.Function):
            together = table.args[0] if table.args else 2
            tables.setdefault((item.nodeid.partition("[")[0], together), []).append(item)
    for (_, together), rows in tables.items():
        chosen = covering_sample([row.callspec.params for row in rows], together)
        out.update(row for number, row in enumerate(rows) if number not in chosen)
    return out
