"""The tables of docs/gpu.md and README that were measured on a GPU, from the records of one run.

performance.py writes them. Until there is a gpu-day.jsonl they are of the third day on a GPU, and
say of the rest that it was not measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VARIANTS = (("ddl", "tied"), ("ddl-cc", "tied"), ("ddl-tc", "tied"), ("ddl-tc", "none"))
STREAMS = ("float32", "bfloat16")
READS = (("channel", 4), ("token", 4), ("identity", 1))
PEAK_GB_S = {"H100": 3350, "H200": 4800}  # of the data sheet
UNKNOWN = "not measured"
PROBLEM = ("op", "form", "d", "m", "rewrites", "batch", "time", "state")
ANCHORS = (1, 2, 4, 8)  # N: every N-th state is stored
OLD_DEFAULT = 8  # N of steps whose records do not have it

Line = dict[str, Any]


def records(results: Path = RESULTS) -> tuple[list[Line], str]:
    """The newest run, and the files that it is in."""
    names = ["gpu-day"] if (results / "gpu-day.jsonl").exists() else ["gpu-2", "gpu-3"]
    lines: list[Line] = []
    for name in names:
        found = (results / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        own = [json.loads(line) for line in found]
        last = max(index for index, line in enumerate(own) if line["part"] == "machine")
        lines += own[last:] if names == ["gpu-day"] else own
    return lines, " and ".join(
        f"[{name}.jsonl](../benchmarks/results/{name}.jsonl)" for name in names
    )


def measured(rows: list[str], labels: int) -> str:
    """A table without the rows and columns that have no number. labels: its columns of names."""
    head, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in rows)
    known = [cells for cells in body if set(cells[labels:]) - {UNKNOWN, ""}]
    shown = [at for at in range(len(head)) if {cells[at] for cells in known} != {UNKNOWN}]
    lines = [row(*(cells[at] for at in shown)) for cells in (head, *known)]
    return "\n".join([lines[0], "|---" * len(shown) + "|", *lines[1:]])


def steps(lines: list[Line]) -> str:
    """Speeds of compiled steps over additive ones, the bound in brackets; then peak memory."""
    names = [f"`{name}`" if erase == "tied" else f'`{name}`, `erase="none"`'
             for name, erase in VARIANTS]  # fmt: skip
    rows = [row("stream", "N", "over additions in", *names)]
    for stream in STREAMS:
        for n in (None, 1):
            cells = [of_step(lines, stream, n, *variant) for variant in VARIANTS]
            label = str(n) if n else default_of([line for line in cells[1:] if line])
            ratios = [ratio(line, "ratio", line.get("floor")) for line in cells]
            rows.append(row(stream, label, "float32", *ratios))
            if stream == "bfloat16":
                ratios = [ratio(line, "same_ratio") for line in cells]
                rows.append(row(stream, label, stream, *ratios))
        memory = [of_step(lines, stream, None, *variant) for variant in VARIANTS]
        factors = [ratio(line, "memory_factor") for line in memory]
        label = default_of([line for line in memory[1:] if line])
        rows.append(row(f"memory, {stream} stream", label, "float32", *factors))
    return measured(rows, labels=3)


def anchors(lines: list[Line]) -> str:
    """Milliseconds and peak memory of compiled steps by N, and of additions."""
    wide = ("ddl-cc", "ddl-tc")
    rows = [row("N", *(f"`{name}`, {unit}" for name in wide for unit in ("ms", "GiB")))]
    for n in ANCHORS:
        rows.append(row(str(n), *(x for name in wide for x in cost(lines, name, n))))
    return measured([*rows, row("additions", *cost(lines, "additive", None), "", "")], labels=1)


def cost(lines: list[Line], residual: str, n: int | None) -> tuple[str, str]:
    """Milliseconds and GiB of a step with a float32 stream that erases; n: its N."""
    for line in lines:
        if line["part"] in ("steps", "anchors", "train-compiled") and "median" in line:
            plain = line.get("erase", "tied") == "tied" and line["residual"] == residual
            known = line.get("anchor_every") or (OLD_DEFAULT if line.get("default", True) else None)
            if plain and (n is None or known == n):
                return f"{1e3 * line['median']:.1f}", f"{line['peak_bytes'] / 2**30:.1f}"
    return UNKNOWN, UNKNOWN


def default_of(lines: list[Line]) -> str:
    """The default N of steps of more than one value channel."""
    if not lines:
        return "default"
    known = lines[0].get("anchor_every")
    return f"{known} (default)" if known else f"{OLD_DEFAULT} (default then)"


def of_step(lines: list[Line], stream: str, n: int | None, residual: str, erase: str) -> Line:
    """The record of a compiled step; {} if there is none. `ddl` stores every state anyway."""
    for line in lines:
        if line["part"] in ("steps", "anchors", "bfloat16", "train-compiled") and "ratio" in line:
            has = (line["residual"], line.get("erase", "tied"), line.get("stream_dtype", "float32"))
            default = line.get("default", True)
            fits = default if n is None or residual == "ddl" else line.get("anchor_every") == n
            if has == (residual, erase, stream) and fits:
                return line
    return {}


def ratio(line: Line, name: str, bound: float | None = None) -> str:
    if name not in line:
        return UNKNOWN
    return f"{line[name]:.2f}" + (f" ({bound:.2f})" if bound is not None else "")


def operators(lines: list[Line]) -> str:
    """Percent of a copy's rate and of the data sheet's, at d = 768."""
    head = ("read", "state", "forward, % of a copy", "of the data sheet", "backward, % of a copy",
            "of the data sheet")  # fmt: skip
    rows = [row(*head), "|---" * len(head) + "|"]
    for form, m in READS:
        for state in STREAMS:
            key = ("rewrite_read", form, 768, m, state)
            line = next(
                (
                    line
                    for line in lines
                    if line["part"] in ("operators", "ops")
                    and tuple(line.get(x) for x in ("op", "form", "d", "m", "state")) == key
                    and "forward" in line
                ),
                None,
            )
            cells = [UNKNOWN] * 4
            if line is not None:
                peak = next(rate for name, rate in PEAK_GB_S.items() if name in line["device"])
                rates = [line[half]["gb_s"] for half in ("forward", "backward")]
                cells = [f"{100 * x / y:.0f}" for x in rates for y in (line["copy"]["gb_s"], peak)]
            rows.append(row(f"{form}, m = {m}", state, *cells))
    return "\n".join(rows)


def eager(lines: list[Line]) -> str:
    """Speeds of eager steps over additive ones, and of operators over others' code."""
    rows = [row("model", "precision", *(f"`{name}`" for name, _ in VARIANTS[:3]))]
    found = {
        (line["preset"], line["precision"], line["residual"]): f"{line['ratio']:.2f}"
        for line in lines
        if line["part"] == "train" and "ratio" in line
    }
    for preset, precision in dict.fromkeys(name[:2] for name in found):
        ratios = [found.get((preset, precision, name), UNKNOWN) for name, _ in VARIANTS[:3]]
        rows.append(row(f"GPT-2 {preset}", precision, *ratios))
    plain, compiled = (spread(faster(lines, part)) for part in ("plain", "plain-compiled"))
    liger = spread(faster(lines, "others"))
    when = next((line["date"][:10] for line in lines if line["part"] == "plain"), "")
    return (
        f"{measured(rows, labels=2)}\n\nForward and backward together, an operator is {plain} "
        f"times as fast as plain PyTorch in its faster style, and {compiled} times as fast as what "
        f"torch.compile makes of it ({when}). Liger's mHC, another function of the same bytes, "
        f"takes {liger} times as long as our rewrite and read, at d 768, 2,048 and 4,096."
    )


def faster(lines: list[Line], part: str) -> list[float]:
    """How many times as fast as the best other code the operators of a part are."""
    times: dict[tuple[Any, ...], dict[bool, float]] = {}
    for line in lines:
        if line["part"] == part and "forward" in line and line.get("beside") != "ours":
            problem = tuple(line.get(name) for name in PROBLEM)
            ours = line.get("candidate") == "fused" or line.get("library") == "ours"
            taken = line["forward"]["median"] + line["backward"]["median"]
            best = times.setdefault(problem, {})
            best[ours] = min(taken, best.get(ours, taken))
    return [best[False] / best[True] for best in times.values() if len(best) == 2]


def spread(ratios: list[float]) -> str:
    if not ratios:
        return UNKNOWN
    return " to ".join(f"{ratio:.{int(ratio < 10)}f}" for ratio in (min(ratios), max(ratios)))


def source(lines: list[Line], files: str) -> str:
    """The machine, the day and the commit."""
    line = next(line for line in lines if line["part"] in ("steps", "train-compiled"))
    torch, commit = line["torch"].partition("+")[0], line["commit"]["hash"][:7]
    return f"On one {line['device']}, torch {torch}, {line['date'][:10]}, commit {commit}: {files}."


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(results: Path = RESULTS) -> dict[str, str]:
    """The marked tables by name."""
    lines, files = records(results)
    end = source(lines, files)
    return {
        "gpu-steps": f"{steps(lines)}\n\n{end}",
        "gpu-anchors": f"{anchors(lines)}\n\n{end}",
        "gpu-eager": f"{eager(lines)}\n\n{end}",
        "gpu-operators": f"{operators(lines)}\n\n{end}",
    }
