"""Train the additive residual and DDL side by side, all else equal, for `ddl demo`.

It is a sweep of two runs, whose single steps alternate.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ddl.lab import data
from ddl.lab.analysis import compare, tables
from ddl.lab.config import DemoConfig
from ddl.lab.config.sweeps import Sweep, SweepRun, parse_sweep
from ddl.lab.device import pick_device
from ddl.lab.load import complete
from ddl.lab.output import print_line
from ddl.lab.progress import progress_bar
from ddl.lab.train import Trainer, Watch, stop_on_signal
from ddl.lab.train.listing import write_listing
from ddl.lab.train.metrics import Metrics
from ddl.lab.train.runs import PLOT, RunDirectory
from ddl.models.tokenizers import printable

PROMPT = "The statement "
SAMPLE_TOKENS = 300
MEAN_OVER = 20  # steps, for the loss beside the progress bar


@dataclass
class Candidate:
    """One of the two training runs."""

    name: str
    trainer: Trainer
    run: RunDirectory
    seconds: list[float] = field(default_factory=list)  # of each step so far
    losses: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.trainer.config.tokens_per_step / statistics.median(self.seconds)

    def __post_init__(self) -> None:
        self.watch, self.metrics = Watch(self.trainer), Metrics(self.trainer)

    def step(self) -> None:
        """Run one optimizer step, timed until the host has the loss and the GPU is idle."""
        started = time.perf_counter()
        step = self.trainer.step()
        loss = float(step.loss)
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss)
        self.watch.add(step)
        speed = self.trainer.config.tokens_per_step / self.seconds[-1]
        figures = self.metrics.of_training(loss, steps=1)
        figures = {"loss": loss, **figures, **self._spent(), "tokens_per_second": speed}
        self.run.metrics.append({"step": self.trainer.steps_done, **figures})

    def evaluate(self) -> None:
        """Measure the validation loss and log it."""
        loss = self.trainer.evaluate()
        assert loss is not None  # it is None only if `evaluate` is stopped
        self.validation_loss = loss
        figures = {"loss": loss, **self.metrics.of_validation(loss)}
        validation = {f"validation_{name}": figure for name, figure in figures.items()}
        self.run.metrics.append({"step": self.trainer.steps_done, **validation, **self._spent()})

    def _spent(self) -> dict[str, float]:
        return self.metrics.spent(self.trainer.steps_done, sum(self.seconds))


def demo(config: DemoConfig, console: Console, *, samples: int = SAMPLE_TOKENS) -> list[Candidate]:
    """Train both models, print the comparison, write the plot, print a sample of each."""
    device = pick_device(config.device, config.residual)
    corpus = data.load(data.EMBEDDED)
    sweep = demo_sweep(config)
    pair = [_build(run, corpus, device) for run in sweep.runs]
    write_listing(sweep)
    steps = pair[0].trainer.config.steps
    console.print(
        f"Two {pair[0].trainer.config.model.num_layers}-block Transformers learn {corpus.name}"
        f" ({len(corpus.train):,} bytes) on {device}: same seed, batches and backbone.",
        highlight=False,
    )
    interleave(pair, steps, console)
    compared = compare.compare([candidate.run.path for candidate in pair])
    done, tokens = pair[0].trainer.steps_done, pair[0].trainer.config.tokens_per_step
    console.print(f"After {done} steps of {tokens:,} tokens:", highlight=False)
    tables.show(compared, console)
    console.print(verdict(pair), highlight=False)
    plot = sweep.out / PLOT
    compare.plot(compared, plot)
    for candidate in pair:
        candidate.run.save(candidate.trainer.model)
        console.print(
            Panel(
                Text(_sample(candidate, config.seed, samples)),
                title=Text(f"{candidate.name} writes"),
            )
        )
    print_line(console, f"Loss plot: {plot}")
    return pair


def demo_sweep(config: DemoConfig) -> Sweep:
    """The `demo` preset with the additive residual and with the other."""
    residuals = ("additive", config.residual)
    options = {"device": config.device, "data": data.EMBEDDED}
    return parse_sweep(
        {
            "preset": "demo",
            "out": str(config.out),
            "seeds": [config.seed],
            "variants": {residual: {"model.residual": residual} for residual in residuals},
            "options": options if config.steps is None else options | {"steps": config.steps},
        }
    )


def _build(run: SweepRun, corpus: data.Corpus, device: torch.device) -> Candidate:
    config = replace(run.config, resume=None, overwrite=True)
    trainer = Trainer(config, corpus, device)
    return Candidate(run.variant, trainer, RunDirectory.create(config, corpus.tokenizer))


def interleave(pair: list[Candidate], steps: int, console: Console) -> None:
    """Alternate single training steps, so that other load on the machine slows both equally."""
    every = pair[0].trainer.config.eval_every
    with stop_on_signal() as stopped, progress_bar(console) as bar:
        task = bar.add_task("training both", total=steps, loss="", speed="")
        for step in range(1, steps + 1):
            # Alternate who is first: caches and clocks differ for the second.
            for candidate in pair if step % 2 else pair[::-1]:
                candidate.step()
            last = stopped() or step == steps
            if step % every == 0 or last:
                for candidate in pair:
                    candidate.evaluate()
                values = ", ".join(f"{c.name} {c.validation_loss:.4f}" for c in pair)
                bar.console.print(f"step {step}: validation loss {values}", highlight=False)
            losses = " / ".join(f"{statistics.fmean(c.losses[-MEAN_OVER:]):.3f}" for c in pair)
            speed = " / ".join(f"{c.tokens_per_second:,.0f}" for c in pair)
            bar.update(task, completed=step, loss=f"mean loss {losses}", speed=f"{speed} tok/s")
            if last:
                break


def verdict(pair: list[Candidate]) -> str:
    """Which model is better, by how much, and how far one short run goes."""
    best, other = sorted(pair, key=lambda c: c.validation_loss)
    gap = other.validation_loss - best.validation_loss
    return (
        f"{best.name} is better after {best.trainer.steps_done} steps: its validation loss is"
        f" {gap:.4f} nats per byte lower. That is one seed early in training; docs/results.md has"
        " longer runs with five seeds."
    )


def _sample(candidate: Candidate, seed: int, tokens: int) -> str:
    trainer = candidate.trainer
    text = complete(
        trainer.model,
        trainer.corpus.tokenizer,
        PROMPT,
        tokens=tokens,
        temperature=0.8,
        top_k=40,
        seed=seed,
    )
    return printable(text)
