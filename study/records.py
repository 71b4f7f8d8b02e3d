"""The committed records of the study's runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddl.files import write_text
from ddl.lab.machine import cpu_model

Record = dict[str, Any]
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


def by_name(file: Path) -> dict[str, Record]:
    """The records of a file; empty without it."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def keep(file: Path, record: Record) -> None:
    """Add a record to a file, whose lines are in the order of their names."""
    found = by_name(file) | {record["name"]: record}
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(json.dumps(each, ensure_ascii=False) + "\n" for each in found.values())
    write_text(file, "".join(lines))


def rates_tried(
    rates: Sequence[float], scores: Mapping[float, float], factor: float
) -> tuple[list[float], float | None]:
    """The learning rates to try, and the best of them once all are tried and others lie around it.

    rates: those to begin with. scores: the higher the better, of those that are tried. factor:
    between the lowest or highest, as long as it is the best, and the next one. A rate that is no
    better than its neighbour needs none on its other side.
    """
    wanted = sorted({*rates, *scores})
    if not scores.keys() >= set(wanted):
        return wanted, None
    best = max(wanted, key=lambda lr: scores[lr])
    if best == wanted[0] and scores[best] > scores[wanted[1]]:
        return [best / factor, *wanted], None
    if best == wanted[-1]:
        return [*wanted, factor * best], None
    return wanted, best


def effort(kept: Collection[Record]) -> str:
    """The hours that runs took, and on what."""
    hours = sum(record["processor_seconds"] for record in kept) / 3600
    return f"in {hours:.1f} hours of a core ({processors(kept)})"


def processors(kept: Collection[Record]) -> str:
    """The names of all processors that records were made on."""
    return " and ".join(sorted({record["processor"] for record in kept}))


def processor(device: torch.device) -> str:
    """The name of a GPU, or of the CPU with its vectors, which decide how sums are rounded."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"


def read(name: str, folder: Path = FOLDER) -> dict[str, dict[int, Trained]]:
    """The runs of a sweep, by variant and seed; empty without a file."""
    found: dict[str, dict[int, Trained]] = {}
    for record in by_name(folder / f"{name}.jsonl").values():
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
