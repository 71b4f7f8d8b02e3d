"""Options of `ddl explore`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddl.errors import InputError
from ddl.fields import expand_paths
from ddl.options import check_positive

A_RUN = "`ddl train tiny --out runs/tiny` makes one in seconds"


@dataclass(frozen=True)
class ExploreConfig:
    """Look at runs in the terminal while they train."""

    runs: tuple[Path, ...]
    """Run directories, or folders with runs in them, as `ddl sweep` writes. Runs that appear in a
    folder later are shown, too."""
    interval: float = 1.0
    """Seconds between two readings of the files."""

    def __post_init__(self) -> None:
        expand_paths(self)
        if not self.runs:
            raise InputError(
                "runs",
                "be run directories or folders with runs",
                f"none: {A_RUN}, and `ddl explore runs` shows it",
            )
        check_positive("interval", self.interval)
