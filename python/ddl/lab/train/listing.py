"""The listing in a sweep's directory: the names of its runs, and what was measured for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddl.files import make_directory, write_text
from ddl.lab.config.sweeps import Sweep

from .json_lines import finite

LISTING = "sweep.json"
SECONDS = "seconds_per_step"


class StepTime(NamedTuple):
    """Median seconds of a step of a variant and of its baseline, whose steps alternated.

    options: a checksum of both configurations, so that times of other options are not taken.
    """

    seconds: float
    baseline: float
    options: str


def write_listing(sweep: Sweep, times: Mapping[str, StepTime] | None = None) -> None:
    """Write the names of the runs into the sweep's directory, for `ddl compare`.

    times: by variant; None leaves those that are there. Processes that train the same sweep at once
    write the same file, atomically.
    """
    make_directory(sweep.out)
    times = read_times(sweep.out) if times is None else times
    values = {"runs": [run.name for run in sweep.by_variant()]}
    more = {SECONDS: {name: list(time) for name, time in times.items()}} if times else {}
    write_text(sweep.out / LISTING, json.dumps(values | more, indent=2) + "\n")


def read_times(out: Path) -> dict[str, StepTime]:
    """The times in a sweep's listing, by variant; without those that are damaged."""
    try:
        values = json.loads((out / LISTING).read_text(encoding="utf-8")).get(SECONDS, {})
        times = {
            name: StepTime(finite(own) or 0.0, finite(of_baseline) or 0.0, str(options))
            for name, (own, of_baseline, options) in values.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: time for name, time in times.items() if min(time.seconds, time.baseline) > 0}
