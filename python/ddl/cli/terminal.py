"""Output of the commands: to a console, an ASCII terminal, a full disk or a closed pipe."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from ddl import text
from ddl.text import escaped

if TYPE_CHECKING:
    from rich.console import Console


class _Guarded:
    """A stream that writes what a terminal would obey as escapes: messages quote files and names.

    rich writes past it, because `ddl.text.make_console` is as careful itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        # A progress bar of tqdm or ours goes back to the beginning of its line.
        back, end = text[:1] == "\r", text[:1] == "\r" and text[1:].endswith("\r")
        inner = text[1 if back else 0 : len(text) - end]
        self.unguarded.write("\r" * back + escaped(inner) + "\r" * end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """In the block, let nothing but text reach standard output and error, whoever writes it.

    They stay guarded if the block raises an error: Python prints it when it ends.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Guarded(unguarded(stream))) for stream in before)
    try:
        yield
    except Exception:
        raise
    except BaseException:
        sys.stdout, sys.stderr = before
        raise
    else:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for what may write anything, as a model's text into a file."""
    return stream.unguarded if isinstance(stream, _Guarded) else stream


def make_console(*, stderr: bool = False) -> Console:
    """Make a console of `ddl.text` for standard output or error."""
    return text.make_console(file=unguarded(sys.stderr if stderr else sys.stdout))


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
