"""Train the runs of a sweep, all in turn or one of them, and resume them after a stop."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ddl.errors import DivergedError, InputError
from ddl.lab.config.sweeps import Sweep, SweepRun
from ddl.lab.output import print_line

from .initial import Load
from .launch import train
from .listing import write_listing
from .resume import find_start


class State(NamedTuple):
    """How far a run is. step: of its last checkpoint, 0 without one. finished: nothing is left."""

    step: int
    finished: bool


class Swept(NamedTuple):
    """Result of a sweep.

    status: the exit status: 0 if every run that was asked for is finished, 1 if one failed,
    128 + its number if a signal ended it. failed: the sentence of each run that failed, by name.
    """

    status: int
    failed: dict[str, str]


def state_of(run: SweepRun) -> State:
    """How far a run is. Raises InputError if it cannot be resumed with these options."""
    start = find_start(run.config)
    if start is None or start.manifest is None:
        return State(0, False)
    manifest = start.manifest
    # A run that a signal stops in its last step has a checkpoint without its evaluation.
    done = manifest.step >= run.config.steps and manifest.validation_loss is not None
    return State(manifest.step, done)


def train_sweep(
    sweep: Sweep, console: Console, *, index: int | None = None, load: Load | None = None
) -> Swept:
    """Train the runs of a sweep that are not finished, or only the one with this index.

    A run that was stopped is resumed. A signal ends the current run after its step and a
    checkpoint, and then the sweep. If a run diverges or cannot be trained, because its options do
    not fit the data or another process trains it, that is reported and the next run begins. load:
    as in `train`.
    """
    runs = sweep.runs if index is None else (_chosen(sweep, index),)
    write_listing(sweep)
    failed: dict[str, str] = {}
    states: dict[str, State] = {}
    for run in runs:
        with suppress(InputError):  # raised again, and reported, when the run's turn comes
            states[run.name] = state_of(run)
    finished = sum(state.finished for state in states.values())
    if finished:
        print_line(console, f"{_runs(finished)} of {len(runs)} finished before")
    pace = Pace()
    left = [run for run in runs if not (run.name in states and states[run.name].finished)]
    for number, run in enumerate(left):
        step = states[run.name].step if run.name in states else 0
        rest = pace.estimate([(r, states.get(r.name, State(0, False)).step) for r in left[number:]])
        _announce(console, run, number + 1 + len(runs) - len(left), len(runs), step, rest)
        started = time.monotonic()
        try:
            reset_peak_memory()
            status = train(run.config, console, load=load).status
        except (InputError, DivergedError) as error:
            failed[run.name] = str(error)
            print_line(console, f"{run.name} failed: {error}")
            continue
        if status:
            print_line(console, "The sweep has stopped; the same command goes on with it.")
            return Swept(status, failed)
        pace.add(run, run.config.steps - step, time.monotonic() - started)
    if failed:
        names = ", ".join(failed)
        print_line(console, f"{_runs(len(failed))} of {len(runs)} failed: {names}")
    return Swept(1 if failed else 0, failed)


def _chosen(sweep: Sweep, index: int) -> SweepRun:
    last = len(sweep.runs) - 1
    if index > last:
        raise InputError("index", f"be from 0 to {last}, the runs of the sweep", index)
    return sweep.runs[index]


def reset_peak_memory() -> None:
    """Reset the peak memory, so that the next run records its own and not that of earlier runs.

    A GPU's peak begins at 0, a process's on Linux at what it holds now. Elsewhere the peak of a
    process cannot be reset.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size


class Pace:
    """Seconds per token of the runs that were trained so far, to estimate the time of others."""

    def __init__(self) -> None:
        self._measured: dict[str, tuple[float, float]] = {}  # variant → seconds, tokens

    def add(self, run: SweepRun, steps: int, seconds: float) -> None:
        """Add a run that took this long for so many steps."""
        spent, tokens = self._measured.get(run.variant, (0.0, 0.0))
        self._measured[run.variant] = (spent + seconds, tokens + steps * run.config.tokens_per_step)

    def estimate(self, left: Sequence[tuple[SweepRun, int]]) -> float | None:
        """Seconds that these runs still take, each from its step on; None before a run is done.

        A run is estimated at the pace of its variant, or at the mean pace if no run of that
        variant is done.
        """
        known = {v: seconds / tokens for v, (seconds, tokens) in self._measured.items() if tokens}
        if not known:
            return None
        mean = sum(known.values()) / len(known)
        return sum(
            (run.config.steps - step) * run.config.tokens_per_step * known.get(run.variant, mean)
            for run, step in left
        )


def _announce(
    console: Console, run: SweepRun, number: int, count: int, step: int, rest: float | None
) -> None:
    parts = [f"Run {number} of {count}: {run.name}"]
    parts += [f"goes on after step {step}"] if step else []
    parts += [f"{duration(rest)} to the end of the sweep"] if rest is not None else []
    print_line(console, ", ".join(parts))


def duration(seconds: float) -> str:
    """About how long, in words: "about 3 minutes"."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * size:
            return f"about {round(seconds / size)} {unit}s"
    return f"about {max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"
