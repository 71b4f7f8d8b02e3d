"""Files that a training run appends records to, metrics.jsonl and recordings.jsonl, and the numbers
in these records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddl.errors import InputError, first_line
from ddl.files import append_line, sync, write_text

Record = dict[str, Any]
LARGEST = 1e300  # of a number that is drawn or compared: sums and ranges of these are floats
LARGEST_EXPONENT = 700.0  # exp overflows a float64 above 709
LARGEST_STEP = 10**15  # no run has more; a larger one cannot be drawn


class JsonLines:
    """A file of records, each a line of JSON with the step it belongs to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Append a record."""
        append_line(self.path, json.dumps(record))

    def read(self) -> list[Record]:
        """All records so far; empty if there is no file. Raises InputError for a damaged line."""
        return _records(self._lines(), self.path)

    def cut(self, records: int) -> None:
        """Keep the first `records` lines. Raises InputError if one of them is damaged."""
        lines = self._lines()[:records]
        _records(lines, self.path)
        write_text(self.path, "".join(line + "\n" for line in lines))

    def cut_after(self, step: int) -> None:
        """Keep the records up to this step. Raises InputError for a damaged line."""
        if self.path.exists():
            records = [record for record in self.read() if record["step"] <= step]
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def sync(self) -> None:
        """Flush the file to the disk."""
        if self.path.exists():
            sync(self.path)

    def _lines(self) -> list[str]:
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _bad(self.path, first_line(error)) from error
        return text.split("\n")[:-1]  # a process that goes on or was killed may leave half a line


def _records(lines: list[str], path: Path) -> list[Record]:
    return [parse(line, i, path) for i, line in enumerate(lines, start=1)]


def parse(line: str, line_number: int, path: Path) -> Record:
    """The record in a line; `line_number` counts from 1. Raises InputError if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"line {line_number}: {first_line(error)}") from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        raise _bad(path, f"line {line_number} without")
    return dict(record)


def number(record: Any, key: str) -> float | None:
    """The number under a key of a record, as in `finite`; None if there is none."""
    return finite(record.get(key)) if isinstance(record, Mapping) else None


def finite(value: Any) -> float | None:
    """A value of JSON as a float of at most LARGEST; None for others, as null, NaN and true."""
    plain = isinstance(value, float | int) and not isinstance(value, bool)
    return float(value) if plain and -LARGEST <= value <= LARGEST else None


def _bad(path: Path, got: str) -> InputError:
    return InputError(
        path,
        "be lines of JSON with a step each",
        f"{got}; the run can do without the file, and then has no records from before",
    )


def perplexity(loss: float) -> float:
    """exp(loss), with a loss in nats per token; a huge loss gives a huge number instead of ∞."""
    return math.exp(min(loss, LARGEST_EXPONENT))
