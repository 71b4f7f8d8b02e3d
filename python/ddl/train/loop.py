"""`ddl train`: the training loop with progress bar, metrics and Ctrl-C."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from ddl import data
from ddl.config import TrainConfig
from ddl.errors import DivergedError

from .runs import RunDirectory, refuse_existing
from .trainer import Trainer, pick_device


def train(config: TrainConfig, console: Console) -> RunDirectory:
    """Train until the last step or Ctrl-C, and write everything into the run directory.

    Raises InputError if data, options or the run directory cannot be used, DivergedError if the
    loss is not finite.
    """
    device = pick_device(config.device, config.model.residual)
    corpus = data.load(config.data)
    refuse_existing(config)  # before building the model, which may take a while
    trainer = Trainer(config, corpus, device)
    run = RunDirectory.create(config, corpus.tokenizer)
    console.print(
        f"{config.model.residual}: {trainer.model.num_parameters():,} parameters on {device},"
        f" {len(corpus.train):,} training tokens from {corpus.name}",
        highlight=False,
    )
    with stop_on_interrupt() as stopped, progress_bar(console) as bar:
        task = bar.add_task(config.model.residual, total=config.steps, loss="", speed="")
        for record in train_steps(trainer, stopped):
            run.log(record)
            if "loss" in record:
                speed = f"{record['tokens_per_second']:,.0f} tok/s"
                loss = f"mean loss {record['loss']:.3f}"
                bar.update(task, completed=record["step"], loss=loss, speed=speed)
            else:
                bar.console.print(
                    f"step {record['step']}: validation loss {record['validation_loss']:.4f}"
                )
                run.save(trainer.model)
    run.save(trainer.model)
    run.plot()
    if trainer.steps_done < config.steps:
        done = f"{trainer.steps_done} of {config.steps} steps"
        console.print(f"Stopped after {done}; weights and metrics are in {run.path}")
    else:
        console.print(f"Done; `ddl sample {run.path}` writes text with it")
    return run


def train_steps(trainer: Trainer, stopped: Callable[[], bool]) -> Iterator[dict[str, float]]:
    """Train to the end of the schedule and yield the records for metrics.jsonl.

    Every `log_every` steps it yields the mean loss (nats per token) since the last record; every
    `eval_every` steps and at the end the validation loss. It ends early if `stopped()` is true
    after a step.
    """
    config = trainer.config
    losses: list[Tensor] = []
    started = time.perf_counter()
    while trainer.steps_done < config.steps and not stopped():
        step = trainer.step()
        losses.append(step.loss)
        done, last = trainer.steps_done, trainer.steps_done == config.steps
        if done % config.log_every == 0 or last:
            loss = float(torch.stack(losses).mean())  # waits for the device
            seconds = time.perf_counter() - started
            check_finite(loss, done)
            yield {
                "step": done,
                "loss": loss,
                "grad_norm": float(step.grad_norm),
                "lr": trainer.optimizer.param_groups[0]["lr"],
                "tokens_per_second": len(losses) * trainer.tokens_per_step / seconds,
            }
            losses, started = [], time.perf_counter()
        if done % config.eval_every == 0 or last:
            paused = time.perf_counter()
            yield {"step": done, "validation_loss": trainer.evaluate()}
            started += time.perf_counter() - paused


def check_finite(loss: float, step: int) -> None:
    """Raise DivergedError unless the loss is finite."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss is {loss} at step {step}: try a lower `optim.lr` or a longer warm-up"
        )


def progress_bar(console: Console) -> Progress:
    """A progress bar with steps, recent mean loss, tokens per second and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request that the yielded function reports; a second one raises.

    So a step is never interrupted halfway, and the saved model is consistent.
    """
    requested = threading.Event()

    def handle(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        print("\nStopping after this step; Ctrl-C again aborts.", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
