"""The records of `--record-every`, as means over tokens by sublayer and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddl.lab.train.json_lines import Record, number
from ddl.recording import PER_CHANNEL, QUANTITIES

Row = list[float | None]  # None is unknown

SCALARS = {name: what for name, what in QUANTITIES.items() if name not in PER_CHANNEL}


class Training(NamedTuple):
    """recordings.jsonl of L sublayers at R steps.

    means: for the name of each quantity that was recorded, (L, R) means over tokens.
    """

    steps: list[int]
    sublayers: list[str]
    means: dict[str, list[Row]]


def training_of(records: Sequence[Record]) -> Training:
    """The means of records, one or more. Raises ValueError unless all have the same sublayers."""
    names = sublayers_of(records[-1])
    if any(sublayers_of(record) != names for record in records):
        raise ValueError("steps with different sublayers")
    means: dict[str, list[Row]] = {}
    for quantity in SCALARS:
        rows: list[Row] = [
            [number(record["sublayers"][i].get(quantity), "mean") for record in records]
            for i in range(len(names))
        ]
        if any(value is not None for row in rows for value in row):
            means[quantity] = rows
    return Training([record["step"] for record in records], names, means)


def sublayers_of(record: Mapping[str, Any]) -> list[str]:
    """The names of a record's sublayers; ValueError unless they are objects, at least one."""
    found = record.get("sublayers")
    if not isinstance(found, list) or not found or not all(isinstance(s, dict) for s in found):
        raise ValueError("no `sublayers`")
    return [str(sublayer.get("name")) for sublayer in found]
