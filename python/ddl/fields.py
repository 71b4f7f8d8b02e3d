"""Checks of configuration fields that the option table in ddl/options.py does not have."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal, get_args

from ddl.errors import InputError
from ddl.options import LARGEST_COUNT, check_choice, check_count, is_number, refuse
from ddl.paths import at_home

NAMED_BY_TEXT = "a path, or a name that is none"
"""Marks a field of text, as in Annotated[str, NAMED_BY_TEXT], that may be a path."""


def path_fields(kind: Any) -> list[str]:
    """The fields of a configuration class that may hold paths."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [field.name for field in dataclasses.fields(kind) if _is_path(hints[field.name])]


def _is_path(hint: Any) -> bool:
    return hint in (Path, NAMED_BY_TEXT) or any(map(_is_path, get_args(hint)))


def expand_paths(config: Any) -> None:
    """Replace `~` and `~user` at the beginning of the paths in the fields; raise InputError if
    there is no such home directory, or a text is empty."""

    def expanded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(expanded, value))
        if not isinstance(value, str | Path):
            return value
        path = at_home(value, argument=name)  # which checks it
        return type(value)(path) if str(value).startswith("~") else value

    for name in path_fields(type(config)):
        object.__setattr__(config, name, expanded(getattr(config, name)))


def require_given(given: bool, name: str, what: str) -> None:
    """Raise InputError, which says what the field names, unless it was given."""
    if not given:
        raise InputError(name, f"name {what}", "nothing")


def require(
    condition: bool, name: str, expected: str, got: object, others: tuple[str, ...] = ()
) -> None:
    if not condition:
        refuse(name, expected, got, others)


def plain_numbers(config: Any) -> None:
    """Convert NumPy numbers in the fields to Python's, which JSON can hold."""
    for name, value in list(vars(config).items()):
        if is_number(value) and hasattr(value, "item"):
            object.__setattr__(config, name, value.item())


def check_literals(config: Any) -> None:
    """Raise unless every `Literal` field of a dataclass has one of its choices."""
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            check_choice(name, getattr(config, name), get_args(hint))


def check_counts(config: Any, names: str, *, least: int = 1, most: int = LARGEST_COUNT) -> None:
    """Raise unless the named fields are integers in [least, most] or, as their default, None."""
    for name in names.split():
        optional = getattr(type(config), name) is None
        check_count(name, getattr(config, name), least=least, most=most, optional=optional)
