"""Where and when a benchmark ran, and the files it leaves: results/NAME.jsonl and results/NAME.md.

A line of the JSONL file is one run with every time that was taken; the Markdown file is the table
of the last run. Neither names the machine or any of its paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddl.lab.bench import jsonl, record
from ddl.lab.bench.record import describe
from ddl.lab.bench.tables import Table

__all__ = ["RESULTS", "ROOT", "describe", "environment", "publish"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Machine, software and load as JSON types. Call it first: benchmarks raise the load."""
    return record.environment(ROOT)


def publish(
    name: str, where: dict[str, Any], run: dict[str, Any], table: Table, out: Path | None
) -> None:
    """Print the table; with `out` append the run to NAME.jsonl and replace NAME.md there."""
    table.show()
    print(describe(where))
    if out is not None:
        jsonl.append(out / f"{name}.jsonl", where | run)
        summary = f"{table.markdown()}\n{describe(where)}\n"
        (out / f"{name}.md").write_text(summary, encoding="utf-8")
