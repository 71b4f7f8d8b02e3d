"""`ddl train`: from a configuration to a run directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ddl.errors import InputError, first_line
from ddl.lab import data
from ddl.lab.config import TrainConfig
from ddl.lab.data.verifying import verify_corpus
from ddl.lab.device import pick_device
from ddl.lab.output import print_line
from ddl.lab.progress import progress_bar

from .beginning import begin
from .device import device_of
from .initial import Load, read_initial
from .processes import Processes, joined
from .resume import Start, check_corpus, find_start
from .runs import RunDirectory, refuse_existing
from .stopping import stop_on_signal
from .trackers import check_trackers
from .trainer import Trainer

# How torch says that an allocation failed, or that its size is no 64-bit number.
NO_MEMORY = r"out of memory|can't allocate memory|not enough memory|overflow|Invalid (shape|size)"


class Trained(NamedTuple):
    """The run directory, and the exit status: 0, or 128 + the number of the signal that stopped."""

    run: RunDirectory
    status: int


def train(config: TrainConfig, console: Console, *, load: Load | None = None) -> Trained:
    """Train until the last step or a signal, and write everything into the run directory.

    load: reads the model and tokenizer that `config.init_from` names, as `ddl.lab.load.load` does.

    Shards are verified before the first step, also of a run that goes on. Raises InputError if
    data, options, the run directory or a checkpoint cannot be used, DivergedError if loss, gradient
    or weights are not finite. If it fails before the first step is done, it leaves nothing behind.
    """
    with joined(config.process_timeout) as processes:
        if not processes.first:
            console = Console(quiet=True)
        return _train(config, console, processes, load)


def _train(
    config: TrainConfig, console: Console, processes: Processes, load: Load | None
) -> Trained:
    with processes.together():
        check_trackers(config.track)
        device = pick_device(config.device, config.model.residual)
        corpus = data.load_with(config.data, config.validation, documents=config.separate_documents)
        if config.sample_every is not None:
            corpus.tokenizer.decode([0])  # raises here rather than at the first sample
    device = device_of(processes, device)
    start = processes.from_first(lambda: find_start(config, lock=True))
    with start.run.unlocked_by_errors() if start is not None else nullcontext():
        return _go(config, console, processes, load, device, corpus, start)


def _go(
    config: TrainConfig,
    console: Console,
    processes: Processes,
    load: Load | None,
    device: torch.device,
    corpus: data.Corpus,
    start: Start | None,
) -> Trained:
    with processes.together(), enough_memory():
        if start is None:
            refuse_existing(config)  # before building the model, which may take a while
        else:
            check_corpus(start, corpus)
        fresh = start is None or start.path is None
        initial = read_initial(config, corpus, load) if fresh else None
        trainer = Trainer(config, corpus, device, processes, initial)
    with processes.together():
        verify_corpus(corpus, console, (processes.rank, processes.count))
    with enough_memory():
        print_line(
            console,
            f"{config.model.residual}: {trainer.model.num_parameters():,} parameters on {device},"
            f" {len(corpus.train):,} training tokens from {corpus.name}"
            + (f", validated on {corpus.validated_on}" if corpus.validated_on else "")
            + ("" if processes.alone else f", {processes.count} processes ({config.parallel})"),
        )
        with stop_on_signal(processes) as stop, progress_bar(console) as bar:
            session = begin(trainer, bar, start)
            if start is not None:
                print_line(console, _how_it_goes_on(trainer, session.run.path))
            session.run_until(stop)
    with processes.together():
        if processes.first:
            session.run.plot()
        print_line(console, _how_it_ended(trainer, session.run.path))
    return Trained(session.run, max(processes.gather(stop.status)))


def _how_it_goes_on(trainer: Trainer, path: Path) -> str:
    done = trainer.steps_done
    if done >= trainer.config.steps:
        return f"{path} has had all of its {done} steps"
    return f"Going on after step {done} with {path}"


def _how_it_ended(trainer: Trainer, path: Path) -> str:
    done, steps = trainer.steps_done, trainer.config.steps
    if done < steps:
        return f"Stopped after {done} of {steps} steps; go on with `ddl train --resume {path}`"
    return f"Done; `ddl sample {path}` writes text with it"


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
            "batch_size", "fit into this memory with the sizes of the model", text
        ) from error
