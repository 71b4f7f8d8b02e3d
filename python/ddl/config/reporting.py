"""Options of `ddl report`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .fields import require


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about runs."""

    runs: tuple[Path, ...]
    """Run directories, of runs that go on, too; directories that `ddl export` wrote; or directories
    with runs in them, as `ddl sweep` writes. The first run is the one that others are compared
    with."""
    out: Path = Path("report.html")
    """HTML file to write. It replaces an earlier report."""
    overwrite: bool = False
    """Also replace a file that is no report."""
    paired: bool = False
    """Also show how far each variant's validation loss lies from the baseline's, seed by seed, as
    `ddl compare --paired` does."""
    baseline: str | None = None
    """The variant that `--paired` compares with; None for that of the first run."""

    def __post_init__(self) -> None:
        require(len(self.runs) > 0, "runs", "at least one run directory", None)
        unused = self.paired or self.baseline is None
        require(unused, "baseline", "left out without `paired`", self.baseline)
