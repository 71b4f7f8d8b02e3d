"""Times that can be compared: interleaved rounds, ratios of medians and how sure they are."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Timed = Callable[[], tuple[float, ...]]  # runs something once and returns the seconds it took
RESAMPLES = 1000


def interleave(
    steps: Mapping[str, Timed],
    rounds: int,
    *,
    warmup: int = 2,
    progress: Callable[[str], object] = str,
) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of every step, `rounds` tuples per name. All steps run once in every round.

    If something slows the machine for a while, it slows all steps alike. Each round starts with
    another step, and every second round runs in reverse order, so that no step always follows the
    same neighbour. progress: called with what is done next, and with "" at the end.
    """
    names = list(steps)
    for _ in range(warmup):
        for name in names:
            progress(f"warming up {name}")
            steps[name]()
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            progress(f"round {index + 1} of {rounds}")
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
