"""The trainer: AdamW, warm-up and cosine, clipping, accumulation, autocast, evaluation."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
from ddl.config import DivergedError, InputError, TrainConfig
from ddl.models import GPT
from ddl.optim import learning_rate, make_optimizer
from ddl.runs import RunDirectory, refuse_existing


class Step(NamedTuple):
    """loss and gradient norm of one optimizer step, scalars that stay on the device until read."""

    loss: Tensor
    grad_norm: Tensor


class Trainer:
    """One model, its optimizer and its stream of batches.

    Two trainers with one seed see the same batches and start from the same backbone, whatever
    their residual is; a second run on the same machine gives the same losses.
    """

    def __init__(self, config: TrainConfig, corpus: data.Corpus, device: torch.device) -> None:
        corpus.check(config.model.block_size, config.model.vocab_size)
        self.config, self.corpus, self.device = config, corpus, device
        make_repeatable(device)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config.optim)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.steps_done = 0

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.accumulation * self.config.model.block_size

    def step(self) -> Step:
        """Accumulate the gradients of `accumulation` batches and update the weights once."""
        config = self.config
        lr = learning_rate(config.optim, self.steps_done, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.device)
        for _ in range(config.accumulation):
            idx = data.batch(
                self.corpus.train, config.batch_size, config.model.block_size, self.generator
            )
            loss = self._loss(idx) / config.accumulation
            loss.backward()
            total += loss.detach()
        largest = config.optim.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return Step(total, norm)

    @torch.no_grad()
    def evaluate(self, batches: int | None = None) -> float:
        """Mean loss on the validation part, always the same windows.

        batches: how many, by default the configuration's `eval_batches`; 0 takes all.
        """
        count = self.config.eval_batches if batches is None else batches
        size, block = self.config.batch_size, self.config.model.block_size
        self.model.eval()
        windows, total = 0, torch.zeros((), device=self.device)
        for idx in data.evaluation_batches(self.corpus.validation, size, block, count):
            total += self._loss(idx) * len(idx)
            windows += len(idx)
        self.model.train()
        return float(total) / windows

    def _loss(self, idx: Tensor) -> Tensor:
        largest = int(idx.max())
        if largest >= self.config.model.vocab_size:  # before a GPU would abort on it
            raise InputError(
                f"{self.corpus.name} must hold tokens below `vocab_size`"
                f" = {self.config.model.vocab_size}, got {largest}"
            )
        if self.device.type == "cuda":
            idx = idx.pin_memory().to(self.device, non_blocking=True)
        half = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            loss = self.forward(idx, labels=idx).loss
        assert isinstance(loss, Tensor)
        return loss


def train(config: TrainConfig, console: Console) -> RunDirectory:
    """Run a training from start to end, or to Ctrl-C, and leave everything in its run directory.

    Raises InputError for input that cannot be used, DivergedError when the loss is not finite.
    """
    device = pick_device(config.device, config.model.residual)
    corpus = data.load(config.data)
    refuse_existing(config)  # before the model is built, which may take a while
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

    Every `log_every` steps the mean loss since the last record; every `eval_every` steps and at the
    end the validation loss. `stopped` is asked after every step.
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
    """Raise DivergedError unless the loss is a number."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss is {loss} at step {step}: try a lower `optim.lr` or a longer warm-up"
        )


def progress_bar(console: Console) -> Progress:
    """A bar with steps, mean loss since the last update, tokens per second, remaining time."""
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

    So a step is never cut in two, and what is saved is a consistent model.
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


def pick_device(name: str, residual: str) -> torch.device:
    """`auto` is the GPU when there is one and the residual's operators have kernels for it.

    Raises InputError for "cuda" where that is not so.
    """
    reason = None
    if not torch.cuda.is_available():
        reason = "torch finds no GPU"
    elif residual != "additive" and not has_cuda_kernels():
        reason = f"the operators of {residual} have no CUDA kernels yet"
    if name == "cuda" and reason:
        raise InputError(f"`device` must be cpu, because {reason}, got 'cuda'")
    return torch.device("cpu" if name == "cpu" or reason else "cuda")


def has_cuda_kernels() -> bool:
    """Whether this version of the package registered its operators for GPUs."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("ddl::rewrite_read", "CUDA")


def make_repeatable(device: torch.device) -> None:
    """On a GPU, have torch choose algorithms that add in a fixed order; on a CPU they all do."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Only a debugging aid of that mode, and it costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
