"""The seconds that a run has trained, without evaluations, samples, recordings and saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of training steps. `paused` stops it; its blocks must not be nested.

    before: seconds of the run's steps before this process; None if they are not known.
    """

    def __init__(self, before: float | None = 0.0) -> None:
        self._before = before
        self._began = self._lap_began = time.perf_counter()
        self._paused_at: float | None = None

    @property
    def total(self) -> float | None:
        """Seconds since the run began; None if those of an earlier process are not known."""
        return None if self._before is None else self._before + self._now() - self._began

    def lap(self) -> float:
        """Seconds since the last call, or since this process began."""
        now = self._now()
        seconds, self._lap_began = now - self._lap_began, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        self._paused_at = time.perf_counter()
        try:
            yield
        finally:
            left_out = time.perf_counter() - self._paused_at
            self._paused_at = None
            self._began += left_out
            self._lap_began += left_out

    def _now(self) -> float:
        return time.perf_counter() if self._paused_at is None else self._paused_at
