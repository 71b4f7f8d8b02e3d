"""Checks of numbers, names and options as sentences, where no tensor is involved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

from ddl.config.fields import LEAST_EPS_K

__all__ = [
    "LEAST_EPS_K",
    "LEAST_NORM_EPS",
    "check_between",
    "check_choice",
    "check_counts",
    "check_finite",
    "check_positive",
    "check_used",
    "is_number",
    "is_whole",
]

LEAST_NORM_EPS = 1e-36  # what they can put under a root


def check_positive(name: str, number: Any, *, optional: bool = False, least: float = 0.0) -> None:
    """Raises ValueError unless `number` is positive, finite and not below `least`.

    None passes where it is optional.
    """
    if number is None and optional:
        return
    if not is_number(number) or not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be a positive finite number, got {number!r}")
    if number < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {number!r}")


def check_finite(name: str, number: Any) -> None:
    """Raises ValueError unless `number` is a finite number."""
    if not is_number(number) or not -math.inf < number < math.inf:
        raise ValueError(f"`{name}` must be a finite number, got {number!r}")


def check_between(name: str, number: Any, low: float, high: float) -> None:
    """Raises ValueError unless low < number < high."""
    if not is_number(number) or not low < number < high:
        raise ValueError(
            f"`{name}` must be between {low} and {high}, both excluded, got {number!r}"
        )


def check_counts(**numbers: Any) -> None:
    """Raises ValueError unless every one is an integer of at least 1, NumPy's included."""
    for name, number in numbers.items():
        if not is_whole(number) or number < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}")


def check_choice(name: str, choice: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `choice` is one of `choices`."""
    if choice not in choices:
        known = " or ".join(f'"{known}"' for known in choices)
        raise ValueError(f"`{name}` must be {known}, got {choice!r}")


def check_used(**options: tuple[Any, Any, bool, str]) -> None:
    """Raises ValueError for an option that has no effect, unless it has its default value.

    options: (given, default, whether it has an effect, when it has) by name.
    """
    for name, (given, default, used, when) in options.items():
        if given != default and not used:
            raise ValueError(f"`{name}` must be left at {default!r} unless {when}, got {given!r}")


def is_whole(number: Any) -> bool:
    """Whether it is an integer, NumPy's included."""
    return isinstance(number, (Integral, torch.SymInt)) and not isinstance(number, bool)


def is_number(number: Any) -> bool:
    """Whether it is a real number."""
    return isinstance(number, (float, Real, torch.SymFloat)) and not isinstance(number, bool)
