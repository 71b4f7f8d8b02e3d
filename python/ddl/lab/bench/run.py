"""A run of `ddl bench`: measure, describe, compare, record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddl.errors import InputError, first_line
from ddl.files import writing
from ddl.lab.config import PARTS, BenchConfig
from ddl.lab.device import pick_device

from . import jsonl, ops, record, residuals
from .clock import Clock, describe
from .compare import BENCHMARK, Comparison, compare, read_baseline, require_sizes
from .row import Row
from .setting import Setting, setting_of
from .tables import Table

# Bytes that are copied before each measurement: more than the caches hold.
COPIED = {"cpu": 2**25, "cuda": 2**28}
BUSY = 0.5  # processes for each core, before anything is measured
MEASURES: dict[str, Callable[[Setting, Clock], Iterator[Row]]] = {
    "ops": ops.rows,
    "blocks": residuals.blocks,
    "models": residuals.models,
}


class Run(NamedTuple):
    """The record of a run and, with a baseline, the comparison with it."""

    record: dict[str, Any]
    comparison: Comparison | None

    @property
    def failed(self) -> list[str]:
        """Rows that make the exit status 1: those that are wrong, and those that became slower."""
        wrong = [
            f"{row['part']} {row['what']}: not timed, because the check failed:"
            f" {row['gate']['red']}"
            for row in self.record["results"]
            if row["gate"]["red"] is not None
        ]
        return wrong + ([] if self.comparison is None else self.comparison.regressions)

    @property
    def notes(self) -> list[str]:
        """Sentences about how far the times can be trusted, and what was not compared."""
        load, cores = self.record["load_average"][0], self.record["machine"]["cores"]
        busy = [
            f"other work kept the machine busy (load average {load:g} on {cores} cores), so the "
            "times are too long and the ratios uncertain"
        ]
        compared = [] if self.comparison is None else self.comparison.notes
        return busy * (load > BUSY * cores) + compared

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "ok": not self.failed,
            "failed": self.failed,
            "notes": self.notes,
            "run": self.record,
        }


def bench(config: BenchConfig) -> Run:
    """Measure what `config` names; append the record to `config.out`.

    Raises InputError if the device, the baseline or the output file cannot be used, before anything
    is measured.
    """
    device = pick_device(config.device, "ddl")
    setting = setting_of(config, device)
    before = None if config.baseline is None else read_baseline(config.baseline)
    if before is not None:
        require_sizes(before, setting.sizes())
    if config.out is not None:
        require_appendable(config.out)
    threads = torch.get_num_threads()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        made = measure(config, setting, Clock(device, COPIED[device.type]))
    finally:
        torch.set_num_threads(threads)
    run = Run(made, None if before is None else compare(made, before, config))
    if config.out is not None:
        with writing(config.out):
            jsonl.append(config.out, made)
    return run


def measure(config: BenchConfig, setting: Setting, clock: Clock) -> dict[str, Any]:
    """The record of a run, in the form of the repository's benchmarks/results."""
    where = record.environment(record.checkout())
    parts = [part for part in PARTS if part in config.parts or not config.parts]
    try:
        found = [row for part in parts for row in MEASURES[part](setting, clock)]
    except torch.OutOfMemoryError as error:
        raise InputError(
            "batch",
            "be small enough for the check in float64 on this device",
            f"{setting.batch}: {first_line(error)}",
        ) from error
    return {
        **where,
        **describe(clock.device),
        "benchmark": BENCHMARK,
        "config": {"parts": parts, "repeats": setting.repeats, **setting.sizes()},
        "results": [row.to_json() for row in found],
    }


def require_appendable(path: Path) -> None:
    """Raise InputError unless a line can be appended to `path`, or it can be made."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise InputError("out", "be a file that can be written to", path)


def tabulate(made: dict[str, Any]) -> Table:
    """The rows of a record as a table."""
    at = made["config"]
    table = Table(
        f"d {at['hidden_size']}, m {at['value_channels']}, B {at['batch']}, T {at['time']}, "
        f"{record.counted(at['layers'], 'layer')}, {at['dtype']}, {made['device']}, "
        f"{record.counted(made['threads'], 'thread')}",
        ("part", "what", "against", "ms", "p95", "its ms", "ratio", "95 %", "GB/s", "% copy"),
        labels=3,
    )
    for row in made["results"]:
        cells = [row["part"], row["what"], row["baseline"]]
        if "ratio" not in row:
            table.add(*cells, "RED", *[""] * 6)
            continue
        times = (row["median"], row["p95"], row["baseline_median"])
        low, high = row["interval"]
        moved = [f"{row['gb_s']:.1f}", f"{row['of_copy']:.0%}"] if "gb_s" in row else ["", ""]
        table.add(
            *cells,
            *(f"{1e3 * seconds:.2f}" for seconds in times),
            f"{row['ratio']:.2f}",
            f"{low:.2f}–{high:.2f}",
            *moved,
        )
    table.notes.append(
        f"ratio: the baseline's median over this one's, of {at['repeats']} interleaved rounds, "
        "above 1 is faster; 95 %: of the ratio over resampled rounds; GB/s: of the bytes that must "
        "move, and their share of the rate of a copy in the same rounds."
    )
    return table
