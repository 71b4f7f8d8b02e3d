"""Errors that a user can mend: one sentence each, which the command line prints as it is."""

from __future__ import annotations

__all__ = ["DivergedError", "InputError", "first_line"]


class InputError(ValueError):
    """What the user gave cannot be used; the message is one sentence, all that the CLI prints."""


class DivergedError(RuntimeError):
    """The loss is not a number any more; the message is one sentence."""


def first_line(error: BaseException) -> str:
    """What another library's error says, cut to what fits into a sentence of ours."""
    return (str(error).strip() or repr(error)).splitlines()[0]
