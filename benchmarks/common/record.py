"""Where and when a benchmark ran, and the files it leaves: results/NAME.jsonl and results/NAME.md.

A line of the JSONL file is one run with every time that was taken; the Markdown file is the table
of the last run. Neither names the machine or any of its paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddl.lab.bench import jsonl, record
from ddl.lab.bench.record import describe

__all__ = ["RESULTS", "describe", "environment", "write"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Machine, software and load as JSON types. Call it first: benchmarks raise the load."""
    return record.environment(ROOT)


def write(name: str, record: dict[str, Any], summary: str, folder: Path) -> None:
    """Append `record` to NAME.jsonl and replace NAME.md by `summary`, under `folder`."""
    jsonl.append(folder / f"{name}.jsonl", record)
    (folder / f"{name}.md").write_text(summary, encoding="utf-8")
