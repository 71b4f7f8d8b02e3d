"""Files that a training run appends records to: metrics.jsonl and recordings.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddl.errors import InputError, first_line
from ddl.files import append_line, sync, write_text

Record = dict[str, Any]
LARGEST_STEP = 10**15  # no run has more; a larger one cannot be drawn


class JsonLines:
    """A file of records, each a line of JSON with the step it belongs to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Append a record."""
        append_line(self.path, json.dumps(record))

    def read(self) -> list[Record]:
        """All records so far, none without a file; raise InputError if a line has none."""
        return _records(self._lines(), self.path)

    def cut(self, records: int) -> None:
        """Keep the first `records` lines; raise InputError if one is no record."""
        lines = self._lines()[:records]
        _records(lines, self.path)
        write_text(self.path, "".join(line + "\n" for line in lines))

    def cut_after(self, step: int) -> None:
        """Keep the records of this step and before."""
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
    return [parse(line, number, path) for number, line in enumerate(lines, start=1)]


def parse(line: str, number: int, path: Path) -> Record:
    """The record of a file's line with this number; raise InputError if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"line {number}: {first_line(error)}") from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        raise _bad(path, f"line {number} without")
    return dict(record)


def _bad(path: Path, got: str) -> InputError:
    return InputError(
        f"`{path}` must be lines of JSON with a step each, got {got}; the run can do without the"
        " file, and then has no records from before"
    )
