"""Trackers: a run's records in TensorBoard, Weights & Biases or trackio, each an extra."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Protocol

from ddl.config.stored import plain
from ddl.files import CONFIG

from .json_lines import Record
from .runs import RunDirectory, load_config

PROJECT = "ddl"


class Tracker(Protocol):
    """Something that takes records as metrics.jsonl does."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """Raise ModuleNotFoundError if the package of one is not installed."""
    for name in names:
        import_module(name)


def open_trackers(names: Iterable[str], run: RunDirectory, step: int) -> list[Tracker]:
    """Open trackers for a run that goes on after `step`."""
    return [TRACKERS[name](run, step) for name in names]


class _TensorBoard:
    """Event files in the run directory; events later than the checkpoint are hidden."""

    def __init__(self, run: RunDirectory, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = step + 1 if step else None
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, record: Record) -> None:
        step, values = _split(record)
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, which a resumed run goes on with."""

    def __init__(self, run: RunDirectory, step: int) -> None:
        import wandb

        self._run: Any = wandb.init(dir=str(run.path), id=_identifier(run), **_init_options(run))

    def log(self, record: Record) -> None:
        step, values = _split(record)
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio: local by default. A resumed run goes on with it.

    trackio knows a run by its name alone, and run directories in two places may share a name.
    """

    def __init__(self, run: RunDirectory, step: int) -> None:
        import trackio

        self._trackio: Any = trackio
        options = _init_options(run)
        trackio.init(**options | {"name": f"{options['name']}-{_identifier(run)[:8]}"})

    def log(self, record: Record) -> None:
        step, values = _split(record)
        self._trackio.log(values, step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}


def _init_options(run: RunDirectory) -> dict[str, Any]:
    """The arguments that the `init` functions of both wandb and trackio take."""
    config = plain(load_config(run.path))
    return {"project": PROJECT, "name": run.path.name, "config": config, "resume": "allow"}


def _identifier(run: RunDirectory) -> str:
    """An identifier that a run keeps when it is resumed; a run that replaces it has another."""
    made = (run.path / CONFIG).stat().st_mtime_ns
    return hashlib.sha256(f"{run.path.resolve()} {made}".encode()).hexdigest()[:16]


def _split(record: Record) -> tuple[int, dict[str, Any]]:
    """The step of a record, and its other values."""
    values = dict(record)
    return values.pop("step"), values
