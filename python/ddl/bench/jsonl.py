"""Files of JSON records, one to a line. Imports nothing that a broken installation could lack."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file. It is on the disk when this returns, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read() not in (b"", b"\n")  # by a process that was killed while it wrote
        line = json.dumps(record, ensure_ascii=False)
        file.write(("\n" if cut else "").encode() + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a line that was cut off."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
