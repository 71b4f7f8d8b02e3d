"""Time the training steps of the study's variants, in turn and on one thread.

    python -m study.cost     # writes study/records/cost.json

The runs of a sweep share the machine with whatever runs beside them, so their speeds cannot be
compared. Here a step of each variant follows a step of the one before, round after round, and other
load slows all of them.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ddl.files import write_text
from ddl.lab import data
from ddl.lab.config.sweeps import read_sweep
from ddl.lab.machine import cpu_model
from ddl.lab.train import Trainer
from ddl.lab.train.saver import versions

MAIN = Path(__file__).with_name("main.toml")
OUT = Path(__file__).parent / "records" / "cost.json"
ROUNDS, WARM_UP = 40, 3


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of every variant's steps, round by round, and the machine."""
    torch.set_num_threads(1)
    sweep = read_sweep(MAIN)
    first = {run.variant: run.config for run in reversed(sweep.by_variant())}
    corpus = data.load(next(iter(first.values())).data)
    cpu = torch.device("cpu")
    trainers = {name: Trainer(first[name], corpus, cpu) for name in reversed(first)}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(WARM_UP + rounds):
        order = list(trainers) if number % 2 else list(reversed(trainers))
        for name in order:
            started = time.perf_counter()
            trainers[name].step()
            if number >= WARM_UP:
                seconds[name].append(round(time.perf_counter() - started, 5))
    return {"processor": cpu_model(), "versions": versions(), "seconds": seconds}


def ratios(record: dict[str, Any], baseline: str) -> dict[str, float]:
    """The median over the rounds of each variant's seconds over the baseline's in that round."""
    base = record["seconds"][baseline]
    return {
        name: statistics.median(one / other for one, other in zip(taken, base, strict=True))
        for name, taken in record["seconds"].items()
    }


if __name__ == "__main__":
    write_text(OUT, json.dumps(measure()) + "\n")
