"""Train one run of the comparison again, drawn at random, and compare it with its record.

    python -m study.again     # writes study/records/again.json

The digest of the records is the seed of the draw, so it can be checked and cannot be chosen. On
the same kind of processor, with the same torch and Python, every loss is the same number; on
another, small differences grow over the steps.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ddl.files import write_text
from ddl.lab.config.sweeps import SweepRun, read_sweep
from ddl.lab.train import train

from . import records
from .collect import collect
from .tables import GONE

MAIN = Path(__file__).with_name("main.toml")
OUT = records.FOLDER / "again.json"
FOLDER = Path("runs/study/again")
COMPARED = ("validation", "training", "depth")  # of a record, as study/collect.py writes it


def draw(folder: Path = records.FOLDER) -> records.Trained:
    """One of the recorded runs that can be trained again, each with the same probability."""
    runs = [run for seeds in records.read("main", folder).values() for run in seeds.values()]
    draws = random.Random(records.digest("main", folder=folder))
    while (run := draws.choice(runs)).variant in GONE:
        pass
    return run


def repeat(run: SweepRun, recorded: dict[str, Any]) -> dict[str, Any]:
    """Train the run in a folder of its own, and put its losses beside the recorded ones."""
    config = replace(run.config, out=FOLDER / run.name, resume=None, overwrite=True)
    train(config, Console())
    found = collect(config.out)
    assert found is not None, config.out
    if "depth" in recorded:  # older records have α, which is β
        depth = {name: each for name, each in recorded["depth"].items() if name != "alpha"}
        recorded = recorded | {"depth": depth}
    return {
        "name": run.name,
        "processor": {"recorded": recorded["processor"], "again": found["processor"]},
        "versions": {"recorded": recorded["versions"], "again": found["versions"]},
        "loss": {"recorded": recorded["loss"], "again": found["loss"]},
        "equal": {name: found[name] == recorded[name] for name in COMPARED if name in recorded},
    }


def main() -> None:
    torch.set_num_threads(1)  # as the runs of the sweep had
    drawn = draw()
    runs = {run.name: run for run in read_sweep(MAIN).runs}
    record = repeat(runs[drawn.record["name"]], drawn.record)
    record["records"] = records.digest("main")
    write_text(OUT, json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
