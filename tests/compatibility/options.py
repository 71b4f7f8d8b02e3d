"""The command line as text: a line for each command that names all its options, and the choices."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from ddl.lab.cli import COMMANDS
from ddl.lab.config import PRESETS

PATH = "path"
# Some are refused at their defaults, one would break the line.
INSTEAD = {"hf": PATH, "out": PATH, "tokenizer": PATH, "prompt": "text"}


def command_lines() -> list[str]:
    """A call of every command with every option at its default, and a call of every preset."""
    lines = [f"train {preset}" for preset in PRESETS]
    for name, command in COMMANDS.items():
        words = [word for words in _words(command.options) for word in words]
        lines.append(shlex.join([name, *words]))
    return lines


def choices() -> list[str]:
    """Every choice of every option that has choices, as "train model.residual=additive"."""
    return [
        f"{name} {path}={choice}"
        for name, command in COMMANDS.items()
        for path, hint, _ in _fields(command.options)
        for choice in _literals(hint)
    ]


def _fields(kind: Any, inside: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, type and default of every field, those of nested configurations included."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        path, hint = inside + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{path}.")
        else:
            yield path, hint, field.default


def _words(kind: Any) -> Iterator[list[str]]:
    """The words with which the command line sets each field, to its default where that is right."""
    for path, hint, default in _fields(kind):
        flag = path.replace("_", "-")
        if default is dataclasses.MISSING:
            yield [*_literals(hint), PATH][:1]
        elif isinstance(default, bool):
            inside, dot, last = flag.rpartition(".")
            yield [f"--{flag}", f"--{inside}{dot}no-{last}"]  # the last one counts; none is True
        elif isinstance(default, tuple):
            yield [f"--{flag}", *map(str, default)]
        else:
            yield [f"--{flag}", str(INSTEAD.get(path, default))]


def _literals(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [choice for part in get_args(hint) for choice in _literals(part)]
