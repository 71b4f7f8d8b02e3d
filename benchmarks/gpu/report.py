"""The end of a call: its tables, what is worth a remark, and the last line, what failed."""

from __future__ import annotations

from gpu import tables, tables_models, tables_others
from gpu.log import Line, faults, measured, omissions

MOST_NAMED = 12  # a lost device makes every later piece fail


def show(lines: list[Line]) -> None:
    """Print the tables of all parts that were run, and remarks."""
    made = [*tables.all_of(lines), tables_others.others(lines), *tables_models.all_of(lines)]
    for table in made:
        if table.rows:
            table.show()
    print("\n".join(remarks(lines)), flush=True)


def remarks(lines: list[Line]) -> list[str]:
    """Copies, spilling and crowded kernels, reasons of faults, and the machine, a line each."""
    rates = ", ".join(f"{line['gb_s']:.0f}" for line in measured(lines, "copy"))
    said = [f"Copies of rising size: {rates} GB/s, read and written."] if rates else []
    for line in measured(lines, "compile", "compile-models"):
        said.append(
            f"{line['what']}: {line['kernels']}, {line['found']} of them found in the cache, in "
            f"{line['seconds']} s; {len(line['spilling'])} spill, {len(line['crowded'])} have "
            "room for fewer blocks than planned."
        )
    said += [f"FAILED {reason}" for reason in faults(lines)[:MOST_NAMED]]
    for line in measured(lines, "machine")[:1]:
        said.append(f"{line['device']}, driver {line['driver']} · {line['summary']}")
    return said


def last_line(head: str, lines: list[Line]) -> str:
    """One line: how much there is, what failed, what was not run."""
    failed = [name.partition(": ")[0] for name in faults(lines)]
    said = [head, f"failed: {named(failed)}" if failed else "nothing failed"]
    left = omissions(lines)
    said.append(f"not run: {named(left)}" if left else "nothing left out")
    return "; ".join(said)


def named(names: list[str]) -> str:
    """Names by commas; of very many, the first."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
