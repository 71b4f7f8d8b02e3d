"""Sweeps of equal seconds: how long a step of each variant takes, measured once for a sweep."""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import asdict, replace

import torch
from rich.console import Console

from ddl.files import alone_in
from ddl.lab import data
from ddl.lab.config import TrainConfig
from ddl.lab.config.sweeps import Sweep
from ddl.lab.device import pick_device
from ddl.lab.output import print_line
from ddl.lab.timing import Timed, interleave

from .launch import enough_memory
from .listing import StepTime, read_times, write_listing
from .trainer import Trainer

ROUNDS, WARMUP = 15, 3  # steps of both variants


def settled(sweep: Sweep, console: Console) -> Sweep:
    """The sweep with the steps of its runs. Those of equal seconds are measured, unless the sweep's
    listing has them; of several processes one measures, and the others wait for it.

    Raises InputError if a variant cannot be trained or the listing cannot be written.
    """
    if (found := stored(sweep)) is not None:
        return found
    with alone_in(sweep.out, wait=True):
        if stored(sweep) is None:  # else by the process that this one has waited for
            _measure(sweep, console)
    found = stored(sweep)
    assert found is not None
    return found


def stored(sweep: Sweep) -> Sweep | None:
    """The sweep with the steps of its runs; None if they are of equal seconds, and not measured."""
    if sweep.equal != "seconds":
        return sweep
    costs, times = dict.fromkeys((run.baseline for run in sweep.runs), 1.0), _known_times(sweep)
    costs |= {name: time.seconds / time.baseline for name, time in times.items()}
    known = all(run.variant in costs for run in sweep.runs)
    return sweep.with_costs(costs) if known else None


def _known_times(sweep: Sweep) -> dict[str, StepTime]:
    """The times in the sweep's listing that are of the options of its variants."""
    times = read_times(sweep.out)
    return {
        name: times[name]
        for name, pair in _pairs(sweep).items()
        if name in times and times[name].options == _checksum(*pair)
    }


def _pairs(sweep: Sweep) -> dict[str, tuple[TrainConfig, TrainConfig]]:
    """The configurations of every variant and of its baseline, with the first seed."""
    configs = {run.variant: run.config for run in reversed(sweep.runs)}
    return {
        run.variant: (configs[run.variant], configs[run.baseline])
        for run in sweep.runs
        if run.variant != run.baseline
    }


def _checksum(*configs: TrainConfig) -> str:
    """Of all options but the seed and the run's directory."""
    options = repr([asdict(replace(config, seed=0, out=None)) for config in configs])
    return hashlib.sha256(options.encode()).hexdigest()[:16]


def _measure(sweep: Sweep, console: Console) -> None:
    """Time the variants that the listing lacks against their baselines, and write it."""
    times, baselines = _known_times(sweep), {run.variant: run.baseline for run in sweep.runs}
    for name, pair in _pairs(sweep).items():
        if name not in times:
            base = baselines[name]
            print_line(console, f"Timing {ROUNDS} steps of {name}, in turn with those of {base}")
            times[name] = StepTime(*time_steps(*pair), _checksum(*pair))
            seconds, of_base, _ = times[name]
            print_line(console, f"  {seconds:.4g} seconds for a step, not {of_base:.4g}")
    # Without locks another process may have measured meanwhile: its times are those of its runs.
    write_listing(sweep, times | _known_times(sweep))


def time_steps(config: TrainConfig, baseline: TrainConfig) -> tuple[float, float]:
    """Median seconds of a training step of two runs, whose steps alternate on this machine."""
    with enough_memory():
        steps = {"own": _timed(config), "baseline": _timed(baseline)}
        seconds = interleave(steps, ROUNDS, warmup=WARMUP)
    own, of_baseline = (statistics.median(s for (s,) in seconds[name]) for name in steps)
    return own, of_baseline


def _timed(config: TrainConfig) -> Timed:
    """A training step, which takes until the host has its loss and the device is idle."""
    device = pick_device(config.device, config.model.residual)
    corpus = data.load_with(config.data, config.validation, documents=config.separate_documents)
    trainer = Trainer(config, corpus, device)

    def step() -> tuple[float]:
        started = time.perf_counter()
        float(trainer.step().loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started,)

    return step
