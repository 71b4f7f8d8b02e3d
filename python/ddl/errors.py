"""Errors that a user can fix. Each message is one sentence, which the command line prints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DivergedError", "InputError", "OtherProcessError", "ProcessError"]

# Ends the message about a field that a file has and this version does not know.
NEWER = "if a newer ddl-rs wrote it, install that version"

IMPORTED_ONCE = (
    "`ddl` must be imported once per process, because torch registers its operators once, got a"
    " second import or a reload: restart Python"
)


class InputError(ValueError):
    """An argument, option or file cannot be used; the message is one sentence.

    "`argument` must expected, got got": argument is its name, or the path of a file. expected is
    such as "be positive" or "have shape (8, 16)". got is the value, and what to do next if that is
    not plain. others: further arguments that the sentence names, as `gate` or gate="mlp".
    """

    def __init__(
        self, argument: str | Path, expected: str, got: object, others: tuple[str, ...] = ()
    ):
        super().__init__(argument, expected, got, others)
        self.argument, self.expected, self.got, self.others = str(argument), expected, got, others

    @classmethod
    def sentence(cls, text: str, others: tuple[str, ...] = ()) -> InputError:
        """An error of no single argument, with this message."""
        return cls("", text, "", others)

    def __str__(self) -> str:
        if not self.argument:
            return self.expected
        return f"`{self.argument}` must {self.expected}, got {self.got}"

    def renamed(self, names: Mapping[str, str]) -> InputError:
        """The same error with other names for arguments: those of a file, or a command's flags.

        A path keeps its name: a directory may be called as an argument is.
        """
        expected, got = self.expected, str(self.got)
        for name in dict.fromkeys(self.others):
            new = names.get(name, name)
            expected = expected.replace(f"`{name}`", f"`{new}`").replace(f'{name}="', f'{new}="')
            got = got.replace(f"`{name}`", f"`{new}`")
        named = self.args[0]
        argument = named if isinstance(named, Path) else names.get(named, named)
        return InputError(argument, expected, got, tuple(names.get(n, n) for n in self.others))


class DivergedError(RuntimeError):
    """The training loss became NaN or infinite; the message is one sentence."""


class ProcessError(RuntimeError):
    """One of several processes ends alone, or is left alone; the message says which, and why."""

    def renamed(self, names: Mapping[str, str]) -> ProcessError:
        """The same error with other names for the arguments of the error that caused it."""
        cause = self.__cause__
        if not isinstance(cause, InputError):
            return self
        return ProcessError(str(self).replace(str(cause), str(cause.renamed(names))))


class OtherProcessError(RuntimeError):
    """Another process of this run has failed and prints the reason; this one ends silently."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"process {rank} has failed")


def check_fields(kind: type, values: Mapping[str, object], inside: str = "") -> None:
    """Raise TypeError if a file has an unknown field, or lacks one that has no default.

    inside: the path in the file to these fields, such as "model.".
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise TypeError(f"the unknown field {inside + name!r}; {NEWER}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise TypeError(f"no field {inside + name!r}")


def reason_of(error: BaseException) -> str:
    """Why the operating system refused, or another library, to quote in one of our messages."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to quote in one of our messages."""
    text = str(error).strip() or repr(error)
    # About a pickle, torch's first line says how to run the code in it, or is the number of a byte.
    if re.search("weights_only|Weights only load failed", text) or re.fullmatch(r"\d+", text):
        name = re.search(r"GLOBAL (\S+)", text)
        other = "it holds more than tensors, or is of another format"
        return f"it refers to {name[1]}" if name else other
    return text.splitlines()[0]


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join the names, `most` at most, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
