"""Student's t against printed tables, SciPy and simulation."""

from __future__ import annotations

import random

import pytest

from ddl.lab.analysis.student import interval, quantile

# Two-sided 95 % and 99 %, as every textbook prints them.
TABLE = {
    1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604),
    5: (2.571, 4.032), 9: (2.262, 3.250), 10: (2.228, 3.169), 30: (2.042, 2.750),
    120: (1.980, 2.617), 100_000: (1.960, 2.576),
}  # fmt: skip


@pytest.mark.parametrize("degrees", TABLE)
def test_the_quantiles_are_those_of_the_tables(degrees: int) -> None:
    for confidence, expected in zip((0.95, 0.99), TABLE[degrees], strict=True):
        assert quantile(confidence, degrees) == pytest.approx(expected, abs=5e-4)


def test_the_quantiles_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 8, 31, 500):
        for confidence in (0.5, 0.9, 0.95, 0.999):
            expected = stats.t.ppf((1 + confidence) / 2, degrees)
            assert quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


def test_an_interval_by_hand() -> None:
    """Mean 2, standard deviation 1, n = 3: 2 ± 4.303 / √3."""
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert (low, high) == (pytest.approx(-0.4842, abs=1e-3), pytest.approx(4.4842, abs=1e-3))


def test_one_number_has_no_interval() -> None:
    assert interval([0.25]) == (0.25, None, None)


def test_equal_numbers_have_an_interval_of_no_width() -> None:
    assert interval([0.5, 0.5]) == (0.5, 0.5, 0.5)


def test_95_of_100_intervals_hold_the_mean() -> None:
    """With the normal distribution's 1.96 in place of t it would be 81 of 100 for n = 3."""
    rng, held = random.Random(0), 0
    half = quantile(0.95, 2)
    for _ in range(2000):
        mean, low, _high = interval([rng.gauss(0, 1) for _ in range(3)])
        assert low is not None
        held += abs(mean) <= mean - low
    assert half == pytest.approx(4.3027, abs=1e-4)
    assert 0.935 < held / 2000 < 0.965
