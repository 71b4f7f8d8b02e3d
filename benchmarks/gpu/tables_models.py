"""Tables of whole models: training steps, prefill and decoding, with goals beside the numbers."""

from __future__ import annotations

from ddl.lab.bench.tables import Table
from gpu.log import Line, measured
from gpu.tables import against

# Goals for the ratio to the additive residual, by a part of the device's name; "" is any other.
RATIOS = {
    "H200": {"ddl": 0.99, "ddl-cc": 0.94, "ddl-tc": 0.93},
    "": {"ddl": 0.99, "ddl-cc": 0.92, "ddl-tc": 0.91},
}
MEMORY = 1.02


def goal_of(line: Line) -> float | None:
    goals = next(goals for name, goals in RATIOS.items() if name in line.get("device", ""))
    return goals.get(line["residual"].removesuffix("-noec"))


def all_of(lines: list[Line]) -> list[Table]:
    return [
        training(lines),
        generations("Prefill: a prompt to its first new token", measured(lines, "prefill")),
        generations("Decode: cached steps after a prompt", measured(lines, "decode")),
    ]


def generations(title: str, lines: list[Line]) -> Table:
    table = Table(
        title,
        ("preset", "precision", "residual", "batch", "ms", "tokens/s", "ratio", "95 %"),
        labels=3,
    )
    for line in lines:
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
        reached, goal = against(line.get("ratio"), goal_of(line), ".3f")
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
