"""The log of a run, one JSON record per line, and the time budget that the run has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import record
from common.report import progress

Line = dict[str, Any]


class Log:
    """Lines of a run, appended to a file at once. Each names device, software and commit."""

    def __init__(self, where: Line, path: Path | None) -> None:
        names = ("date", "device", "driver", "torch", "ddl", "commit", "native", "plan")
        self.common = {name: where[name] for name in names}
        self.path = path
        self.lines: list[Line] = []

    def write(self, part: str, **fields: Any) -> None:
        line = {"part": part, **fields}
        self.lines.append(line)
        if self.path is not None:
            record.append(self.path, self.common | line)

    def attempt(self, part: str, what: str, work: Callable[[], list[Line]]) -> None:
        """Write the lines that `work` returns, or the reason why it returned none.

        An OutOfMemoryError is noted as skipped; every other exception is a fault. In both cases the
        run continues with the next piece.
        """
        progress(f"{part}: {what}")
        try:
            lines = work()
        except torch.OutOfMemoryError:
            self.write(part, what=what, skipped="left out, too little memory for it")
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            self.write(part, what=what, error=f"{type(error).__name__}: {reason}")
        else:
            for line in lines:
                self.write(part, **line)

    @property
    def faults(self) -> list[str]:
        """Failed checks and exceptions, a line each."""
        reasons = [(x, x.get("error") or x.get("gate", {}).get("red")) for x in self.lines]
        return [f"{x['part']}, {x['what']}: {reason}" for x, reason in reasons if reason]

    @property
    def omissions(self) -> list[str]:
        """Pieces that were skipped for lack of time or memory, a line each."""
        left = [(x, x.get("what", f"{len(x.get('pieces', ()))} pieces")) for x in self.lines]
        return [f"{x['part']}, {what}: {x['skipped']}" for x, what in left if "skipped" in x]


class Budget:
    """Minutes that a run may take."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self.started = minutes, time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def allows(self, seconds: float) -> bool:
        return self.spent + seconds <= 60 * self.minutes

    def run(
        self,
        log: Log,
        part: str,
        pieces: dict[str, Callable[[], list[Line]]],
        expected: float,
    ) -> None:
        """Attempt the pieces of a part in order while there is time, and log those left out.

        expected: estimated seconds of the first piece. Later ones are expected to take as long as
        the slowest before them.
        """
        names, took = list(pieces), expected
        for index, name in enumerate(names):
            if not self.allows(took):
                log.write(
                    part,
                    skipped=f"left out, the {self.minutes:g} minutes of --minutes are spent",
                    pieces=names[index:],
                )
                return
            started = time.monotonic()
            log.attempt(part, name, pieces[name])
            took = max(took if index else 0.0, time.monotonic() - started)
