"""Options of `ddl report`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddl.fields import expand_paths, require, require_given


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about runs."""

    runs: tuple[Path, ...]
    """Run directories, also of runs that still train; directories that `ddl export` wrote; or
    directories with runs in them, as `ddl sweep` writes. The others are compared with the first
    run."""
    out: Path = Path("report.html")
    """HTML file to write. It replaces an earlier report."""
    overwrite: bool = False
    """Replace `out` even if it is another file than a report."""
    paired: bool = False
    """Also show how far each variant's validation loss lies from the baseline's, seed by seed, as
    `ddl compare --paired` does."""
    baseline: str | None = None
    """The variant that `--paired` compares with; None for that of the first run."""

    def __post_init__(self) -> None:
        expand_paths(self)
        require_given(len(self.runs) > 0, "runs", "at least one run directory")
        unused = self.paired or self.baseline is None
        require(unused, "baseline", "left out without `paired`", self.baseline, ("paired",))
