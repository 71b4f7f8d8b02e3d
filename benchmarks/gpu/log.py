"""The records of a call, each on disk as soon as it is known, and the time that the call has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddl.lab.bench import jsonl
from ddl.lab.bench.tables import progress

Line = dict[str, Any]
# Fields of the machine that every record repeats, so that it can be quoted alone.
COMMON = ("date", "device", "driver", "torch", "ddl", "commit", "native")


class PieceError(Exception):
    """A piece gave no result: it raised, died or took too long. `skipped`: that is no failure."""

    def __init__(self, reason: str, *, skipped: bool = False) -> None:
        super().__init__(reason)
        self.skipped = skipped


class Piece(Protocol):
    """Work that takes at most seconds to a minute, in a process that can be killed."""

    name: str
    limit: float  # seconds

    def lines(self, limit: float) -> Iterator[Line]:
        """Do it within `limit` seconds; raises PieceError."""


@dataclass
class Part:
    """Pieces of one kind, the most important first."""

    name: str
    seconds: float  # set aside for it in a call of `minutes`
    expected: float  # seconds of the first piece
    pieces: Iterable[Piece]


class Log:
    """Lines of a call, appended to a file at once."""

    def __init__(self, path: Path | None) -> None:
        self.common: Line = {}
        self.path = path
        self.lines: list[Line] = []

    def write(self, part: str, **fields: Any) -> None:
        if part == "machine" and not self.common:
            self.common = {name: fields[name] for name in COMMON if name in fields}
        line = self.common | {"part": part} | fields
        self.lines.append(line)
        if self.path is not None:
            jsonl.append(self.path, line)

    def attempt(self, part: str, piece: Piece, limit: float) -> bool:
        """Write the lines of a piece as they come, or why it did not end well; whether it did."""
        progress(f"{part}: {piece.name}")
        try:
            for line in piece.lines(limit):
                self.write(part, **line)
        except PieceError as error:
            reason = {"skipped" if error.skipped else "error": str(error)}
            self.write(part, what=piece.name, **reason)
            return False
        return True


def faults(lines: Iterable[Line]) -> list[str]:
    """Failed checks and pieces without a result, a line each."""
    return [f"{x['part']} {x['what']}: {reason}" for x in lines if (reason := fault(x))]


def omissions(lines: Iterable[Line]) -> list[str]:
    """The jobs that were not run for lack of time, memory or a GPU, a line each."""
    left = [(x, x.get("what", f"{len(x.get('pieces', ()))} pieces")) for x in lines]
    return [f"{x['part']} {what}: {x['skipped']}" for x, what in left if "skipped" in x]


def fault(line: Line) -> str | None:
    """Why a line is a failure, or None."""
    return line.get("error") or line.get("gate", {}).get("red")


def measured(lines: list[Line], *parts: str) -> list[Line]:
    """The lines of some parts that hold results, red ones included."""
    found = [line for line in lines if line["part"] in parts]
    return [line for line in found if "error" not in line and "skipped" not in line]


class Budget:
    """The seconds of a call, divided among its parts. A part may also use what earlier ones left.

    seconds: of all parts together, as they were set aside; they are scaled to `minutes`.
    """

    def __init__(self, minutes: float, seconds: float) -> None:
        self.minutes, self.started = minutes, time.monotonic()
        self.scale = 60 * minutes / seconds
        self.promised = 0.0

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def run(self, log: Log, part: Part) -> None:
        """Attempt the pieces of a part in order while its time lasts, and log those left out.

        A later piece is expected to take as long as the one before it, if that ended well.
        """
        self.promised += part.seconds * self.scale
        pieces, took = list(part.pieces), part.expected
        for index, piece in enumerate(pieces):
            if self.spent + took > self.promised:
                reason = f"no time left in a call of {self.minutes:g} minutes"
                log.write(part.name, skipped=reason, pieces=[x.name for x in pieces[index:]])
                return
            started = time.monotonic()
            ended = log.attempt(part.name, piece, min(piece.limit, 60 * self.minutes - self.spent))
            took = time.monotonic() - started if ended else part.expected
