"""Tiers of the tests: which case is in which, and that the fast one stays fast."""

from __future__ import annotations

import pytest

from tests.support import tiers

SLOW = {"a.py::x": 3.0, "a.py::y[1]": 0.4, "a.py::y[2]": 0.4, "b.py::z": 9.0}
NAMES = ["a.py::fast", *SLOW]


def test_a_file_has_its_cheapest_slow_case_in_the_fast_tier_unless_that_is_dear():
    fast = tiers.in_tier("fast", NAMES, SLOW)
    assert [name for name, kept in zip(NAMES, fast, strict=True) if kept] == [
        "a.py::fast",
        "a.py::y[1]",
    ]


def test_every_case_is_in_one_tier():
    fast, slow = (tiers.in_tier(tier, NAMES, SLOW) for tier in ("fast", "slow"))
    assert [one != other for one, other in zip(fast, slow, strict=True)] == [True] * len(NAMES)


def test_slow_cases_are_recorded_and_named(pytester: pytest.Pytester, monkeypatch):
    monkeypatch.setattr(tiers, "RECORD", pytester.path / "durations.json")
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        test_it="""
        import time

        def test_quick():
            pass

        def test_slow():
            time.sleep(0.2)

        def test_late():
            time.sleep(0.6)
        """
    )
    options = ("-q", "-p", "no:cacheprovider")
    pytester.runpytest(*options, "--record-durations").assert_outcomes(passed=3)
    slow = tiers.recorded()
    assert slow.keys() == {"test_it.py::test_slow", "test_it.py::test_late"}
    pytester.runpytest(*options, "--tier", "slow").assert_outcomes(passed=1, deselected=2)
    tiers.RECORD.write_text("{}")
    result = pytester.runpytest(*options, "--tier", "fast", "--record-durations")
    result.stdout.fnmatch_lines(["SLOW for the fast tier, 0.6* s: test_it.py::test_late"])
    assert tiers.recorded().keys() == {"test_it.py::test_late"}


def test_a_record_of_tests_that_are_gone_is_red():
    assert tiers.stale(["tests"], SLOW, ["a.py::x", "b.py::z"]) == ["a.py::y[1]", "a.py::y[2]"]
    assert tiers.stale(["tests/nn"], SLOW, []) == []
