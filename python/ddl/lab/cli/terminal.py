"""Around a command: an ASCII terminal, a full disk, a closed pipe, a signal that ends it."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """A signal ends the command as Ctrl-C does, so that no half-written files stay."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """In the block, raise Terminated for SIGTERM and SIGHUP, unless they are ignored or handled."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    main = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if main else ()
    own = [number for number in both if signal.getsignal(number) is signal.SIG_DFL]
    for number in own:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in own:
            signal.signal(number, signal.SIG_DFL)


def replace_closed_output() -> None:
    """Write to os.devnull if the shell has closed standard output or error, as `>&-` does.

    Python has None for it then. Opened first, os.devnull also takes the number of the closed one,
    which the next file would get otherwise: what native code prints would go into it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def escape_what_cannot_be_written() -> None:
    """Let an ASCII terminal show other characters, and bytes in a path, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send standard output to os.devnull, so that flushing at exit raises no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(AttributeError, OSError, ValueError):  # an object that is no file
        os.dup2(nowhere, sys.stdout.fileno())


def nobody_reads() -> bool:
    """Return whether the reader of standard output or error is gone, as after `| head`.

    A closed one is redirected to os.devnull, so that flushing at exit raises no error.
    """
    broken = any(map(_is_closed, (sys.stdout, sys.stderr)))
    if broken:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if _is_closed(stream):
                os.dup2(nowhere, stream.fileno())
    return broken


def _is_closed(stream: object) -> bool:
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # replaced by an object that is no file
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
