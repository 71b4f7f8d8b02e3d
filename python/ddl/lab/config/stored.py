"""Configurations as JSON, as config.json of a run and the manifests of checkpoints have them."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any, TypeVar

from ddl.errors import InputError, check_fields
from ddl.models.config import GPTConfig
from ddl.options import without_removed

Config = TypeVar("Config")
NO_VALUE = "–"  # for an empty list


def to_json(config: Any) -> str:
    """Convert a configuration to indented JSON; `from_json` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str)


def plain(config: Any) -> dict[str, Any]:
    """Convert a configuration to JSON's values."""
    return json.loads(to_json(config))


def options_by_name(config: Any) -> dict[str, str]:
    """Every option of a configuration as text, by its name on the command line without the dashes.

    The parts of a list are separated by spaces, as on the command line; an empty list is NO_VALUE.
    """
    return _flat(plain(config))


def _flat(values: dict[str, Any], inside: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{inside}{name}.")
        elif isinstance(value, list):
            found[inside + name] = " ".join(map(str, value)) or NO_VALUE
        else:
            found[inside + name] = str(value)
    return found


def from_json(kind: type[Config], text: str, file: str | Path = "config.json") -> Config:
    """Build a configuration dataclass from `to_json`'s text.

    file: where the text is from, for messages. A missing field takes its default. Raises InputError
    if the text is not JSON, a field is unknown or a value is invalid.
    """
    try:
        return _build(kind, json.loads(text))
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise InputError(file, f"hold a {kind.__name__}", error) from error


def _build(kind: type[Config], values: dict[str, Any], inside: str = "") -> Config:
    """Build a configuration dataclass; `inside` is the path to it, such as "model."."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise TypeError(f"{type(values).__name__} instead of an object")
    if kind is GPTConfig:
        values = without_removed(values)
    check_fields(kind, values, inside)
    made = dict(values)
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            made[name] = _build(hints[name], value, f"{inside}{name}.")
        elif isinstance(value, list):
            made[name] = tuple(value)
        elif name == "out" and value is not None:
            made[name] = Path(value)
    return kind(**made)
