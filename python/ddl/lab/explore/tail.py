"""Files that change while they are watched: only what is new is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ddl.errors import InputError, reason_of
from ddl.lab.train.json_lines import Record, parse

T = TypeVar("T")
REMEMBERED = 64  # bytes before the end that must still be there, else the file is another one


class Tail(Generic[T]):
    """The records of a growing file of JSON lines.

    read: makes of a record what is kept of it; it may raise what reading a wrong record raises.
    records: of all whole lines so far. problem: a sentence about lines that are no records, or
    about the file; None if all is well.
    """

    def __init__(self, path: Path, read: Callable[[Record], T]) -> None:
        self.path = path
        self._read = read
        self._begin()

    def _begin(self) -> None:
        self.records: list[T] = []
        self.problem: str | None = None
        self._inode = 0
        self._end = 0  # bytes that were read
        self._last = b""  # the last of them
        self._half = b""  # a line that is being written
        self._lines = 0
        self._wrong: list[int] = []

    def poll(self) -> bool:
        """Read what is new; return whether records or problem have changed.

        A file that was replaced or cut, as by a run that goes on from a checkpoint, is read again.
        """
        before = (len(self.records), self.problem, self._inode)
        try:
            self._feed(self._new_bytes())
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            self._begin()
            self.problem = f"{self.path.name} must be readable, got: {reason_of(error)}"
        return before != (len(self.records), self.problem, self._inode)

    def _new_bytes(self) -> bytes:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino == self._inode and status.st_size == self._end:
                return b""
            if status.st_ino == self._inode and status.st_size > self._end:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) == self._last:
                    return file.read()
            self._begin()
            self._inode = status.st_ino
            file.seek(0)
            return file.read()

    def _feed(self, new: bytes) -> None:
        self._end += len(new)
        self._last = (self._last + new)[-REMEMBERED:]
        *lines, self._half = (self._half + new).split(b"\n")
        for line in lines:
            self._lines += 1
            try:
                text = line.decode("utf-8", errors="replace")
                self.records.append(self._read(parse(text, self._lines, self.path)))
            except (InputError, ValueError, KeyError, TypeError, AttributeError):
                self._wrong.append(self._lines)
        if self._wrong:
            shown = ", ".join(
                [*map(str, self._wrong[:3]), *(["…"] if len(self._wrong) > 3 else [])]
            )
            lines_of = "line" if len(self._wrong) == 1 else "lines"
            self.problem = (
                f"{self.path.name} must be lines of JSON with a step each, got others:"
                f" {lines_of} {shown} left out"
            )


class Cached(Generic[T]):
    """The content of a file or directory, read again when that has changed.

    value: None if it does not exist or cannot be read. problem: why it cannot be read.
    """

    def __init__(self, path: Path, load: Callable[[Path], T]) -> None:
        self.path = path
        self._load = load
        self._seen: tuple[int, ...] | None = None
        self.value: T | None = None
        self.problem: str | None = None

    def poll(self) -> bool:
        """Read it if it has changed; return whether it has."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        except OSError:
            seen = None
        if seen == self._seen:
            return False
        self._seen, self.value, self.problem = seen, None, None
        if seen is None:
            return True
        try:
            self.value = self._load(self.path)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = reason_of(error)
            named = isinstance(error, InputError)  # its sentence names the file
            self.problem = reason if named else f"{self.path.name} must be readable, got: {reason}"
        return True
