"""Trackers: a run's records in TensorBoard, Weights & Biases or trackio, each an extra."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ddl.errors import InputError, first_line
from ddl.files import remove
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import plain

from .json_lines import Record
from .runs import TRACKED

PROJECT = "ddl"
# Of each tracker: the module that is called, and a function that it must have.
CALLED = {
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "wandb": ("wandb", "init"),
    "trackio": ("trackio", "init"),
}


class Tracked(NamedTuple):
    """A run for the trackers. step: after which it goes on. made: of its config.json, in ns."""

    path: Path
    config: TrainConfig
    step: int
    made: int


class Tracker(Protocol):
    """Something that takes records as metrics.jsonl does."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """Raise ModuleNotFoundError if the package of one is not installed, InputError if it fails to
    load or another module has its name."""
    for name in names:
        try:
            package = import_module(name)
            # A folder of this name is a package without a file, if the real one is missing.
            if getattr(package, "__file__", name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            called, function = CALLED[name]
            module = import_module(called)
        except ModuleNotFoundError as error:
            if error.name == name:
                raise
            raise _refused(name, first_line(error)) from error
        except Exception as error:  # of another package of this name, or of a broken one
            raise _refused(name, f"{type(error).__name__}: {first_line(error)}") from error
        if not hasattr(module, function):
            place = getattr(package, "__file__", None) or "another place"
            raise _refused(name, f"another package of this name, {place}")


def open_trackers(names: Iterable[str], run: Tracked) -> list[Tracker]:
    """Open trackers for a run. If one fails, close the others, leave no file of theirs in the run
    directory, and raise InputError: nobody answers a prompt, such as one for a key."""
    before = _entries(run.path)
    with ExitStack() as failing:
        failing.callback(lambda: _drop(run.path, before))
        opened: list[Tracker] = []
        for name in names:
            opened.append(_open(name, run))
            failing.callback(opened[-1].close)
        failing.pop_all()
    return opened


def _open(name: str, run: Tracked) -> Tracker:
    try:
        with _without_input():
            tracker: Tracker = TRACKERS[name](run)
    except EOFError as error:
        raise _refused(name, "a prompt for input: log in before") from error
    except (Exception, SystemExit) as error:  # a tracker may raise anything
        raise _refused(name, first_line(error)) from error
    return tracker


@contextmanager
def _without_input() -> Iterator[None]:
    """Let standard input be empty, so that a prompt fails and does not wait for ever."""
    given = sys.stdin
    with open(os.devnull, encoding="utf-8") as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = given


def _refused(name: str, got: str) -> InputError:
    return InputError("track", "be trackers that can be opened", f"{name} with: {got}")


def _entries(path: Path) -> set[Path]:
    """The trackers' folders in a run directory, and what is in them."""
    folders = {path / name for name in TRACKED if (path / name).is_dir()}
    return folders | {entry for folder in folders for entry in folder.iterdir()}


def _drop(path: Path, before: set[Path]) -> None:
    """Remove the trackers' files in a run directory but for those that were there before."""
    for entry in _entries(path) - before:
        remove(entry)


class _TensorBoard:
    """Event files in the run directory; events later than the checkpoint are hidden."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.step + 1 if run.step else None
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

    def __init__(self, run: Tracked) -> None:
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

    def __init__(self, run: Tracked) -> None:
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


def _init_options(run: Tracked) -> dict[str, Any]:
    """The arguments that the `init` functions of both wandb and trackio take."""
    config = plain(run.config)
    return {"project": PROJECT, "name": run.path.name, "config": config, "resume": "allow"}


def _identifier(run: Tracked) -> str:
    """An identifier that a run keeps when it is resumed; a run that replaces it has another."""
    return hashlib.sha256(f"{run.path.resolve()} {run.made}".encode()).hexdigest()[:16]


def _split(record: Record) -> tuple[int, dict[str, Any]]:
    """The step of a record, and its other values."""
    values = dict(record)
    return values.pop("step"), values
