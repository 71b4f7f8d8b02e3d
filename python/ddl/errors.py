"""Errors that a user can fix. Each message is one sentence, which the command line prints."""

from __future__ import annotations

__all__ = [
    "IMPORTED_ONCE",
    "NEWER",
    "DivergedError",
    "InputError",
    "OtherProcessError",
    "ProcessError",
    "first_line",
]

# Ends the message about a field that a file has and this version does not know.
NEWER = "if a newer ddl-rs wrote it, install that version"

IMPORTED_ONCE = (
    "`ddl` must be imported once per process, because torch registers its operators once, got a"
    " second import or a reload: restart Python"
)


class InputError(ValueError):
    """An argument, option or file cannot be used; the message is one sentence."""


class DivergedError(RuntimeError):
    """The training loss became NaN or infinite; the message is one sentence."""


class ProcessError(RuntimeError):
    """One of several processes ends alone, or is left alone; the message says which, and why."""


class OtherProcessError(RuntimeError):
    """Another process of this run has failed, and says why; this one ends with it, silently."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"process {rank} has failed")


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to quote in one of our messages."""
    return (str(error).strip() or repr(error)).splitlines()[0]
