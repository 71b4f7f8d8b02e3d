"""Requests to stop: Ctrl-C, and SIGTERM from a scheduler."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .processes import ALONE, Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has asked to stop, and which; call it to ask."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a stopped command, as shells report it: 130 for SIGINT, 143 for
        SIGTERM; 0 if nothing asked to stop."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signal(processes: Processes = ALONE) -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second Ctrl-C raises KeyboardInterrupt.

    So a step is never interrupted halfway, and what is saved is consistent. One of several
    processes gets each Ctrl-C twice, from the terminal and from torchrun, and is not interrupted.
    """
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if request() and number == signal.SIGINT and processes.alone:
            raise KeyboardInterrupt
        if not request() and processes.first:
            _say("\nStopping after this step" + "; Ctrl-C aborts" * processes.alone + ".\n")
        request.signal = request.signal or signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """Write to standard error from a signal handler.

    An error here would end the run in the middle of a step, without a checkpoint: Ctrl-C also ends
    the `tee` that reads the output. `print` would raise if the signal came during another one.
    """
    with suppress(AttributeError, OSError, ValueError):  # no standard error, or nobody reads it
        os.write(sys.stderr.fileno(), text.encode())
