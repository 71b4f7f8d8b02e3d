"""The table of what stands between two sublayers, here and in other libraries."""

from __future__ import annotations

from ddl.lab.bench.tables import Table
from gpu.libraries import LIBRARIES
from gpu.log import Line, measured
from gpu.tables import shares, whole


def others(lines: list[Line]) -> Table:
    """A row for each library and width; ours once, from the rounds in which it ran alone."""
    table = Table(
        "Between two sublayers, m = 4, bfloat16: percent of the copy's rate, and µs at one row",
        ("library", "version", "d", "forward", "backward", "time / ours", "one row: no grad, µs",
         "forward + backward, µs"),
        labels=2,
    )  # fmt: skip
    found = measured(lines, "others")
    own = {(x["beside"], x["d"]): x for x in found if x["library"] == "ours"}
    for line in found:
        if line["library"] == "ours" != line["beside"]:
            continue
        cells = [LIBRARIES[line["library"]].title, line["version"], str(line["d"])]
        if "forward" not in line:
            table.add(*cells, "RED", *[""] * 4)
            continue
        cells += [f"{100 * share:.0f}" for share in shares(line)]
        same = own.get((line["beside"], line["d"]), {})
        cells.append(f"{whole(line) / whole(same):.2f}" if "forward" in same else "")
        table.add(*cells, *(f"{us:.1f}" for us in line["one_row_us"].values()))
    names = dict.fromkeys(line["library"] for line in found)
    table.notes += [f"{LIBRARIES[name].title}: {LIBRARIES[name].computes}." for name in names]
    skipped = [x for x in lines if x["part"] == "others" and "skipped" in x and "what" in x]
    table.notes += [
        f"{line['what']} is left out: {line['skipped']}." for line in skipped if "what" in line
    ]
    return table
