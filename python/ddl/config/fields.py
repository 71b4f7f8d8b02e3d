"""Checks of configuration fields that the option table in ddl/options.py does not have."""

from __future__ import annotations

import typing
from typing import Any, Literal, get_args

from ddl.options import LARGEST_COUNT, check_choice, check_count, is_number, refuse


def require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        refuse(name, expected, got)


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
