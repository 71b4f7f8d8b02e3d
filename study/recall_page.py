"""Write the tables of docs/recall.md from the committed records of study/recall.py.

python -m study.recall_page          # after python -m study.recall
python -m study.recall_page --check  # says whether the page is current, exit status 1
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from ddl.lab.analysis.student import interval
from docs.scripts.marked import write_tables

from . import recall
from .records import Record, by_name, effort

PAGE = Path(__file__).parent.parent / "docs" / "recall.md"


def table(which: str) -> str:
    """Accuracy of every variant of a task that all seeds were trained for, and the differences."""
    records = list(by_name(recall.RECORDS / f"{which}.jsonl").values())
    if not records:
        return "Not trained yet."
    compared = recall.SETS[which]
    # Records also hold variants that can no longer be trained.
    variants = dict.fromkeys([*compared.variants, *(record["variant"] for record in records)])
    rates = {name: recall.tuned(name, compared, records)[1] for name in variants}
    baseline = next(iter(rates))
    rows = [
        "| tokens, variables | variant | learning rate | accuracy | assigned once "
        f"| difference from {baseline} | 95 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in compared.tasks:
        done = {name: found for name in rates if (found := of(records, name, task, rates[name]))}
        if baseline in done:
            rows += [_row(task, name, found, done[baseline]) for name, found in done.items()]
    missing = f"`{baseline}`, with which all others are compared, has not all its seeds yet."
    found = rows if len(rows) > 2 else [missing]
    return "\n".join([*found, "", provenance(records)])


def of(
    records: Iterable[Record], variant: str, task: recall.Task, lr: float | None
) -> dict[int, Record]:
    """The runs of a variant by seed, with its best rate; none unless all seeds are there."""
    found = {
        record["seed"]: record
        for record in records
        if record["variant"] == variant
        and record["task"] == vars(task)
        and record["lr"] == lr
        and record["seed"] in recall.SEEDS
    }
    return found if len(found) == len(recall.SEEDS) else {}


def _row(task: recall.Task, name: str, runs: dict[int, Record], baseline: dict[int, Record]) -> str:
    first = next(iter(runs.values()))
    accuracy = [run["accuracy"] for run in runs.values()]
    cells = [
        f"{task.block}, {task.variables}",
        f"`{name}`",
        f"{first['lr']:g}",
        f"{statistics.fmean(accuracy):.3f} ({min(accuracy):.3f}–{max(accuracy):.3f})",
        f"{_assigned_once(runs):.3f}",
    ]
    if runs is baseline:
        return f"| {' | '.join([*cells, '', ''])} |"
    differences = [run["accuracy"] - baseline[seed]["accuracy"] for seed, run in runs.items()]
    mean, low, high = interval(differences)
    assert low is not None
    assert high is not None
    shown = f"**{mean:+.3f}**" if low > 0 or high < 0 else f"{mean:+.3f}"
    return f"| {' | '.join([*cells, shown, f'{low:+.3f} to {high:+.3f}'])} |"


def _assigned_once(runs: dict[int, Record]) -> float:
    """The share of right answers among questions about a variable that was assigned once."""
    groups = [run["by_writes"]["1"] for run in runs.values()]
    return sum(share * count for share, count in groups) / sum(count for _, count in groups)


def provenance(records: list[Record]) -> str:
    return (
        f"{len(records)} runs of {recall.STEPS:,} steps with {recall.BATCH} sequences, those for "
        f"the learning rates included, {effort(records)}."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(arguments)
    made = {f"recall-{which}": table(which) for which in recall.SETS}
    return write_tables(PAGE, made, command="study.recall_page", check=args.check)


if __name__ == "__main__":
    sys.exit(main())
