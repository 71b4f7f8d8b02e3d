"""The configurations of runs, option by option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddl.lab.config.stored import options_by_name

from .runs import Run

ALWAYS_DIFFERENT = ("out", "overwrite", "resume")  # they say nothing about what was trained


class Options(NamedTuple):
    """Rows of tables: the name of an option as in `ddl train --help`, its value in each run."""

    runs: list[Run]
    different: list[tuple[str, list[str]]]
    all: list[tuple[str, list[str]]]


def options_of(runs: Sequence[Run]) -> Options:
    """The options of the runs that have a configuration."""
    configured = [run for run in runs if run.config is not None]
    flat = [options_by_name(run.options) for run in configured]
    rows = [(name, [options[name] for options in flat]) for name in (flat[0] if flat else ())]
    different = [
        (name, values)
        for name, values in rows
        if len(set(values)) > 1 and name not in ALWAYS_DIFFERENT
    ]
    return Options(configured, different, rows)
