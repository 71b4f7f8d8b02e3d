"""Records of benchmarks: of `ddl bench --out`, and of the repository's benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError
from ddl.lab.bench import jsonl
from ddl.lab.bench.compare import BENCHMARK
from ddl.lab.bench.record import describe
from ddl.lab.bench.run import tabulate
from ddl.lab.train.runs import METRICS, RECORDINGS

from .tail import Cached
from .words import figure, rows, safe_line, wrap

SUFFIX = ".jsonl"
MOST = 8  # records of a file that are shown, the newest
MOST_BYTES = 2**26  # bytes of a file that is read
WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError)


class Benchmarks(NamedTuple):
    """A file of benchmark records: for each, the newest first, a title, a table and notes.

    problem: a sentence if it has none or cannot be read.
    """

    name: str
    records: tuple[tuple[str, str, str], ...]
    problem: str | None = None

    def text(self, width: int) -> str:
        """All of it, the titles and notes in lines of at most `width` cells."""
        blocks = [
            "\n".join([wrap(title, width), "", table, "", wrap(notes, width)]).strip("\n")
            for title, table, notes in self.records
        ]
        return "\n\n\n".join([*blocks, *([wrap(self.problem, width)] if self.problem else [])])


class RecordFiles:
    """A file of records, or those in a folder; files that appear there are found.

    named: a user has named it, so a sentence says if it is not there, or none of benchmarks.
    """

    def __init__(self, path: Path, *, named: bool) -> None:
        self.path, self._named = path, named
        self._files: dict[Path, Cached[tuple[tuple[str, str, str], ...]]] = {}

    def poll(self) -> list[Benchmarks]:
        """Read the files that are new or have changed."""
        paths = self._paths()
        self._files = {path: self._files.get(path) or Cached(path, read) for path in paths}
        found = []
        for path, file in self._files.items():
            file.poll()
            if file.value or (file.problem and self._named):
                found.append(Benchmarks(safe_line(path.name), file.value or (), file.problem))
        if self._named and not found:
            sentence = f"{safe_line(self.path)} must be records of benchmarks, got none there."
            found.append(Benchmarks(safe_line(self.path.name), (), sentence))
        return found

    def _paths(self) -> list[Path]:
        try:
            names = sorted(os.listdir(self.path))
        except NotADirectoryError:
            return [self.path]
        except OSError:
            return [self.path] if self._named else []
        ours = [n for n in names if n.endswith(SUFFIX) and n not in (METRICS, RECORDINGS)]
        return [self.path / name for name in ours]


def read(path: Path) -> tuple[tuple[str, str, str], ...]:
    """The records of a file, as text, the newest first; raises InputError if it is too large."""
    if path.stat().st_size > MOST_BYTES:
        raise InputError.sentence(f"{path.name} must have at most {MOST_BYTES:,} bytes, got more")
    records = [r for r in jsonl.read(path) if isinstance(r, dict) and "benchmark" in r]
    return tuple(tabulated(record) for record in reversed(records[-MOST:]))


def tabulated(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """A record's title, its results as a table, and notes; a sentence for what cannot be shown."""
    title = safe_line(record["benchmark"])
    try:
        title = safe_line(f"{title}: {describe(dict(record))}")
    except WRONG:
        title += ": without a description of the machine"
    try:
        if record["benchmark"] == BENCHMARK:
            return title, *_of_ddl_bench(dict(record))
        return title, _of_fields(record["results"]), ""
    except WRONG:
        return title, "", "Its results are no table: they are in the file, and perhaps beside it."


def _of_ddl_bench(record: dict[str, Any]) -> tuple[str, str]:
    table = tabulate(record)
    cells = [[safe_line(cell) for cell in row] for row in (table.columns, *table.rows)]
    return rows(cells, labels=table.labels), "\n".join(map(safe_line, (table.title, *table.notes)))


def _of_fields(results: Sequence[Mapping[str, Any]]) -> str:
    """The results' single numbers and words, a column for each field that differs."""
    fields = list(
        dict.fromkeys(
            name
            for result in results
            for name, value in result.items()
            if isinstance(value, str | int | float) and value != ""
        )
    )
    words = [f for f in fields if any(isinstance(result.get(f), str) for result in results)]
    numbers = [field for field in fields if field not in words]
    cells = [[_cell(result.get(field)) for field in (*words, *numbers)] for result in results]
    if not cells or not fields:
        raise ValueError("no results with fields")
    return rows([[safe_line(field) for field in (*words, *numbers)], *cells], labels=len(words))


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return figure(value) if isinstance(value, float) else safe_line(value)
