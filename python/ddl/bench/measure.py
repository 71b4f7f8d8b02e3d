"""Interleaved timing, ratios and their uncertainty, the correctness gate, reference copies."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .tables import progress

Timed = Callable[[], tuple[float, ...]]  # runs something once and returns the seconds it took
RESAMPLES = 1000


class RedGateError(AssertionError):
    """Two computations that must agree do not, so no time of either may be reported."""


def gate(
    pairs: Mapping[str, tuple[Tensor, Tensor]], tolerance: float, scales: Mapping[str, str] = {}
) -> float:
    """The largest rms error among pairs (actual, expected), relative to the rms of the expected.

    scales: name of a tensor → name of another one. The larger rms of the two is then its scale,
    because a sum over tokens may cancel. Raises RedGateError, naming the tensor, for an error above
    `tolerance`, a difference of shapes, or a number that is not finite.
    """
    worst = 0.0
    for name, (actual, expected) in pairs.items():
        if actual.shape != expected.shape:
            raise RedGateError(
                f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            )
        scale = max(_rms(expected), _rms(pairs[scales.get(name, name)][1]))
        difference = _rms(actual.double() - expected.double())
        error = difference / scale if scale > 0 else difference
        if not error <= tolerance:  # NaN is red as well
            raise RedGateError(
                f"{name}: rms error {error:.1e} of its scale, allowed {tolerance:.1e}"
            )
        worst = max(worst, error)
    return worst


def _rms(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()


def interleave(
    steps: Mapping[str, Timed], rounds: int, *, warmup: int = 2, what: str = ""
) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of every step, `rounds` tuples per name. All steps run once in every round.

    If something slows the machine for a while, it slows all steps alike. Each round starts with
    another step, and every second round runs in reverse order, so that no step always follows the
    same neighbour.
    """
    names = list(steps)
    for _ in range(warmup):
        for name in names:
            progress(f"{what}: warming up {name}")
            steps[name]()
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            progress(f"{what}: round {index + 1} of {rounds}")
            first = index % len(names)
            order = names[first:] + names[:first]
            for name in order if index % 2 == 0 else order[::-1]:
                seconds[name].append(steps[name]())
    finally:
        if collecting:
            gc.enable()
        progress("")
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Ratio of medians."""
    return statistics.median(numerator) / statistics.median(denominator)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """The central 95 % of `ratio` over resampled rounds (bootstrap; a round keeps its pair)."""
    pairs = torch.tensor([list(numerator), list(denominator)], dtype=torch.float64)  # (2, rounds)
    rounds = pairs.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    medians = pairs[:, drawn].quantile(0.5, dim=-1)  # (2, RESAMPLES)
    low, high = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


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
