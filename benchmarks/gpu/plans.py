"""Plans that a GPU decides about, and the planner's table of those that it decided for.

The table has the fastest plan without a spill of every kernel that the records time. A row of
CHOICES is timed by `DDL_PLAN` beside the planner's own plan. `DDL_PLAN` holds for both kernels of a
call, so the half that a row is not for may have another plan, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddl.lab.bench import jsonl
from gpu.log import Line

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "src" / "cuda" / "plan" / "table.txt"
RESULTS = ROOT / "benchmarks" / "results"
# The last that times a kernel decides alone about its plan: kernels and clocks change.
RECORDS = ("gpu-plans.jsonl", "gpu-day.jsonl")
COMMAND = "benchmarks/gpu/day.sh table"
ARGUMENTS = ("ORDER=", "CHUNK=")  # of a kernel, which no plan has
DECIDED = ("ALIGN=", "TILE=")  # by the call alone
HALVES = {"forward": "rewrite_read_fwd", "backward": "rewrite_read_bwd"}


class Choice(NamedTuple):
    """A case of rewrite_read at 32 × 1,024 tokens, and the plan to compare with the planner's.

    half: the kernel that the plan is for; of ORDER, which is for both, the first. plan: words of
    DDL_PLAN.
    """

    form: str
    d: int
    m: int
    state: str
    half: str
    plan: str


# A run of neighbouring tokens for each block, where blocks take turns by default.
RUNS = "ORDER=0"
# A token read's forward without tiles (src/cuda/plan/tile.rs), which any choice by hand gives.
UNTILED = "CLUSTER=1"
# Before the plans that were timed on 2026-11-26.
ALONE = "THREADS=192 SUMS=0 STAGES=1 BLOCKS=1 WINDOW=0"
CHOICES = (
    Choice("channel", 768, 4, "float32", "forward", RUNS),
    Choice("channel", 768, 4, "bfloat16", "forward", RUNS),
    Choice("identity", 768, 1, "bfloat16", "forward", RUNS),
    Choice("channel", 4096, 4, "float32", "forward", RUNS),
    Choice("channel", 768, 4, "float32", "forward", "STAGES=0 BLOCKS=8"),
    Choice("channel", 768, 4, "bfloat16", "forward", "STAGES=0 BLOCKS=8"),
    Choice("channel", 2048, 4, "bfloat16", "forward", "STAGES=0 BLOCKS=2"),
    Choice("channel", 768, 4, "bfloat16", "backward", "THREADS=96 STAGES=0 BLOCKS=4"),
    Choice("token", 768, 4, "float32", "forward", UNTILED),
    Choice("token", 768, 4, "bfloat16", "forward", UNTILED),
    Choice("token", 768, 4, "float32", "backward", ALONE),
    Choice("token", 768, 4, "bfloat16", "backward", ALONE),
)
# Of the backward with a chain, by the form of the read.
CHAIN_PLANS = {"channel": "THREADS=128 STAGES=0 BLOCKS=3", "token": ALONE}


class Timed(NamedTuple):
    """A plan of a kernel that was timed. case: kernel, read, m, state, chain or stored, d."""

    case: tuple[Any, ...]
    plan: str
    seconds: float
    own: bool  # the planner's, of that day


def timed(lines: Sequence[Line]) -> Iterator[Timed]:
    """The plans that did not spill, of records of kernels and of operators with their kernels."""
    for line in lines:
        order = any(word.startswith(ARGUMENTS) for word in line.get("plan", "").split())
        known = {"kernel", "kernels"} & line.keys()
        if line.get("op") != "rewrite_read" or order or not known:
            continue
        case = line["form"], line["m"], line["state"]
        kind = ("chain" if line.get("links") else "stored"), line["d"]
        if "kernel" in line and not line["spilled"]:
            key = (line["kernel"], *case, *kind)
            yield Timed(key, line["plan"], line["seconds"], own=False)
        for half, kernel in HALVES.items():
            name = f"{kernel} with a chain" if line.get("links") else kernel
            for text in line.get("kernels", ()) if half in line else ():
                if text.startswith(f"{name} CLUSTER=") and ", 0 bytes spilled" in text:
                    plan, own = text.removeprefix(f"{name} ").partition(",")[0], "plan" not in line
                    if " TILE=" in plan and " TILE=0" not in plan:
                        continue  # src/cuda/plan/tile.rs says which calls have tiles
                    yield Timed((kernel, *case, *kind), plan, line[half]["median"], own)


def best(lines: Sequence[Line]) -> dict[tuple[Any, ...], Timed]:
    """The fastest plan of each case."""
    found: dict[tuple[Any, ...], Timed] = {}
    for one in timed(lines):
        found[one.case] = min(found.get(one.case, one), one, key=lambda each: each.seconds)
    return found


def table(results: Path = RESULTS) -> str:
    """The planner's table from the records of a folder."""
    found: dict[tuple[Any, ...], Timed] = {}
    for path in [results / name for name in RECORDS]:
        found |= best(jsonl.read(path)) if path.exists() else {}
    rows = [f"# Written by `{COMMAND}` from {' and '.join(RECORDS)} in benchmarks/results."]
    for case in sorted(found):
        words = [word for word in found[case].plan.split() if not word.startswith(DECIDED)]
        rows.append(" ".join(map(str, (*case, *words))))
    return "\n".join(rows) + "\n"
