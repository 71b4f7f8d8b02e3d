"""Student's t, without SciPy, which the package does not need otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

HALVINGS = 60  # of an angle below π/2: to the last bits of a double


class Interval(NamedTuple):
    """A mean, and the ends of its confidence interval; both None for a single number."""

    mean: float
    low: float | None
    high: float | None


def interval(numbers: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of at least one number, with the interval mean ± t·s/√n of Student's t, n − 1 degrees
    of freedom and the sample's standard deviation s."""
    count = len(numbers)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Interval(mean, None, None)
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (count - 1)
    half = quantile(confidence, count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def quantile(confidence: float, degrees: int) -> float:
    """The t > 0 with P(|T| ≤ t) = confidence, in (0, 1), for Student's T with whole degrees ≥ 1."""
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| ≤ t) for t = √degrees · tan(angle): finite sums for whole degrees (Abramowitz and
    Stegun, 26.7.3 and 26.7.4)."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2 == 1
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= square * (power - 1) / power
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
