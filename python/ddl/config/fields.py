"""Checks of a configuration's fields. Plain Python, no torch in here."""

from __future__ import annotations

import math
import typing
from typing import Any, Literal, get_args

from ddl.errors import InputError

LEAST_EPS_K = 1e-18  # what the operators can square in float32 (src/problem/)


def require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise InputError(f"`{name}` must be {expected}, got {got!r}")


def check_literals(config: Any) -> None:
    """Hold every `Literal` field of a dataclass to its list of known values."""
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            value, known = getattr(config, name), get_args(hint)
            require(value in known, name, f"one of {', '.join(known)}", value)


def check_counts(config: Any, names: str, *, least: int = 1) -> None:
    for name in names.split():
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= least, name, f"a whole number of at least {least}", value)


def check_finite(config: Any, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        number = isinstance(value, int | float) and math.isfinite(value)
        require(number, name, "a finite number", value)


def check_positive(config: Any, names: str) -> None:
    for name in names.split():
        value = getattr(config, name)
        number = isinstance(value, int | float) and math.isfinite(value)
        require(number and value > 0, name, "a positive number", value)
