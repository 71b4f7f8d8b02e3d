"""Interleaved timing, the comparison that allows it, reference copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddl.lab import timing
from ddl.lab.timing import Timed, ratio, ratio_interval

from .tables import progress

__all__ = [
    "MismatchError",
    "Timed",
    "compare",
    "copies",
    "gb_per_second",
    "interleave",
    "quartiles",
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


def quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def copies(like: Tensor) -> dict[str, Timed]:
    """Two copies of a tensor to time beside an operator. Each moves twice the tensor's bytes.

    "copy": `copy_` between allocated tensors, which measures the bandwidth. "clone": into a new
    tensor, which pays for fresh pages as every newly allocated output of an operator does.
    """
    source = like.detach().clone()
    target = torch.empty_like(source)

    def copy() -> tuple[float, ...]:
        started = time.perf_counter()
        target.copy_(source)
        return (time.perf_counter() - started,)

    def clone() -> tuple[float, ...]:
        started = time.perf_counter()
        made = source.clone()
        elapsed = time.perf_counter() - started
        del made  # only after the clock stopped
        return (elapsed,)

    return {"copy": copy, "clone": clone}


def gb_per_second(num_bytes: float, seconds: Sequence[float]) -> float:
    """10⁹ bytes per second at the median time."""
    return num_bytes / statistics.median(seconds) / 1e9
