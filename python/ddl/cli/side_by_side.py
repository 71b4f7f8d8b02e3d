"""Train the additive residual and DDL side by side, all else equal, for `ddl demo`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ddl import data
from ddl.config import PRESETS, DemoConfig, Residual, TrainConfig
from ddl.data.tokenizer import printable
from ddl.load import complete
from ddl.train import Trainer, Watch, pick_device, progress_bar, stop_on_signal
from ddl.train.plots import plot_losses
from ddl.train.runs import PLOT, RunDirectory

PROMPT = "The statement "
SAMPLE_TOKENS = 300
MEAN_OVER = 20  # steps, for the loss beside the progress bar


@dataclass
class Candidate:
    """One of the two training runs."""

    trainer: Trainer
    run: RunDirectory
    seconds: list[float] = field(default_factory=list)  # of each step so far
    losses: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")

    @property
    def name(self) -> str:
        return self.trainer.config.model.residual

    @property
    def tokens_per_second(self) -> float:
        return self.trainer.tokens_per_step / statistics.median(self.seconds)

    def __post_init__(self) -> None:
        self.watch = Watch(self.trainer)

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
        self.run.log({"step": self.trainer.steps_done, "loss": loss, "seconds": self.seconds[-1]})

    def evaluate(self) -> None:
        """Measure the validation loss and log it."""
        loss = self.trainer.evaluate()
        assert loss is not None  # it is None only if `evaluate` is stopped
        self.validation_loss = loss
        self.run.log({"step": self.trainer.steps_done, "validation_loss": self.validation_loss})


def demo(config: DemoConfig, console: Console, *, samples: int = SAMPLE_TOKENS) -> list[Candidate]:
    """Train both models, print the comparison, write the plot, print a sample of each."""
    device = pick_device(config.device, config.residual)
    corpus = data.load(data.EMBEDDED)
    pair = [
        _build(demo_training(config, residual), corpus, device)
        for residual in ("additive", config.residual)
    ]
    steps = pair[0].trainer.config.steps
    console.print(
        f"Two {pair[0].trainer.config.model.num_layers}-block Transformers learn {corpus.name}"
        f" ({len(corpus.train):,} bytes) on {device}: same seed, batches and backbone.",
        highlight=False,
    )
    interleave(pair, steps, console)
    console.print(comparison(pair))
    console.print(verdict(pair), highlight=False)
    plot = config.out / PLOT
    plot_losses({c.name: c.run.metrics() for c in pair}, plot)
    for candidate in pair:
        candidate.run.save(candidate.trainer.model)
        console.print(
            Panel(Text(_sample(candidate, config.seed, samples)), title=f"{candidate.name} writes")
        )
    console.print(f"Loss plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    return pair


def demo_training(config: DemoConfig, residual: Residual) -> TrainConfig:
    """The `demo` preset with this residual."""
    base = PRESETS["demo"]
    return replace(
        base,
        model=replace(base.model, residual=residual),
        steps=config.steps or base.steps,
        seed=config.seed,
        device=config.device,
        out=Path(config.out) / residual,
        overwrite=True,
    )


def _build(config: TrainConfig, corpus: data.Corpus, device: torch.device) -> Candidate:
    trainer = Trainer(config, corpus, device)
    return Candidate(trainer, RunDirectory.create(config, corpus.tokenizer))


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


def comparison(pair: list[Candidate]) -> Table:
    """A table with validation loss, size and speed of each model."""
    steps = pair[0].trainer.steps_done
    table = Table(title=f"After {steps} steps of {pair[0].trainer.tokens_per_step:,} tokens")
    table.add_column("residual")
    for column in ("validation loss", "parameters", "tokens/s", "speed ratio"):
        table.add_column(column, justify="right")
    for candidate in pair:
        table.add_row(
            candidate.name,
            f"{candidate.validation_loss:.4f}",
            f"{candidate.trainer.model.num_parameters():,}",
            f"{candidate.tokens_per_second:,.0f}",
            f"{candidate.tokens_per_second / pair[0].tokens_per_second:.3f}",
        )
    return table


def verdict(pair: list[Candidate]) -> str:
    """A sentence that says which model is better, and by how much."""
    best, other = sorted(pair, key=lambda c: c.validation_loss)
    gap = other.validation_loss - best.validation_loss
    return f"{best.name} is better: its validation loss is {gap:.4f} nats per byte lower."


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
