"""Errors that a user can mend: one sentence each, which the command line prints as it is."""

from __future__ import annotations

__all__ = ["DivergedError", "InputError", "first_line"]


class InputError(ValueError):
    """The input cannot be used; the message is one sentence, all that the command line prints."""


class DivergedError(RuntimeError):
    """The loss is not a number any more; the message is one sentence."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, short enough for a sentence of ours."""
    return (str(error).strip() or repr(error)).splitlines()[0]
