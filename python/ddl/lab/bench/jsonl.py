"""Files of JSON records, one to a line, as `ddl bench --out` and benchmarks/results have them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ddl.files import append_line, make_directory, sync


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file. It is on the disk when this returns, even if the process is killed."""
    make_directory(path.parent)
    append_line(path, json.dumps(record, ensure_ascii=False))
    sync(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a line that was cut off."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return records
