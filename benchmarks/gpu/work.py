"""The pieces of a call: jobs in worker processes, and commands. None can take the call with it.

Only these processes touch the device. One that hangs is killed after its piece's time, and one that
fails is replaced, because an illegal access leaves a CUDA context unusable.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu.log import Line, PieceError

START = str(Path(__file__).with_name("__main__.py"))
LIMIT = 60.0  # seconds of a piece, if nothing else is said
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have Linux kill this process when the call is killed; elsewhere it is left to its end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child in a session of its own, whose output lines are read with a deadline."""

    def __init__(
        self,
        command: Sequence[str],
        errors: IO[bytes] | int,
        folder: Path | None = None,
        **variables: str,
    ) -> None:
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=os.environ | variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.buffer = b""

    def line(self, deadline: float) -> str | None:
        """The next line, None at the end. Raises TimeoutError."""
        assert self.child.stdout is not None
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.child.stdout], [], [], left)[0]:
                raise TimeoutError
            read = os.read(self.child.stdout.fileno(), 2**16)
            if not read:
                return None
            self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> int:
        """Kill the child, and what it started, unless it has ended. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self.child.wait()


class Worker:
    """A process that has imported torch and waits for jobs (worker.py)."""

    def __init__(self, device: str, variables: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        command = [sys.executable, START, "worker", device]
        self.process = Process(command, self.errors, **variables)
        self.used = False

    def ask(self, message: Line, limit: float) -> Iterator[Line]:
        """Lines of one job. After a PieceError the worker is of no use."""
        self.used = True
        deadline = time.monotonic() + limit
        stdin = self.process.child.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        while True:
            try:
                text = self.process.line(deadline)
            except TimeoutError:
                raise PieceError(f"killed, no result after {limit:.0f} s") from None
            if text is None:
                raise PieceError(f"the process died: {self.last_words()}")
            answer = json.loads(text)
            if "line" not in answer:
                break
            yield answer["line"]
        if "error" in answer:
            raise PieceError(answer["error"], skipped=answer["memory"])

    def last_words(self) -> str:
        """The last line on standard error, or the exit status."""
        status = self.process.close()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"status {status}"

    def close(self) -> None:
        self.process.close()
        self.errors.close()


class Workers:
    """The worker in use. `ahead`: another one imports torch meanwhile, to be there when needed."""

    def __init__(self, device: str, *, ahead: bool, **variables: str) -> None:
        self.device, self.ahead, self.variables = device, ahead, variables
        self.current: Worker | None = None
        self.spare = self.start() if ahead else None

    def start(self) -> Worker:
        return Worker(self.device, self.variables)

    def worker(self, *, fresh: bool) -> Worker:
        """The worker for the next job. fresh: one that has done nothing yet."""
        if self.current is not None and fresh and self.current.used:
            self.drop()
        if self.current is None:
            self.current = self.spare or self.start()
            self.spare = self.start() if self.ahead else None
        return self.current

    def drop(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None

    def close(self) -> None:
        self.drop()
        if self.spare is not None:
            self.spare.close()
            self.spare = None


@dataclass
class Job:
    """A function of jobs.py, called in a worker."""

    name: str
    job: str
    workers: Workers
    arguments: dict[str, Any] = field(default_factory=dict)
    plan: str = ""  # DDL_PLAN, which is read once in a process
    fresh: bool = False
    limit: float = LIMIT

    def lines(self, limit: float) -> Iterator[Line]:
        # A plan stays with its process, so the job after one must not inherit it.
        worker = self.workers.worker(fresh=self.fresh or bool(self.plan))
        message = {"job": self.job, "arguments": self.arguments, "plan": self.plan}
        try:
            for line in worker.ask(message, limit):
                yield line | ({"plan": self.plan} if self.plan else {})
        except PieceError:
            self.workers.drop()
            raise
        if self.plan:
            self.workers.drop()


@dataclass
class Command:
    """A command whose output is read line by line.

    read: makes a record of a line, or None; called with None at the end, with the exit status.
    """

    name: str
    command: Sequence[str]
    read: Callable[[str | None, int | None], Line | None]
    variables: dict[str, str] = field(default_factory=dict)
    limit: float = LIMIT
    folder: Path | None = None

    def lines(self, limit: float) -> Iterator[Line]:
        deadline = time.monotonic() + limit
        try:
            process = Process(self.command, subprocess.STDOUT, self.folder, **self.variables)
        except OSError as error:
            raise PieceError(f"{self.command[0]} cannot be started: {error.strerror}") from None
        try:
            while (text := process.line(deadline)) is not None:
                if (line := self.read(text, None)) is not None:
                    yield {"what": self.name} | line
            status = process.child.wait()
        except TimeoutError:
            yield from self._end(None)
            raise PieceError(f"killed, not done after {limit:.0f} s") from None
        finally:
            process.close()
        yield from self._end(status)

    def _end(self, status: int | None) -> Iterator[Line]:
        if (line := self.read(None, status)) is not None:
            yield {"what": self.name} | line
