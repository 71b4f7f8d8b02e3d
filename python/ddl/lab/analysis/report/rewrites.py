"""The files of `ddl inspect` and of `--record-every` in a run, read and checked for their shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError, first_line
from ddl.lab.train.json_lines import finite, number
from ddl.lab.train.runs import INSPECTED, RunDirectory
from ddl.recording.quantities import BINS

from ..inspection import FILE, read_summary
from ..recordings import Row, Training, sublayers_of, training_of


class Depth(NamedTuple):
    """inspection.json of L sublayers and m value channels; `Inspection` explains the quantities.

    text: what was measured on. eigenvalues: (L, BINS), shares of the tokens; None without rewrites.
    survival: (L + 1, L + 1); None of an additive stream, which erases nothing. coherence: (L, L).
    channels: (L + 1, m), mean norms before each sublayer and at the end.
    """

    text: str
    tokens: int
    sublayers: list[str]
    eigenvalues: list[Row] | None
    survival: list[Row] | None
    coherence: list[Row]
    channels: list[Row]


def read_depth(path: Path) -> Depth | None:
    """Findings of `ddl inspect` in a run or a model; None if it was not run.

    Raises InputError if the file is damaged.
    """
    file = path / INSPECTED / FILE
    try:
        return _depth(read_summary(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            "runs", "have inspections of `ddl inspect`", f"{file}: {first_line(error)}"
        ) from error


def read_training(path: Path) -> Training | None:
    """A run's recordings over its training; None if it has none.

    Raises InputError if the file is damaged.
    """
    recordings = RunDirectory(path).recordings
    by_step = {record["step"]: record for record in recordings.read()}
    records = [by_step[step] for step in sorted(by_step)]
    try:
        return training_of(records) if records else None
    except ValueError as error:
        raise InputError(
            "runs", "have recordings of `ddl train`", f"{recordings.path}: {error}"
        ) from error


def _depth(found: dict[str, Any]) -> Depth:
    names, sublayers = sublayers_of(found), found["sublayers"]
    size = len(names)
    rewrites = "write_norm" not in sublayers[0] or "beta" in sublayers[0]
    counts = [s.get("eigenvalue_counts") for s in sublayers]
    eigenvalues = [_shares(row) for row in _matrix(counts, size, BINS)] if rewrites else None
    before = [_of(s, "channel_norm", "mean") for s in sublayers]
    norms = [*before, _of(sublayers[-1], "channel_norm_after", "mean")]
    channels = max(1, len(norms[0])) if isinstance(norms[0], list) else 1
    return Depth(
        str(found.get("text")),
        int(number(found, "tokens") or 0),
        names,
        eigenvalues,
        _matrix(found.get("survival"), size + 1, size + 1, "survival")
        if rewrites or "survival" in found
        else None,
        _matrix(found.get("coherence"), size, size, "coherence"),
        _matrix(norms, size + 1, channels, "channel_norm"),
    )


def _of(sublayer: dict[str, Any], quantity: str, field: str) -> Any:
    statistics = sublayer.get(quantity)
    return statistics.get(field) if isinstance(statistics, dict) else None


def _matrix(found: Any, rows: int, columns: int, name: str = "eigenvalue_counts") -> list[Row]:
    """Rows of numbers, None for what is none. Raises ValueError for another shape."""
    shaped = isinstance(found, list) and len(found) == rows
    if not shaped or not all(isinstance(row, list) and len(row) == columns for row in found):
        raise ValueError(f"no `{name}` of {rows} × {columns} numbers")
    return [[finite(value) for value in row] for row in found]


def _shares(counts: Row) -> Row:
    total = sum(count or 0 for count in counts)
    return [None if count is None or not total else count / total for count in counts]
