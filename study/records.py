"""The committed records of the study's runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "records"
NAME = re.compile(r"(?P<variant>.+)-s(?P<seed>\d+)")


class Trained(NamedTuple):
    """A finished run: its variant, its seed, and its record as study/collect.py writes it."""

    variant: str
    seed: int
    record: dict[str, Any]

    @property
    def loss(self) -> float:
        """The final validation loss, in nats per byte."""
        return float(self.record["loss"])


def read(name: str, folder: Path = FOLDER) -> dict[str, dict[int, Trained]]:
    """The runs of a sweep, by variant and seed; empty without a file."""
    found: dict[str, dict[int, Trained]] = {}
    file = folder / f"{name}.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        record = json.loads(line)
        match = NAME.fullmatch(record["name"])
        assert match is not None, record["name"]
        run = Trained(match["variant"], int(match["seed"]), record)
        found.setdefault(run.variant, {})[run.seed] = run
    return found


def every(folder: Path = FOLDER) -> Iterator[Trained]:
    """The runs of all sweeps."""
    for file in sorted(folder.glob("*.jsonl")):
        for runs in read(file.stem, folder).values():
            yield from runs.values()


def digest(*names: str, folder: Path = FOLDER) -> str:
    """SHA-256 of the files of records, which pictures carry to show what they were made of."""
    whole = hashlib.sha256()
    for name in names:
        file = folder / f"{name}.jsonl"
        whole.update(file.read_bytes() if file.exists() else b"")
    return whole.hexdigest()
