"""Tables of the operators: shares of a copy's rate, plans, kernels, launches; and of the checks."""

from __future__ import annotations

import statistics
from typing import Any

from ddl.lab.bench.tables import Table
from gpu.log import Line, measured

OF_COPY = 0.85
OVERHEAD_US = 20.0
HALVES = ("forward", "backward")


def all_of(lines: list[Line]) -> list[Table]:
    return [checks(lines), operators(lines), kernels(lines), launches(lines), plans(lines)]


def checks(lines: list[Line]) -> Table:
    """Checks without a time: the greatest error as a share of that allowed, or counts."""
    table = Table("Checks", ("part", "", "result"), labels=3)
    for line in measured(lines, "smoke", "capture"):
        red, worst = line["gate"]["red"], line["gate"].get("worst")
        good = "the same bits" if worst is None else f"{worst:.2f} of the error allowed"
        table.add(line["part"], line["what"], red or good)
    for line in measured(lines, "tests", "large", "sanitize"):
        if "tests" in line:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(line["tests"].items()))
            table.add(line["part"], line["what"], counts or "none")
    return table


def plans(lines: list[Line]) -> Table:
    """Each plan beside the planner's own: shares of the copy that was timed with it."""
    table = Table(
        "Plans: percent of the copy's rate, and the time of the half that a plan is for",
        ("operator", "form", "d", "m", "DDL_PLAN", "for", "forward", "backward", "× planned"),
        labels=6,
    )
    own: dict[tuple[Any, ...], float] = {}
    for line in measured(lines, "plans"):
        key = tuple(line[name] for name in ("op", "form", "d", "m", "aim"))
        cells = [*map(str, key[:4]), line.get("plan", ""), line["aim"]]
        if "forward" not in line:
            table.add(*cells, "RED", "", "")
            continue
        found = shares(line)
        share = found[HALVES.index(line["aim"])]
        if "plan" not in line:
            own[key] = share
        halves = [f"{100 * half:.0f}" for half in found]
        table.add(*cells, *halves, f"{share / own[key]:.2f}" if key in own else "")
    return table


def shares(line: Line) -> list[float]:
    """The rates of forward and backward over the copy's; none of a form that was not timed."""
    return [line[half]["gb_s"] / line["copy"]["gb_s"] for half in HALVES if half in line]


def kernels(lines: list[Line]) -> Table:
    table = Table("Kernels: median microseconds of a call's", ("call", "kernels"), labels=2)
    for line in measured(lines, "trace"):
        took = ", ".join(f"{name} {us:.0f}" for name, us in line["kernels_us"].items())
        table.add(line["what"], took)
    return table


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
    every = []
    rows: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in fused:
        rows.setdefault(tuple(line[name] for name in ROW), {}).setdefault(line["d"], line)
    for key, by_size in rows.items():
        cells = []
        for line in (by_size.get(d, {}) for d in sizes):
            halves = shares(line)
            every += halves
            red = "RED" if line.get("gate", {}).get("red") else ""
            cells.append(" / ".join(f"{100 * share:.0f}" for share in halves) or red)
        faster = (speed_up(key, lines, part) for part in ("plain", "plain-compiled"))
        table.add(key[0], key[1], *map(str, key[2:]), *cells, *faster)
    if every:
        reached = sum(share >= OF_COPY for share in every)
        table.notes.append(
            f"Goal {OF_COPY:.0%} of copy: {reached} of {len(every)} reach it; lowest "
            f"{min(every):.0%}, median {statistics.median(every):.0%}. × eager, × compiled: how "
            "many times faster than plain PyTorch, forward and backward together, median over d."
        )
    rates = [line["copy"]["gb_s"] for line in fused if "copy" in line]
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
    return line["forward"]["median"] + line["backward"]["median"]


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
