"""Comparison: runs side by side, and sentences about what makes a comparison unfair."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from ddl.errors import listed
from ddl.lab.config.comparing import Over
from ddl.lab.train.listing import LISTING
from ddl.lab.train.plots import Places, plot_losses
from ddl.models.tokenizers import printable
from ddl.paths import is_run, path_kind

from .cost import CAPTION, LABELS, equal_cost, places, without
from .paired import variants_of
from .runs import KINDS, Run, read_run

if TYPE_CHECKING:
    from .measured import Measured

__all__ = ["Comparison", "compare", "plot"]

MOST_NAMED = 4  # runs that a sentence names


class Comparison(NamedTuple):
    """Runs, of which the first is the one to compare with. notes: sentences on what is unfair.

    measured: their models on a text; None if none was given.
    """

    runs: list[Run]
    notes: list[str]
    measured: Measured | None = None


def compare(paths: Sequence[Path]) -> Comparison:
    """Read the runs at these paths, where a directory stands for the runs in it, and for those in
    its own directories, such as a sweep's.

    Raises InputError if a path is neither a run nor a directory with runs, or if a file of a run is
    damaged.
    """
    found, twice = _distinct([run for path in paths for run in runs_at(path)])
    names = unique_names(found)
    runs = [read_run(path, name) for path, name in zip(found, names, strict=True)]
    notes = [f"{_named([name_of(path) for path in twice])} named twice, shown once."]
    return Comparison(runs, (notes if twice else []) + notes_on(runs))


def with_data(comparison: Comparison, text: Path, console: Console) -> Comparison:
    """Also measure the runs' models on the text of a file; console: for the progress.

    Raises InputError if the file cannot be read, or no run can be measured on it.
    """
    from .measured import measure  # imports torch

    measured = measure(comparison.runs, text, console)
    return Comparison(comparison.runs, comparison.notes + measured.notes, measured)


def notes_on(runs: Sequence[Run]) -> list[str]:
    """Sentences on why a comparison with the first of these runs is unfair or incomplete."""
    return _differences(runs) + _unfinished(runs) + _limited(runs) + _without_figures(runs)


def runs_at(path: Path, *, belongs: Callable[[Path], bool] = is_run) -> list[Path]:
    """The path, if it is a run or a model, or the runs in it and in its directories: in a sweep's
    order, else by name; the path if there is none, to be refused when it is read.

    belongs: whether a directory is a run.
    """
    if path_kind(path) in KINDS:
        return [path]
    found: list[Path] = []
    for inside in _directories(path):
        found += [inside] if belongs(inside) else filter(belongs, _directories(inside))
    return found or [path]


def _directories(path: Path) -> list[Path]:
    """The directories in a path: in a sweep's order, else by name."""
    try:
        names = sorted(os.listdir(path), key=_natural)
    except OSError:
        return []
    order = _listing(path / LISTING)
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return [path / name for name in names if os.path.isdir(path / name)]


def plot(comparison: Comparison, path: Path, over: Over = "steps") -> Comparison:
    """Plot the losses of the runs that have records; runs of one variant have one colour.

    over: what the x-axis counts. Returns the comparison, with a note on runs that are not drawn.
    """
    runs = [run for run in comparison.runs if run.records]
    variants = {run.name: name for name, group in variants_of(runs).items() for run in group}
    curves = {run.name: run.records for run in runs}
    at = None
    if over != "steps":
        at = Places(LABELS[over], {run.name: places(run, over) for run in runs}, CAPTION)
    plot_losses(curves, path, variants=variants, argument="plot", places=at)
    return comparison._replace(notes=comparison.notes + without(runs, over))


# --- names ----------------------------------------------------------------------------------------


def name_of(path: Path, parts: int = 1) -> str:
    """The last parts of a path as text that a terminal can show."""
    last = Path(os.path.abspath(path)).parts[-parts:]
    text = os.fsencode(os.path.join(*last)).decode("utf-8", "replace")
    return printable(text).replace("\n", "\ufffd").replace("\t", "\ufffd")


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as it takes to tell them apart."""
    most = max((len(Path(os.path.abspath(path)).parts) for path in paths), default=1)
    names = [name_of(path) for path in paths]
    for parts in range(2, most + 1):
        clashing = {name for name in names if names.count(name) > 1}
        if not clashing:
            break
        names = [
            name_of(path, parts) if name in clashing else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def _distinct(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The paths without repetitions, and those that were repeated."""
    first: dict[str, Path] = {}
    twice = []
    for path in paths:
        real = os.path.realpath(path)
        if real in first:
            twice.append(path)
        first.setdefault(real, path)
    return list(first.values()), twice


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts s2 before s10."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _listing(file: Path) -> list[str]:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


# --- notes ----------------------------------------------------------------------------------------


def _differences(runs: Sequence[Run]) -> list[str]:
    """Sentences on runs whose losses cannot fairly be compared with those of the first."""
    trained = [run for run in runs if run.config is not None]
    grouped: dict[str, list[str]] = {}
    for run in trained[1:]:
        told = [tell(trained[0], run) for tell in DIFFERENCES]
        reasons = "; ".join(part for part in told if part is not None)
        if reasons:
            grouped.setdefault(reasons, []).append(run.name)
    return [
        f"Not a fair comparison with {trained[0].name}: {_named(names)} {reasons}."
        for reasons, names in grouped.items()
    ]


def _other_data(first: Run, run: Run) -> str | None:
    if first.data is not None and run.data is not None:
        same = first.data == run.data
        return None if same or _other_vocabulary(first, run) else "with other data"
    if first.options.data != run.options.data:
        return f"with the data {run.options.data}, not {first.options.data}"
    ours, theirs = (o.validation or "a held-out share" for o in (run.options, first.options))
    return None if ours == theirs else f"validated on {ours}, not {theirs}"


def _other_vocabulary(first: Run, run: Run) -> str | None:
    if None in (first.vocabulary, run.vocabulary) or first.vocabulary == run.vocabulary:
        return None
    return "with another vocabulary, so compare bits per byte and not the losses per token"


def _other_batch(first: Run, run: Run) -> str | None:
    ours, theirs = (
        (c.batch_size * c.accumulation, c.model.block_size) for c in (run.options, first.options)
    )
    if ours == theirs:
        return None
    return f"with {ours[0]} × {ours[1]} tokens per step, not {theirs[0]} × {theirs[1]}"


def _other_steps(first: Run, run: Run) -> str | None:
    ours, theirs = run.options.steps, first.options.steps
    if ours == theirs or equal_cost(first, run):
        return None
    return f"with {ours:,} steps, not {theirs:,}"


def _other_windows(first: Run, run: Run) -> str | None:
    ours, theirs = (c.eval_batches * c.batch_size for c in (run.options, first.options))
    if ours == theirs:
        return None
    return f"validated on {ours or 'all'} windows, not {theirs or 'all'}"


DIFFERENCES: tuple[Callable[[Run, Run], str | None], ...] = (
    _other_data,
    _other_vocabulary,
    _other_batch,
    _other_steps,
    _other_windows,
)


def _unfinished(runs: Sequence[Run]) -> list[str]:
    left = [
        f"{run.name} ({run.step:,} of {run.config.steps:,} steps)"
        for run in runs
        if run.config is not None and not run.finished and not run.diverged
    ]
    lost = [
        f"{run.name} (at step {run.step:,} of {run.config.steps:,})"
        for run in runs
        if run.config is not None and run.diverged
    ]
    sentences = [f"Diverged: {_named(lost)}."] if lost else []
    return sentences + ([f"Not finished: {_named(left)}."] if left else [])


def _limited(runs: Sequence[Run]) -> list[str]:
    limits: dict[int, list[str]] = {}
    for run in runs:
        for limit in {e.limit for e in run.evaluations if e.limit is not None}:
            limits.setdefault(limit, []).append(run.name)
    return [
        f"Scored on the first {limit} examples of each task only: {_named(names)}."
        for limit, names in limits.items()
    ]


def _without_figures(runs: Sequence[Run]) -> list[str]:
    """A sentence if there is nothing to show: of exported models alone, and no evaluation."""
    if any(run.config is not None or run.evaluations for run in runs):
        return []
    names = _named([run.name for run in runs])
    return [f"No scores of {names}: `ddl eval` leaves them in the directory."]


def _named(names: Sequence[str]) -> str:
    return listed(names, MOST_NAMED)
