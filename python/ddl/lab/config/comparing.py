"""Options of `ddl compare`, `report` and `sweep`. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddl.fields import check_counts, check_literals, expand_paths, require, require_given

Over = Literal["steps", "tokens", "flops", "seconds"]


@dataclass(frozen=True)
class CompareConfig:
    """Compare runs."""

    runs: tuple[Path, ...]
    """Run directories, also of runs that still train; directories that `ddl export` wrote, for the
    scores that `ddl eval` left in them; or directories with runs in them, as `ddl sweep` writes.
    The others are compared with the first run."""
    data: Path | None = None
    """UTF-8 text on which the last checkpoint of each run is measured: its loss, with the run's own
    tokenizer, and how fast the model generates on this machine. This loads the models and takes
    time. None shows what the runs have recorded."""
    paired: bool = False
    """Also group the runs into variants, which have the same options except the seed, and print how
    far each variant's validation loss lies from the baseline's: the mean over the seeds that both
    have, with a 95 % interval."""
    baseline: str | None = None
    """The variant that `--paired` compares with; None for that of the first run."""
    plot: Path | None = None
    """PNG file for the loss curves; None draws nothing."""
    over: Over = "steps"
    """`--plot` draws the losses over steps, tokens, FLOPs (forward and backward), or seconds of the
    training steps."""
    json: bool = False
    """Print one JSON document instead of tables."""
    markdown: bool = False
    """Print tables in Markdown."""

    def __post_init__(self) -> None:
        expand_paths(self)
        _check_runs(self)
        check_literals(self)
        unused = self.over == "steps" or self.plot is not None
        require(unused, "over", "left at 'steps' without `plot`", self.over, ("plot",))
        require(
            not (self.json and self.markdown), "markdown", "left out with `json`", True, ("json",)
        )


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
        _check_runs(self)


@dataclass(frozen=True)
class SweepConfig:
    """Train every run of a sweep."""

    file: Path
    """TOML file: preset, out, seeds, [variants.NAME] and [options], as in docs/comparing.md."""
    index: int | None = None
    """Train only the run with this number, as a task of a scheduler's array; runs are numbered from
    0. None trains all, one after the other."""
    count: bool = False
    """Print the number of runs and train nothing."""
    list: bool = False
    """Print each run's number, name and state, and train nothing."""

    def __post_init__(self) -> None:
        expand_paths(self)
        check_counts(self, "index", least=0)
        require(not (self.count and self.list), "list", "left out with `count`", True, ("count",))
        alone = self.index is None or not (self.count or self.list)
        require(alone, "index", "left out with `count` and `list`", self.index, ("count", "list"))


def _check_runs(config: CompareConfig | ReportConfig) -> None:
    require_given(len(config.runs) > 0, "runs", "at least one run directory")
    unused = config.paired or config.baseline is None
    require(unused, "baseline", "left out without `paired`", config.baseline, ("paired",))
