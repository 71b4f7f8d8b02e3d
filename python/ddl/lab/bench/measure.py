"""Interleaved timing, and the comparison that allows it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from ddl.lab import timing
from ddl.lab.timing import Timed, ratio, ratio_interval

from .tables import progress

__all__ = [
    "MismatchError",
    "Timed",
    "compare",
    "gb_per_second",
    "interleave",
    "ratio",
    "ratio_interval",
]


class MismatchError(AssertionError):
    """Two computations that must agree do not, so no time of either may be reported."""


def compare(
    pairs: Mapping[str, tuple[Tensor, Tensor]], tolerance: float, scales: Mapping[str, str] = {}
) -> float:
    """The largest rms error among pairs (actual, expected), relative to the rms of the expected.

    scales: name of a tensor → name of another one. The larger rms of the two is then its scale,
    because a sum over tokens may cancel. Raises MismatchError, naming the tensor, for an error
    above `tolerance`, a difference of shapes, or a number that is not finite.
    """
    worst = 0.0
    for name, (actual, expected) in pairs.items():
        if actual.shape != expected.shape:
            raise MismatchError(
                f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            )
        scale = max(_rms(expected), _rms(pairs[scales.get(name, name)][1]))
        difference = _rms(actual.double() - expected.double())
        error = difference / scale if scale > 0 else difference
        if not error <= tolerance:  # also if it is NaN
            raise MismatchError(
                f"{name}: rms error {error:.1e} of its scale, allowed {tolerance:.1e}"
            )
        worst = max(worst, error)
    return worst


def _rms(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()


def interleave(
    steps: Mapping[str, Timed], rounds: int, *, warmup: int = 2, what: str = ""
) -> dict[str, list[tuple[float, ...]]]:
    """`ddl.lab.timing.interleave`, which says in the terminal how far it is; what: is measured."""

    def say(text: str) -> None:
        progress(f"{what}: {text}" if text else "")

    return timing.interleave(steps, rounds, warmup=warmup, progress=say)


def gb_per_second(num_bytes: float, seconds: Sequence[float]) -> float:
    """10⁹ bytes per second at the median time."""
    return num_bytes / statistics.median(seconds) / 1e9
