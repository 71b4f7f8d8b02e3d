"""The summary of a GPU run: tables made from the lines of its log, with goals beside numbers."""

from __future__ import annotations

import statistics
from typing import Any

from common.report import Table
from gpu.log import Line, Log

# Goals for the ratio to the additive residual, by a part of the device's name; "" is any other.
RATIOS = {
    "H200": {"ddl": 0.99, "ddl-cc": 0.94, "ddl-tc": 0.93},
    "": {"ddl": 0.99, "ddl-cc": 0.92, "ddl-tc": 0.91},
}
OF_COPY = 0.85
MEMORY = 1.02
OVERHEAD_US = 20.0
MOST_FAULTS = 20  # to print; a lost device makes every later piece fail


def ratio_goals(device: str) -> dict[str, float]:
    return next(goals for name, goals in RATIOS.items() if name in device)


def tables(lines: list[Line]) -> list[Table]:
    """The tables of all parts that were measured."""
    made = [operators(lines), launches(lines), prefills(lines), training(lines)]
    return [table for table in made if table.rows]


def measured(lines: list[Line], *parts: str) -> list[Line]:
    """The lines of some parts that hold results, red ones included."""
    found = [line for line in lines if line["part"] in parts]
    return [line for line in found if "error" not in line and "skipped" not in line]


def remarks(log: Log) -> list[str]:
    """Faults, omissions, spilling kernels and the rates of copies, a line each."""
    rates = [line["gb_s"] for line in measured(log.lines, "copy")]
    shown = ", ".join(f"{rate:.0f}" for rate in rates)
    spilling = sum(len(line["spilling"]) for line in measured(log.lines, "compile"))
    faults = [f"FAILED: {fault}" for fault in log.faults]
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [f"FAILED: {len(faults) - MOST_FAULTS} more, in gpu.jsonl"]
    return [
        *faults,
        *log.omissions,
        *([f"{spilling} kernels spill registers; gpu.jsonl names them."] if spilling else []),
        *([f"Copies of rising size: {shown} GB/s, read and written."] if rates else []),
    ]


def operators(lines: list[Line]) -> Table:
    """Percent of the copy's rate, forward / backward, with a column per hidden size."""
    compared = measured(lines, "ops", "plain", "plain-compiled")
    fused = [line for line in compared if line["candidate"] == "fused"]
    sizes = sorted({line["d"] for line in fused})
    table = Table(
        "Operators: percent of the copy's rate, forward / backward, by d",
        ("operator", "form", "m", "state", *map(str, sizes), "× eager", "× compiled"),
        labels=2,
    )
    shares = []
    rows: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in fused:
        rows.setdefault(tuple(line[name] for name in ROW), {}).setdefault(line["d"], line)
    for key, by_size in rows.items():
        cells = []
        for line in (by_size.get(d, {}) for d in sizes):
            halves = [line[half]["of_copy"] for half in ("forward", "backward") if half in line]
            shares += halves
            red = "RED" if line.get("gate", {}).get("red") else ""
            cells.append(" / ".join(f"{100 * share:.0f}" for share in halves) or red)
        faster = (speed_up(key, lines, part) for part in ("plain", "plain-compiled"))
        table.add(key[0], key[1], *map(str, key[2:]), *cells, *faster)
    if shares:
        reached = sum(share >= OF_COPY for share in shares)
        table.notes.append(
            f"Goal {OF_COPY:.0%} of copy: {reached} of {len(shares)} reach it; lowest "
            f"{min(shares):.0%}, median {statistics.median(shares):.0%}. × eager, × compiled: how "
            "many times faster than plain PyTorch, forward and backward together, median over d."
        )
    rates = [line["copy_gb_s"] for line in fused if "copy_gb_s" in line]
    if rates:
        table.notes.append(f"Copy: {min(rates):.0f} to {max(rates):.0f} GB/s, read and written.")
    return table


ROW = ("op", "form", "m", "state")


def speed_up(row: tuple[Any, ...], lines: list[Line], part: str) -> str:
    """Time of the fastest plain form over the fused one's, measured in the same rounds."""
    ratios = []
    same = [x for x in measured(lines, part) if "forward" in x]
    same = [x for x in same if tuple(x[name] for name in ROW) == row]
    for d in {x["d"] for x in same}:
        took = {x["candidate"]: whole(x) for x in same if x["d"] == d}
        others = [took[form] for form in took if form != "fused"]
        if "fused" in took and others:
            ratios.append(min(others) / took["fused"])
    return f"{statistics.median(ratios):.1f}" if ratios else ""


def whole(line: Line) -> float:
    return line["forward"]["us"] + line["backward"]["us"]


def launches(lines: list[Line]) -> Table:
    table = Table(
        "Launch overhead: microseconds of the host per call on 8 tokens of 64 features, m = 4",
        ("call", "", "µs", "goal"),
        labels=2,
    )
    for line in measured(lines, "launch"):
        goal = OVERHEAD_US if line["kind"] == "forward" else None
        table.add(line["op"], line["kind"], *against(line["us"], goal, ".1f", least=False))
    return table


def prefills(lines: list[Line]) -> Table:
    table = Table(
        "Prefill: a prompt to its first new token",
        ("preset", "precision", "residual", "batch", "ms", "tokens/s", "ratio", "95 %"),
        labels=3,
    )
    for line in measured(lines, "prefill"):
        cells = [line["preset"], line["precision"], line["residual"], str(line["batch"])]
        if "median" in line:
            cells += [f"{1e3 * line['median']:.2f}", f"{line['tokens_per_s']:,.0f}"]
            cells += [f"{line['ratio']:.3f}", interval(line)] if "ratio" in line else ["", ""]
        else:
            cells += ["RED", "", "", ""]
        table.add(*cells)
    return table


def training(lines: list[Line]) -> Table:
    table = Table(
        "Training step against the additive residual",
        ("preset", "precision", "mode", "residual", "batch", "ms", "tokens/s", "ratio", "95 %",
         "goal", "floor", "with AdamW", "GiB", "factor", "goal"),
        labels=4,
    )  # fmt: skip
    for line in measured(lines, "train", "train-compiled"):
        names = ("preset", "precision", "mode", "residual", "batch")
        cells = [str(line[name]) for name in names]
        if "median" not in line:
            table.add(*cells, "RED", *[""] * 9)
            continue
        cells += [f"{1e3 * line['median']:.1f}", f"{line['tokens_per_s']:,.0f}"]
        reached, goal = against(line.get("ratio"), line["goal"], ".3f")
        cells += [reached, interval(line), goal]
        additive = line["residual"] == "additive"
        for name in ("floor", "whole_ratio"):
            cells.append(f"{line[name]:.3f}" if name in line and not additive else "")
        peak = line["peak_bytes"]
        cells.append("" if peak is None else f"{peak / 2**30:.1f}")
        limit = None if additive else MEMORY
        table.add(*cells, *against(line.get("memory_factor"), limit, ".3f", least=False))
    table.notes.append(
        "ms, ratio: forward and backward; tokens/s: with AdamW. ratio: median(additive) / median "
        "of interleaved rounds; floor: the ratio if every boundary moved its bytes at the speed of "
        "the copy. GiB: the most during a step with this model alone; factor: over the additive's."
    )
    return table


def interval(line: Line) -> str:
    return "{:.3f}–{:.3f}".format(*line["interval"]) if "interval" in line else ""


def against(
    value: float | None, goal: float | None, form: str, *, least: bool = True
) -> tuple[str, str]:
    """A number, marked ✓ or ✗ if there is a goal for it, and the goal."""
    if value is None:
        return "", ""
    if goal is None:
        return format(value, form), ""
    reached = value >= goal if least else value <= goal
    sign = "≥" if least else "≤"
    return f"{value:{form}} {'✓' if reached else '✗'}", f"{sign} {goal:g}"
