"""Comparison of a run with an earlier one: which rows are slower than is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError, reason_of
from ddl.lab.config import BenchConfig
from ddl.options import is_number

from . import jsonl

BENCHMARK = "bench"  # `benchmark` in a record of `ddl bench`
COMPARED = ("ratio", "p95_over_baseline")
LEAST = 1e-12  # of a ratio of two times, and 1 over it the largest
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
    if not ours or not _is_whole(ours[-1]):
        got = f"{path} without a whole record of `ddl bench`"
        raise InputError("baseline", "be a file that `--out` wrote", got)
    return ours[-1]


def _is_whole(record: Record) -> bool:
    """Whether a record has what a comparison reads; a file may have been written by hand."""
    fields = {"machine": dict, "config": dict, "results": list, "device": str}
    if not all(isinstance(record.get(name), kind) for name, kind in fields.items()):
        return False
    return all(
        isinstance(row, dict) and {"part", "what", "gate"} <= row.keys() and _has_times(row)
        for row in record["results"]
    )


def _has_times(row: Record) -> bool:
    """Whether a row has both figures that are compared, or none, as one that was wrong."""
    found = [row[name] for name in COMPARED if name in row]
    return not found or (len(found) == len(COMPARED) and all(map(_is_positive, found)))


def _is_positive(figure: Any) -> bool:
    return is_number(figure) and LEAST < figure < 1 / LEAST


def require_sizes(before: Record, sizes: dict[str, Any]) -> None:
    """Raise InputError if the earlier run had other sizes: its times say nothing about these."""
    for name, size in sizes.items():
        if before["config"].get(name) != size:
            was = json.dumps(before["config"].get(name))
            raise InputError(name, f"be {was} as in the baseline", json.dumps(size))


def compare(run: Record, before: Record, config: BenchConfig) -> Comparison:
    """Compare the rows of a run with those of an earlier one, by name."""
    old = {_name(row): row for row in before["results"]}
    regressions, missing = [], []
    for row in run["results"]:
        was = old.get(_name(row))
        if row["gate"]["red"] is not None:
            continue
        if was is None or "ratio" not in was:
            missing.append(_name(row))
            continue
        regressions += slower(row, was, config.min_ratio, config.max_p95)
    if missing and len(missing) == sum(row["gate"]["red"] is None for row in run["results"]):
        regressions.append("nothing was compared, because the baseline has times of no such row")
    return Comparison(regressions, [*other_machine(run, before), *without(missing)])


def slower(row: Record, was: Record, min_ratio: float, max_p95: float) -> list[str]:
    """Sentences that say by how much a row is slower than allowed."""
    found = []
    kept = row["ratio"] / was["ratio"]
    if not kept >= min_ratio:
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


def without(missing: list[str]) -> list[str]:
    """A sentence about rows that the earlier run has not, or has without times."""
    if not missing:
        return []
    return [f"the baseline has no times of {', '.join(missing)}: not compared"]


def _name(row: Record) -> str:
    return f"{row['part']} {row['what']}"
