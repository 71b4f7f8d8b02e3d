"""The listing in a sweep's directory: the names of its runs."""

from __future__ import annotations

import json

from ddl.files import make_directory, write_text
from ddl.lab.config.sweeps import Sweep

LISTING = "sweep.json"


def write_listing(sweep: Sweep) -> None:
    """Write the names of the runs into the sweep's directory, for `ddl compare`.

    Processes that train the same sweep at once write the same file, atomically.
    """
    make_directory(sweep.out)
    names = [run.name for run in sweep.by_variant()]
    write_text(sweep.out / LISTING, json.dumps({"runs": names}, indent=2) + "\n")
