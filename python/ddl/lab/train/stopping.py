"""Requests to stop: Ctrl-C, SIGHUP of a closed terminal, SIGTERM and SIGUSR1 of schedulers."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .processes import ALONE, Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Whether a signal requests a stop, and which; calling it requests one."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a stopped command, as shells report it: 128 + the signal's number, as
        130 for SIGINT; 0 without a request."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signal(processes: Processes = ALONE) -> Iterator[StopRequest]:
    """Turn the first of SIGNALS into a request; a second Ctrl-C raises KeyboardInterrupt.

    So a step is never interrupted halfway, and what is saved is consistent. One of several
    processes gets each Ctrl-C twice, from the terminal and from torchrun, and is not interrupted.
    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if request() and number == signal.SIGINT and processes.alone:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if not request() and processes.first:
            _say(f"\nStopping after this step{'; Ctrl-C aborts' if processes.alone else ''}.\n")
        request.signal = request.signal or signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    previous = {number: signal.signal(number, handle) for number in {*SIGNALS} - ignored}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_closed_terminal() -> None:
    """Let standard output and error go nowhere if their terminal is gone: writing there fails, and
    the failure would be reported as that of the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _say(text: str) -> None:
    """Write to standard error from a signal handler.

    An error here would end the run in the middle of a step, without a checkpoint: Ctrl-C also ends
    the `tee` that reads the output. `print` would raise if the signal came during another one.
    """
    with suppress(AttributeError, OSError, ValueError):  # no standard error, or nobody reads it
        os.write(sys.stderr.fileno(), text.encode())
