"""Comparison of a run with an earlier one: which rows are slower than is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError, reason_of
from ddl.lab.config import BenchConfig

from . import jsonl

BENCHMARK = "bench"  # `benchmark` in a record of `ddl bench`
MACHINE = ("cpu", "cores", "simd", "system")

Record = dict[str, Any]


class Comparison(NamedTuple):
    """Sentences: rows that became slower, and what could not be compared or is not comparable."""

    regressions: list[str]
    notes: list[str]


def read_baseline(path: Path) -> Record:
    """The last record of `ddl bench` in a file; raises InputError if there is none."""
    try:
        records = jsonl.read(path)
    except OSError as error:
        got = f"{path}: {reason_of(error)}"
        raise InputError("baseline", "be a file that `--out` wrote", got) from error
    ours = [r for r in records if isinstance(r, dict) and r.get("benchmark") == BENCHMARK]
    if not ours:
        got = f"{path} without a record of `ddl bench`"
        raise InputError("baseline", "be a file that `--out` wrote", got)
    return ours[-1]


def require_sizes(before: Record, sizes: dict[str, Any]) -> None:
    """Raise InputError if the earlier run had other sizes: its times say nothing about these."""
    for name, size in sizes.items():
        if before["config"].get(name) != size:
            was = json.dumps(before["config"].get(name))
            raise InputError(name, f"be {was} as in the baseline", json.dumps(size))


def compare(run: Record, before: Record, config: BenchConfig) -> Comparison:
    """Compare the rows of a run with those of an earlier one, by name."""
    old = {_name(row): row for row in before["results"] if "ratio" in row}
    rows = [row for row in run["results"] if "ratio" in row]
    missing = [_name(row) for row in rows if _name(row) not in old]
    regressions = []
    for row in rows:
        if _name(row) in old:
            regressions += slower(row, old[_name(row)], config.min_ratio, config.max_p95)
    if missing and len(missing) == len(rows):
        regressions.append("nothing was compared, because the baseline has times of no such row")
    notes = other_machine(run, before)
    if missing:
        notes.append(f"the baseline has no times of {', '.join(missing)}: not compared")
    return Comparison(regressions, notes)


def slower(row: Record, was: Record, min_ratio: float, max_p95: float) -> list[str]:
    """Sentences that say by how much a row is slower than allowed."""
    found = []
    kept = row["ratio"] / was["ratio"]
    if not kept >= min_ratio:  # also if it is NaN
        found.append(
            f"{_name(row)}: its ratio must be at least {min_ratio:g} of {was['ratio']:.3f}, got"
            f" {row['ratio']:.3f}, which is {kept:.2f} of it"
        )
    grown = row["p95_over_baseline"] / was["p95_over_baseline"]
    if not grown <= max_p95:
        found.append(
            f"{_name(row)}: its 95th percentile must be at most {max_p95:g} of"
            f" {was['p95_over_baseline']:.3f} medians of its baseline, got"
            f" {row['p95_over_baseline']:.3f}, which is {grown:.2f} of it"
        )
    return found


def other_machine(run: Record, before: Record) -> list[str]:
    """A sentence if the earlier run was on another machine or device, or with other threads."""
    pairs = {name: (before["machine"].get(name), run["machine"].get(name)) for name in MACHINE}
    pairs |= {name: (before.get(name), run.get(name)) for name in ("device", "threads")}
    differ = [f"{name} {was}, now {now}" for name, (was, now) in pairs.items() if was != now]
    if not differ:
        return []
    return [f"the baseline is of another machine or device ({'; '.join(differ)}), whose ratios "
            "differ for that reason, too"]  # fmt: skip


def _name(row: Record) -> str:
    return f"{row['part']} {row['what']}"
