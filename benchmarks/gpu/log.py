"""The records of a call, each on disk as soon as it is known, and the time that the call has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl.lab.bench import jsonl
from ddl.lab.bench.tables import progress

Line = dict[str, Any]
# Fields of the machine that every record repeats, so that it can be quoted alone.
COMMON = ("date", "device", "driver", "torch", "ddl", "commit", "native")


class PieceError(Exception):
    """A piece gave no result: it raised, died or took too long."""


@dataclass
class Part:
    """Pieces, each with a name, a limit in seconds, and `lines(limit)`, its records."""

    name: str
    seconds: float  # the most that it may take
    pieces: Sequence[Any]


class Log:
    """Lines of a call of so many minutes, appended to a file at once."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.common: Line = {}
        self.lines: list[Line] = []

    def write(self, part: str, **fields: Any) -> None:
        if part == "machine" and not self.common:
            self.common = {name: fields[name] for name in COMMON if name in fields}
        line = self.common | {"part": part} | fields
        self.lines.append(line)
        jsonl.append(self.path, line)

    def run(self, part: Part) -> None:
        """Attempt pieces while there is time for one like the last, and write which had none."""
        end, took = min(self.end, time.monotonic() + part.seconds), 0.0
        for index, piece in enumerate(part.pieces):
            started = time.monotonic()
            if started + took >= end:
                names = [left.name for left in part.pieces[index:]]
                what = f"{len(names)} pieces"
                self.write(part.name, what=what, skipped="no time left", pieces=names)
                return
            progress(f"{part.name}: {piece.name}")
            try:
                for line in piece.lines(min(piece.limit, end - started)):
                    self.write(part.name, **line)
            except PieceError as error:
                self.write(part.name, what=piece.name, error=str(error))
            except Exception as error:  # the call continues
                self.write(part.name, what=piece.name, error=repr(error))
            took = time.monotonic() - started
        print(f"{part.name}: done, {self.end - time.monotonic():.0f} s left", flush=True)


def fault(line: Line) -> str | None:
    """Why a line is a failure, or None."""
    return line.get("error") or line.get("gate", {}).get("red")


def measured(lines: list[Line], *parts: str) -> list[Line]:
    """The lines of some parts that hold results, red ones included."""
    return [x for x in lines if x["part"] in parts and not {"error", "skipped"} & x.keys()]
