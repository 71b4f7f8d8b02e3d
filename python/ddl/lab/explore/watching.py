"""Runs that are watched: what their files say now, read piece by piece."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ddl.errors import InputError, first_line
from ddl.files import is_locked
from ddl.lab.analysis.compare import runs_at, unique_names
from ddl.lab.analysis.inspection import FILE
from ddl.lab.analysis.runs import Run, describe_run, newest_evaluation
from ddl.lab.config import TrainConfig
from ddl.lab.train.json_lines import Record, number
from ddl.lab.train.runs import DIVERGED, INSPECTED, METRICS, RECORDINGS, load_config
from ddl.paths import CONFIG, is_run

from .inside import Recorded, read_inspection, recorded
from .series import Columns, Series
from .tail import Cached, Tail
from .words import safe_line

State = Literal["training", "finished", "stopped", "diverged", "damaged"]
SILENT = 10.0  # seconds without a new record after which the lock of a run is looked at
DAMAGED: State = "damaged"


@dataclass(frozen=True, eq=False)  # the same object as long as nothing has changed
class View:
    """The content of a run's files.

    config: None if config.json is missing or damaged. series: the numbers of its records, by name.
    problems: sentences about files that cannot be read.
    """

    path: Path
    name: str
    state: State
    run: Run
    series: Series
    recordings: tuple[Recorded, ...]
    inspection: dict[str, Any] | None
    problems: tuple[str, ...]

    @property
    def config(self) -> TrainConfig | None:
        return self.run.config


class Snapshot(NamedTuple):
    """All watched runs, in order; sentences for the reader.

    read: whether the files have been looked at.
    """

    views: tuple[View, ...] = ()
    notes: tuple[str, ...] = ()
    read: bool = False


class Watch:
    """The runs at some paths, where a folder with runs stands for those that are in it by then."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._runs: dict[str, _Files] = {}

    def poll(self) -> Snapshot:
        """Read what is new."""
        found: dict[str, Path] = {}
        notes = []
        for path in self._paths:
            here = [run for run in runs_at(path, belongs=_may_be_run) if _may_be_run(run)]
            if not here:
                notes.append(f"No run in {safe_line(path)} yet.")
            for run in here:
                found.setdefault(os.path.realpath(run), run)
        self._runs = {real: self._runs.get(real) or _Files(path) for real, path in found.items()}
        names = [safe_line(name) for name in unique_names(list(found.values()))]
        views = tuple(
            files.poll(name) for name, files in zip(names, self._runs.values(), strict=True)
        )
        return Snapshot(views, tuple(notes), read=True)


def _may_be_run(path: Path) -> bool:
    """Whether it is a run, or looks like one whose config.json is damaged or lost."""
    return is_run(path) or (path / METRICS).is_file()


class _Files:
    """The files of one run, and what has been read of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = Cached(path / CONFIG, lambda file: load_config(file.parent))
        self._metrics: Tail[Record] = Tail(path / METRICS, dict)
        self._recordings = Tail(path / RECORDINGS, recorded)
        self._inspection = Cached(path / INSPECTED / FILE, read_inspection)
        self._evaluation = Cached(path, newest_evaluation)  # names in the directory
        self._columns = Columns()
        self._changed = _modified(path / METRICS)
        self._locked: bool | None = None
        self._looked = False
        self._view: View | None = None

    def poll(self, name: str) -> View:
        """Read what is new."""
        sources = (self._config, self._metrics, self._recordings, self._inspection)
        changed = [source.poll() for source in (*sources, self._evaluation)]
        if any(changed[:3]) and self._view is not None:
            self._changed, self._looked = time.time(), False
        view = self._view
        if view is None or any(changed) or view.name != name:
            view = self._read(name)
        state = self._state(view)
        self._view = view if view.state == state else replace(view, state=state)
        return self._view

    def _read(self, name: str) -> View:
        records = self._metrics.records
        sources = (self._config, self._metrics, self._recordings, self._inspection)
        problems = [*(source.problem for source in sources), self._evaluation.problem]
        config = self._config.value
        if config is None and self._config.problem is None:
            problems.append(f"The run has lost its {CONFIG}.")
        run = Run(self.path, name, records=tuple(records))
        if config is not None:
            run, problem = self._described(name, config)
            problems.append(problem)
        return View(
            self.path,
            name,
            DAMAGED,
            run,
            self._columns.update(records),
            tuple(self._recordings.records),
            self._inspection.value,
            tuple(safe_line(problem) for problem in problems if problem is not None),
        )

    def _described(self, name: str, config: TrainConfig) -> tuple[Run, str | None]:
        """The run as `ddl compare` sees it; without scores and a sentence if these are damaged."""
        records = self._metrics.records
        try:
            evaluated = self._evaluation.value or {}
            return describe_run(self.path, name, config, records, evaluated), None
        except (InputError, ValueError, TypeError, AttributeError, KeyError) as error:
            problem = f"The evaluations must be those of `ddl eval`, got: {first_line(error)}"
            return describe_run(self.path, name, config, records, {}), problem

    def _state(self, view: View) -> State:
        if view.config is None:
            return DAMAGED
        last = view.run.records[-1] if view.run.records else {}
        losses = [number(last, name) for name in ("loss", "validation_loss") if name in last]
        final = view.run.final
        if DIVERGED in last or None in losses or (final is not None and math.isnan(final.loss)):
            return "diverged"
        if view.run.finished:
            return "finished"
        return "training" if self._is_training() else "stopped"

    def _is_training(self) -> bool:
        """Whether it has just written, or holds the lock of the directory."""
        if time.time() - self._changed < SILENT:
            return True
        if self._locked or not self._looked:  # a free lock is asked for once: see is_locked
            self._locked, self._looked = is_locked(self.path), True
        return bool(self._locked)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
