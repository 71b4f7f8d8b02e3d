"""Where the best learning rate lies at several widths and depths: does it stay?

    python -m study.transfer --processes 2      # trains what has no record in study/records yet

Widths 64, 128 and 256 with 4 layers, in the standard parameterization and with mup from width 64;
2, 4, 8 and 16 layers at width 64, standard and with completep from 2 layers; additions and channel
reads. Heads of the attention stay 32 wide. Every model is trained on the same batches with four
rates, a factor of two apart, and with more as long as the best is the lowest or the highest.
A model at its base's size is the standard one, so it is trained once. Channel reads over depth with
completep have three seeds, of which the mean counts, because one left open whether their best rate
stays. Before all of them, the sizes that `python -m study.coordinates` measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple

from ddl.lab import data
from ddl.lab.config import TrainConfig
from ddl.lab.device import pick_device
from ddl.lab.train import Trainer
from ddl.models import GPTConfig
from ddl.optim import OptimConfig

from . import records, side_by_side, sizes
from .records import Record

OUT = records.FOLDER / "transfer" / "text.jsonl"
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
STEPS, WARMUP, BATCH, BLOCK = 600, 50, 4, 256
SCORED = 80  # batches of the validation text
HEAD_SIZE = 32
RESIDUALS = ("additive", "ddl-cc")


class Size(NamedTuple):
    """Features and layers."""

    width: int
    layers: int

    def __str__(self) -> str:
        return f"d{self.width}-L{self.layers}"


@dataclass(frozen=True)
class Question:
    """Sizes along which the best rate shall stay; the first is the base of `parameterization`."""

    parameterization: Literal["mup", "completep"]
    sizes: tuple[Size, ...]

    def model(self, residual: Any, size: Size, *, standard: bool) -> GPTConfig:
        """The model of a size; the standard one at the base, where both are the same."""
        base = self.sizes[0]
        model = GPTConfig(
            residual=residual,
            vocab_size=256,
            block_size=BLOCK,
            num_layers=size.layers,
            hidden_size=size.width,
            num_heads=size.width // HEAD_SIZE,
        )
        if standard or size == base:
            return model
        depth = {"base_layers": base.layers} if self.parameterization == "completep" else {}
        return replace(
            model, parameterization=self.parameterization, base_width=base.width, **depth
        )

    def models(self, residual: Any, *, standard: bool) -> list[GPTConfig]:
        """The models by size, each to be trained at several rates."""
        return [self.model(residual, size, standard=standard) for size in self.sizes]


WIDTH = Question("mup", tuple(Size(d, 4) for d in (64, 128, 256)))
DEPTH = Question("completep", tuple(Size(64, layers) for layers in (2, 4, 8, 16)))


class Curve(NamedTuple):
    """The models that differ in their learning rates alone."""

    residual: str
    parameterization: str
    size: Size

    @classmethod
    def of(cls, model: GPTConfig) -> Curve:
        size = Size(model.hidden_size, model.num_layers)
        return cls(model.residual, model.parameterization, size)

    @property
    def seeds(self) -> tuple[int, ...]:
        over_depth = self.size.width == DEPTH.sizes[0].width
        scaled = self.parameterization == "completep" or self.size == DEPTH.sizes[0]
        return (1, 2, 3) if self.residual == "ddl-cc" and over_depth and scaled else (1,)

    def __str__(self) -> str:
        return f"{self.residual}-{self.parameterization}-{self.size}"


@dataclass(frozen=True)
class Run:
    model: GPTConfig
    lr: float
    seed: int = 1

    @property
    def name(self) -> str:
        seed = "" if self.seed == 1 else f"-s{self.seed}"
        return f"{Curve.of(self.model)}-lr{self.lr:g}{seed}"

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            model=self.model,
            optim=OptimConfig(lr=self.lr, warmup_steps=WARMUP),
            data="study/data",
            steps=STEPS,
            batch_size=BATCH,
            accumulation=1,
            eval_batches=SCORED,
            precision="float32",
            deterministic=True,
            seed=self.seed,
        )


def record_of(run: Run) -> Record:
    """Train a run and measure its validation loss."""
    start = time.process_time()
    config = run.config
    device = pick_device("auto", run.model.residual)
    trainer = Trainer(config, data.load(config.data), device)
    for _ in range(STEPS):
        trainer.step()
    curve = Curve.of(run.model)
    return {
        "name": run.name,
        "residual": curve.residual,
        "parameterization": curve.parameterization,
        "width": curve.size.width,
        "layers": curve.size.layers,
        "lr": run.lr,
        "seed": run.seed,
        "steps": STEPS,
        "parameters": trainer.model.num_parameters(),
        "loss": trainer.evaluate(),
        "processor_seconds": round(time.process_time() - start),
        "processor": records.processor(device),
    }


def losses(curve: Curve, kept: Collection[Record]) -> dict[float, float]:
    """A curve's losses by learning rate, mean over seeds; without rates that lack a seed's run."""
    by_seed = defaultdict[float, dict[int, float]](dict)
    for record in kept:
        size = Size(record["width"], record["layers"])
        if curve == Curve(record["residual"], record["parameterization"], size):
            by_seed[record["lr"]][record["seed"]] = record["loss"]
    return {
        lr: fmean(found.values())
        for lr, found in by_seed.items()
        if found.keys() >= set(curve.seeds)
    }


def best(curve: Curve, kept: Collection[Record]) -> tuple[list[float], float | None]:
    """The learning rates to try, and the best once it lies between others."""
    scores = {lr: -loss for lr, loss in losses(curve, kept).items()}
    return records.rates_tried(RATES, scores, factor=2)


def planned(kept: Collection[Record]) -> list[Run]:
    """The runs that can be done, small models first; each once, whichever question asks for it."""
    models = {
        model: None
        for question in (WIDTH, DEPTH)
        for residual in RESIDUALS
        for standard in (True, False)
        for model in question.models(residual, standard=standard)
    }
    by_size = sorted(models, key=lambda model: model.hidden_size**2 * model.num_layers)
    curves = [(model, Curve.of(model)) for model in by_size]
    return [
        Run(model, lr, seed)
        for model, curve in curves
        for lr in best(curve, kept)[0]
        for seed in curve.seeds
    ]


def jobs() -> Iterator[side_by_side.Job]:
    """The sizes, and the runs that can be planned with the records so far."""
    yield from sizes.jobs()
    for run in planned(records.by_name(OUT).values()):
        yield side_by_side.Job(run.name, OUT, partial(record_of, run))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    side_by_side.arguments_of(parser)
    args = parser.parse_args(arguments)
    return 1 if side_by_side.run(jobs, args.processes, 60 * args.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
