"""The configurations of runs, option by option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddl.config.stored import plain

from ..runs import Run

ALWAYS_DIFFERENT = ("out", "overwrite", "resume")  # they say nothing about what was trained
MISSING = "–"


class Options(NamedTuple):
    """Rows of tables: the name of an option as in `ddl train --help`, its value in each run."""

    runs: list[Run]
    different: list[tuple[str, list[str]]]
    all: list[tuple[str, list[str]]]


def options_of(runs: Sequence[Run]) -> Options:
    """The options of the runs that have a configuration."""
    configured = [run for run in runs if run.config is not None]
    flat = [_flat(plain(run.options)) for run in configured]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [(name, [options.get(name, MISSING) for options in flat]) for name in names]
    different = [
        (name, values)
        for name, values in rows
        if len(set(values)) > 1 and name not in ALWAYS_DIFFERENT
    ]
    return Options(configured, different, rows)


def _flat(values: dict[str, Any], inside: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{inside}{name}.")
        elif isinstance(value, list):
            found[inside + name] = " ".join(map(str, value)) or MISSING
        else:
            found[inside + name] = str(value)
    return found
