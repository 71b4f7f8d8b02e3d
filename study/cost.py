"""Time the training steps of the study's variants, in turn and on one thread of a CPU.

    python -m study.cost     # writes study/records/cost.json

The runs of a sweep share the machine with whatever runs beside them, so their speeds cannot be
compared. Here a step of each variant follows a step of the one before, round after round, and other
load slows all of them. Each is timed as it is and compiled; the faster counts.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddl.files import write_text
from ddl.lab import data
from ddl.lab.config.sweeps import read_sweep
from ddl.lab.train import Trainer
from ddl.lab.train.saver import versions

from . import records

MAIN = Path(__file__).with_name("main.toml")
OUT = records.FOLDER / "cost.json"
TIMED = ("additive", "additive-conv", "cc", "cc-none", "tc", "tc-none", "tc-one")
WAYS = ("eager", "compiled")
ROUNDS, WARM_UP = 40, 3


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of the steps of those TIMED, round by round, by how they run, and the machine."""
    torch.set_num_threads(1)
    sweep = read_sweep(MAIN)
    first = {run.variant: run.config for run in reversed(sweep.by_variant())}
    configs = {name: first[name] for name in TIMED}
    corpus = data.load(next(iter(first.values())).data)
    cpu = torch.device("cpu")
    trainers = {
        (name, how): Trainer(replace(config, compile=how == "compiled"), corpus, cpu)
        for name, config in configs.items()
        for how in WAYS
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in configs}
    for number in range(WARM_UP + rounds):
        for name, how in trainers if number % 2 else reversed(trainers):
            started = time.perf_counter()
            trainers[name, how].step()
            if number >= WARM_UP:
                taken = round(time.perf_counter() - started, 5)
                seconds[name].setdefault(how, []).append(taken)
    return {"processor": records.processor(cpu), "versions": versions(), "seconds": seconds}


def ratios(record: dict[str, Any], baseline: str) -> dict[str, float]:
    """The median over the rounds of each variant's seconds over the baseline's in that round, each
    of how it is faster."""
    seconds = record["seconds"]
    fastest = {name: min(ways.values(), key=statistics.median) for name, ways in seconds.items()}
    base = fastest[baseline]
    return {
        name: statistics.median(one / other for one, other in zip(taken, base, strict=True))
        for name, taken in fastest.items()
    }


if __name__ == "__main__":
    write_text(OUT, json.dumps(measure()) + "\n")
