"""A limit on what might wait for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class LateError(BaseException):
    """No Exception, which libraries catch to go on."""


@contextmanager
def in_time(seconds: int = 60) -> Iterator[None]:
    """Raise LateError in the block after these seconds, also while it opens a pipe."""

    def late(*_: object) -> None:
        raise LateError(f"not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
