"""The tables of a call, with goals, and its last line: failures, and pieces that were not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddl.lab.bench.tables import Table
from gpu.log import Line, fault, measured

# Compiled steps over the float32 additive one, by the dtype of the stream.
RATIOS = {
    "float32": {"ddl": 0.99, "ddl-cc": 0.84, "ddl-tc": 0.80},
    "bfloat16": {"ddl": 0.99, "ddl-cc": 0.91, "ddl-tc": 0.87},
}
MEMORY = 1.05
OF_COPY = {"forward": 0.82, "backward": 0.78}  # of a channel read
DECODE = {"times_eager": 3.0, "ratio": 0.95}  # of one sequence, by a CUDA graph
LAUNCH_US = {"no grad": 32.0, "forward": 45.0}  # of rewrite_read
PEAK_GB_S = {"H100": 3350.0, "H200": 4800.0}  # of the data sheet
STEPS = {
    "steps": "Training steps, float32 stream",
    "anchors": "Training steps by N",
    "bfloat16": "Training steps, bfloat16 stream",
    "train-compiled": "Training steps",  # of older records
}


def show(head: str, lines: list[Line]) -> None:
    every = (checks(lines), *(steps(lines, part) for part in STEPS), *operators(lines),
             chains(lines), roof(lines), decoded(lines), launches(lines))  # fmt: skip
    for table in [table for table in every if table.rows]:
        table.show()
    failed = [line for line in lines if fault(line)]
    for line in failed:
        print(f"FAILED {line['part']} {line['what']}: {fault(line)}")
    for line in measured(lines, "machine")[:1]:
        print(f"{line['device']}, driver {line['driver']} · {line['summary']}")
    wrong = [f"{line['part']} {line['what']}" for line in failed]
    left = [f"{x['part']} {x.get('what')}: {x['skipped']}" for x in lines if "skipped" in x]
    ends = (", ".join(names) or "nothing" for names in (wrong, left))
    print(head, *map("{}: {}".format, ("failed", "not run"), ends), sep="; ", flush=True)


def checks(lines: list[Line]) -> Table:
    """The greatest error as a share of the error allowed, or counts of tests."""
    table = Table("Checks", ("part", "", "result"), labels=3)
    for line in measured(lines, "smoke", "bits", "tests"):
        gate = line.get("gate", {})
        results = [f"{count} {name}" for name, count in sorted(line.get("tests", {}).items())]
        results += ["the same bits"] if "links" in line else []
        results += [f"{gate['worst']:.2f} of the error allowed"] if gate.get("worst") else []
        table.add(line["part"], line["what"], gate.get("red") or ", ".join(results))
    return table


def steps(lines: list[Line], part: str) -> Table:
    columns = ("residual", "stream", "N", "erase", "ms", "over float32 additive", "95 %",
               "over the same dtype", "95 %", "floor", "idle ms", "GiB", "factor",
               "over the same dtype")  # fmt: skip
    table = Table(STEPS[part], columns, labels=4)
    for line in measured(lines, part):
        stream, additive = line.get("stream_dtype", "float32"), line["residual"] == "additive"
        plain = line.get("erase", "tied") == "tied" and line.get("default", True)
        goal, most = (
            RATIOS[stream].get(line["residual"]) if plain else None,
            None if additive else -MEMORY,
        )
        table.add(
            line["residual"],
            stream,
            str(line.get("anchor_every") or ""),
            line.get("erase", ""),
            number(line, "median", ".1f", 1e3) or "RED",
            number(line, "ratio", ".3f") + mark(line.get("ratio"), goal),
            interval(line, "interval"),
            number(line, "same_ratio", ".3f"),
            interval(line, "same_interval"),
            "" if additive else number(line, "floor", ".3f"),
            number(line, "idle_ms", ".1f"),
            number(line, "peak_bytes", ".1f", 2**-30),
            number(line, "memory_factor", ".3f") + mark(line.get("memory_factor"), most),
            number(line, "same_memory_factor", ".3f"),
        )
    table.notes.append(
        "Compiled, forward and backward. Over an additive step: median(additive) / median, of "
        "rounds in turns. floor: this ratio if each boundary moved its bytes at a copy's rate. "
        "The model returns logits and loss, as nanoGPT's, so every step has a zero gradient of the "
        "logits. idle: the device, between kernels. GiB: the most during a step, AdamW's moments "
        "included; factor: over the float32 additive step's."
    )
    return table


def operators(lines: list[Line]) -> Iterator[Table]:
    """Shares of the copy's rate and of the data sheet's; plans beside the planner's own."""
    own: dict[tuple[Any, ...], list[float]] = {}
    columns = ("operator", "form", "d", "m", "state", "DDL_PLAN", "forward", "of peak", "backward",
               "of peak", "× forward", "× backward")  # fmt: skip
    for parts, plan in ((("operators", "ops"), "own plan"), (("plans",), "other plans")):
        title = f"Operators, {plan}: shares of a copy's rate and of the data sheet's; × own time"
        table = Table(title, columns, labels=2)
        for line in measured(lines, *parts):
            key = tuple(line[name] for name in ("op", "form", "d", "m", "state"))
            cells = [*map(str, key), line.get("plan", "")]
            if "forward" not in line:
                table.add(*cells, "RED", *[""] * 5)
                continue
            taken = [1 / share(line, half) for half in OF_COPY]
            times = zip(taken, own.setdefault(key, taken), strict=True)
            peak = next((x for name, x in PEAK_GB_S.items() if name in line.get("device", "")), 0)
            for half, goal in OF_COPY.items():
                aim = goal if key[:2] == ("rewrite_read", "channel") else None
                cells.append(f"{share(line, half):.2f}{mark(share(line, half), aim)}")
                cells.append(f"{line[half]['gb_s'] / peak:.2f}" if peak else "")
            table.add(*cells, *(f"{x / y:.2f}" for x, y in times))
        yield table


def share(line: Line, half: str) -> float:
    return line[half]["gb_s"] / line["copy"]["gb_s"]


def chains(lines: list[Line]) -> Table:
    columns = ("form", "state", "DDL_PLAN", "links", "µs", "of copy", "× none")
    table = Table("Backward with a chain", columns, labels=3)
    none: dict[tuple[str, ...], float] = {}
    for line in measured(lines, "chains"):
        key = (line["form"], line["state"], line.get("plan", ""))
        if "backward" not in line:
            table.add(*key, str(line["links"]), "RED", "", "")
            continue
        seconds, part = line["backward"]["median"], f"{share(line, 'backward'):.2f}"
        times = f"{seconds / none.setdefault(key, seconds):.2f}"
        table.add(*key, str(line["links"]), f"{1e6 * seconds:.0f}", part, times)
    return table


def roof(lines: list[Line]) -> Table:
    table = Table("Walks without arithmetic", ("walk", "of copy"))
    for line in measured(lines, "roof"):
        table.add(line["what"], number(line, "of_copy", ".2f") or "RED")
    return table


def decoded(lines: list[Line]) -> Table:
    columns = ("residual", "steps", "ms per token", "× without a graph", "over additive")
    table = Table("Generation of one sequence", columns, labels=2)
    for line in measured(lines, "generation"):
        goals = DECODE if line["mode"] == "graph" else {}
        figures = [f"{line[x]:.2f}{mark(line[x], goals.get(x))}" for x in DECODE]
        table.add(line["residual"], line["mode"], number(line, "ms", ".2f"), *figures)
    return table


def launches(lines: list[Line]) -> Table:
    title = "Launches: microseconds of the host per call on 8 tokens of 64 features, m = 4"
    table = Table(title, ("call", "", "µs"), labels=2)
    for line in measured(lines, "launch"):
        most = LAUNCH_US.get(line["kind"]) if line["op"] == "rewrite_read" else None
        cell = number(line, "us", ".1f") + mark(line["us"], -most if most else None)
        table.add(line["op"], line["kind"], cell)
    return table


def number(line: Line, name: str, form: str, scale: float = 1.0) -> str:
    return "" if line.get(name) is None else format(scale * line[name], form)


def interval(line: Line, name: str) -> str:
    return "{:.3f}–{:.3f}".format(*line[name]) if name in line else ""


def mark(value: float | None, goal: float | None) -> str:
    """Whether a goal is reached, and the goal. A negative one is the most that there may be."""
    if value is None or goal is None:
        return ""
    reached = value >= goal if goal > 0 else value <= -goal
    return f" {'✓' if reached else '✗'} {'≥' if goal > 0 else '≤'} {abs(goal):g}"
