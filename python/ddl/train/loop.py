"""`ddl train`: from a configuration to a run directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console

from ddl import data
from ddl.config import TrainConfig
from ddl.errors import InputError, first_line

from .resume import check_corpus, find_start
from .runs import RunDirectory, refuse_existing
from .session import begin, progress_bar
from .stopping import stop_on_signal
from .trackers import check_trackers
from .trainer import Trainer, pick_device

# How torch says that an allocation failed, or that its size is no 64-bit number.
NO_MEMORY = r"out of memory|can't allocate memory|not enough memory|overflow|Invalid (shape|size)"


class Trained(NamedTuple):
    """The run directory, and the exit status: 0, or 128 + the number of the signal that stopped."""

    run: RunDirectory
    status: int


def train(config: TrainConfig, console: Console) -> Trained:
    """Train until the last step or a signal, and write everything into the run directory.

    Raises InputError if data, options, the run directory or a checkpoint cannot be used,
    DivergedError if loss, gradient or weights are not finite. If it fails before the first step is
    done, it leaves nothing behind.
    """
    check_trackers(config.track)
    start = find_start(config)
    device = pick_device(config.device, config.model.residual)
    corpus = data.load(config.data)
    if config.sample_every is not None:
        corpus.tokenizer.decode([0])  # raises here rather than at the first sample
    if start is None:
        refuse_existing(config)  # before building the model, which may take a while
    else:
        check_corpus(start, corpus)
    with enough_memory():
        trainer = Trainer(config, corpus, device)
        _say(
            console,
            f"{config.model.residual}: {trainer.model.num_parameters():,} parameters on {device},"
            f" {len(corpus.train):,} training tokens from {corpus.name}",
        )
        with stop_on_signal() as stop, progress_bar(console) as bar:
            session = begin(trainer, bar, start)
            if start is not None:
                _say(console, f"Going on after step {trainer.steps_done} with {session.run.path}")
            session.run_until(stop)
    path = session.run.path
    session.run.plot()
    if trainer.steps_done < config.steps:
        done = f"{trainer.steps_done} of {config.steps} steps"
        _say(console, f"Stopped after {done}; go on with `ddl train --resume {path}`")
    else:
        _say(console, f"Done; `ddl sample {path}` writes text with it")
    return Trained(session.run, stop.status)


def _say(console: Console, line: str) -> None:
    """Print a line as it is: a path may have what rich takes for markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn an allocation that fails into an InputError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = first_line(error)
        if isinstance(error, RuntimeError) and not re.search(NO_MEMORY, text):
            raise
        raise InputError(
            f"`batch_size` and the sizes of the model must be smaller for this memory, got: {text}"
        ) from error
